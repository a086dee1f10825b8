"""Every acknowledged click is in the log and counted once, while processes are killed.

    python bench/loop/exact.py                                  # a million requests, 50 SIGKILLs, SQLite
    python bench/loop/exact.py --system postgresql --kills 10   # with Redis; also nats, kafka, noida

Clients send clicks (Zipf 1.1 over answers, unlikes, some requests twice) to the feedback route until each is acknowledged.
Meanwhile the API, `whorl loop` and the servers of log, views and cache are killed with SIGKILL and started again. At the end
the id of every 202 must be in the log, and every count must equal a count by brute force of the clicks as the clients sent
them. A replay into an empty store must give equal rows. `noida` is a broker that loses acknowledged records: the checks must
fail on it.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench._run import claim, parse
from bench.loop._system import Request, System, send_all, started, zipf_requests

from whorl.log import Log, open_log
from whorl.log.port import LogUnavailableError
from whorl.loop.counter import VIEWS
from whorl.loop.counter.cache import open_cache
from whorl.loop.counter.counts import Counts
from whorl.loop.counter.reconciliation import reconcile_counts
from whorl.loop.events import FEEDBACK
from whorl.loop.streams.runner import lag_of
from whorl.loop.streams.store import ViewStore, ViewsUnavailableError
from whorl.loop.streams.worker import ViewWorker

STALLED = 60.0  # seconds without an acknowledgement
SYSTEMS = ("sqlite", "postgresql", "nats", "kafka", "noida")


async def _wait(sending: asyncio.Task[None], acknowledged: set[str], n: float) -> None:
    """Wait for n acknowledgements, or the end, or a stall."""
    last, since = -1, time.monotonic()
    while len(acknowledged) < n and not sending.done() and time.monotonic() - since < STALLED:
        if len(acknowledged) > last:
            last, since = len(acknowledged), time.monotonic()
        await asyncio.sleep(0.01)


async def run_with_kills(
    system: System, requests: list[Request], args: argparse.Namespace
) -> tuple[set[str], Counter[str]]:
    """Send all clicks; kill processes evenly over them. Returns the acknowledged ids, and the kills by process."""
    acknowledged, killed, draw = set[str](), Counter[str](), random.Random(args.seed)
    sending = asyncio.create_task(send_all(system, requests, args.clients, args.repeat, acknowledged))
    for number in range(args.kills + 1):
        threshold = len(requests) * (number + draw.random() * (number < args.kills)) / max(1, args.kills)
        await _wait(sending, acknowledged, threshold)
        if number == args.kills or sending.done():
            break
        name = draw.choice(system.names)
        await asyncio.to_thread(system.kill, name)
        killed[name] += 1
        print(f"{len(acknowledged):>9,} acknowledged, killed {name}", file=sys.stderr, flush=True)
    if not sending.done():
        print(f"no acknowledgement for {STALLED:g} s", file=sys.stderr)
        sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    return acknowledged, killed


def wait_until_read(system: System, seconds: float) -> None:
    """Wait until all views have read the log."""
    deadline, lag = time.monotonic() + seconds, -1
    while lag != 0 and time.monotonic() < deadline:
        try:
            with open_log(system.urls["--log"]) as log, ViewStore(system.urls["--views"]) as store:
                lag = sum(lag_of(view, log, store) for view in VIEWS)
        except (LogUnavailableError, ViewsUnavailableError):
            lag = -1
        time.sleep(0.5)
    if lag:
        print(f"views are {lag} records behind after {seconds:g} s", file=sys.stderr)


def brute_force(requests: list[Request]) -> dict[str, dict[str, int]]:
    """Count the last click of each actor on each answer."""
    last = {(r.actor, r.completion): r.kind for r in requests}
    counts = {f"{r.completion}/0": {"likes": 0, "dislikes": 0} for r in requests}
    for (_, completion), kind in last.items():
        if kind != "none":
            counts[f"{completion}/0"][f"{kind}s"] += 1
    return counts


def rows(store: ViewStore) -> list[tuple[str, ...]]:
    return sorted(store.execute("SELECT view, name, key, value FROM view_rows"))


def replayed(log: Log) -> list[tuple[str, ...]]:
    """Fold the log from the start into an empty store; return its rows."""
    with ViewStore("sqlite::memory:") as store:
        for view in VIEWS:
            worker = ViewWorker(view, log, store)
            worker.reader = log.group(f"replay/{view.name}/{time.time()}", view.topics)
            for point in worker.steps():
                if point == "idle" and lag_of(view, log, store) == 0:
                    break
            worker.close()
        return rows(store)


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--system", choices=SYSTEMS, default="sqlite")
        parser.add_argument("--requests", type=int, default=1_000_000)
        parser.add_argument("--kills", type=int, default=50)
        parser.add_argument("--answers", type=int, default=10_000)
        parser.add_argument("--clients", type=int, default=32)
        parser.add_argument(
            "--repeat", type=float, default=0.05, help="share of requests that are sent twice"
        )
        parser.add_argument("--seed", type=int, default=0)

    args = parse(__doc__, arguments, smoke={"requests": 2000, "kills": 3, "answers": 100, "clients": 8})
    requests = zipf_requests(args.requests, args.answers, args.seed)
    with tempfile.TemporaryDirectory() as folder, started(args.system, Path(folder)) as system:
        began = time.monotonic()
        acknowledged, killed = asyncio.run(run_with_kills(system, requests, args))
        seconds = time.monotonic() - began
        wait_until_read(system, 120.0)
        with open_log(system.urls["--log"]) as log, ViewStore(system.urls["--views"]) as store:
            logged = {record.event().id for record in log.replay(FEEDBACK)}
            expected, cache = brute_force(requests), open_cache(system.urls.get("--cache", ""))
            found = Counts(store, cache).get(list(expected))
            wrong = [answer for answer, count in expected.items() if found[answer] != count]
            checks = {
                "never acknowledged": len({r.id for r in requests}) - len(acknowledged),
                "acknowledged and not in the log": len(acknowledged - logged), "wrong counts": len(wrong),
                "counts that differ from memberships": len(reconcile_counts(store, cache).wrong),
                "rows that a replay changes": len({*rows(store)} ^ {*replayed(log)}),
            }  # fmt: skip
    for name, n in checks.items():
        print(f"{name}: {n:,}")
    details = checks | {
        "kills": dict(killed),
        "acknowledged": len(acknowledged),
        "seconds": round(seconds, 1),
    }
    failed = any(checks.values())
    claim(
        f"{args.system}: exact counts after {args.requests:,} requests and {args.kills} SIGKILLs",
        ours=len(expected) - len(wrong), peer=len(expected), peer_name="brute force", unit="answers",
        ratio=1 - len(wrong) / len(expected), bar=1.0, ok=failed == (args.system == "noida"), samples=[details],
        variant="" if args.system == "sqlite" else args.system,
    )  # fmt: skip


if __name__ == "__main__":
    main()
