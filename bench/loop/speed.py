"""Speed of the like counter: commits per like, a burst of ten times the steady rate, and a viral answer.

    python bench/loop/speed.py [--rate 150] [--seconds 30]

Clicks go to the feedback route at a fixed rate, whether earlier ones were answered or not; latencies count from the
scheduled time. `whorl loop` folds them meanwhile.

1. commits of the count store per like, over the steady phase and the burst: at most 1/200;
2. ten times the rate for ten seconds: every request gets a 202, and the views have read everything within a minute;
3. p99 of clicks on one viral answer over p99 of clicks spread evenly, in turns: at most 1.5.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench._run import claim, parse
from bench.loop._system import HttpClient, Request, System, started, zipf_requests

from whorl.log import open_log
from whorl.loop.counter import VIEWS
from whorl.loop.streams.runner import lag_of, run_views
from whorl.loop.streams.store import ViewStore

CONNECTIONS = 64


def count_commits(log: str, views: str, path: str) -> None:
    """Run all views as `whorl loop` does, and write the number of batches of each view at the end."""
    commits, inner = Counter[str](), ViewStore.batch

    @contextmanager
    def batch(self: ViewStore, view: str, *args: object) -> Iterator[object]:
        with inner(self, view, *args) as state:  # type: ignore[arg-type]
            yield state
        commits[view] += 1
        Path(path).write_text(json.dumps(commits))

    ViewStore.batch = batch  # type: ignore[method-assign, assignment]
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    run_views([*VIEWS], log, views, perform=lambda effects: None, stop=stop)


async def send_at_rate(system: System, requests: Sequence[Request], rate: float) -> list[float]:
    """Send clicks at a rate; return the latency of each in seconds, infinite for one that was not accepted."""
    waiting: asyncio.Queue[tuple[float, Request]] = asyncio.Queue()
    latencies, loop = list[float](), asyncio.get_running_loop()

    async def connection() -> None:
        client = HttpClient(system.port)
        while True:
            scheduled, request = await waiting.get()
            try:
                status, _ = await client.post("/v1/feedback", request.body(system.secret))
            except (OSError, EOFError):
                status = 0
            latencies.append(loop.time() - scheduled if status == 202 else float("inf"))
            waiting.task_done()

    tasks = [asyncio.create_task(connection()) for _ in range(CONNECTIONS)]
    began = loop.time()
    for number, request in enumerate(requests):
        scheduled = began + number / rate
        if (pause := scheduled - loop.time()) > 0:
            await asyncio.sleep(pause)
        waiting.put_nowait((scheduled, request))
    await waiting.join()
    for task in tasks:
        task.cancel()
    return latencies


def renamed(requests: Sequence[Request], prefix: str) -> list[Request]:
    return [Request(f"{prefix} {r.id}", r.actor, r.completion, r.kind) for r in requests]


def wait_for_views(system: System, limit: float) -> float:
    """Return the seconds until all views have read the log."""
    began = time.monotonic()
    with open_log(system.urls["--log"]) as log, ViewStore(system.urls["--views"]) as store:
        while sum(lag_of(view, log, store) for view in VIEWS) and time.monotonic() - began < limit:
            time.sleep(0.1)
    return time.monotonic() - began


def p99(latencies: Sequence[float]) -> float:
    return float(np.percentile(latencies, 99)) * 1000


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--rate", type=float, default=150.0, help="clicks/s of the steady phase")
        parser.add_argument("--seconds", type=float, default=30.0, help="of the steady phase")
        parser.add_argument("--burst", type=float, default=10.0, help="seconds at ten times the rate")
        parser.add_argument("--rounds", type=int, default=5, help="of the viral and the even answers")

    args = parse(__doc__, arguments, smoke={"rate": 50.0, "seconds": 2.0, "burst": 1.0, "rounds": 1})
    with tempfile.TemporaryDirectory() as folder, started("sqlite", Path(folder), loop=__file__) as system:
        asyncio.run(
            HttpClient(system.port).send(Request("first", "actor 0", "completion-0", "like"), system.secret)
        )
        steady = zipf_requests(int(args.rate * args.seconds), 1000, 0)
        asyncio.run(send_at_rate(system, steady, args.rate))
        burst = renamed(zipf_requests(int(10 * args.rate * args.burst), 1000, 1), "burst")
        in_burst = asyncio.run(send_at_rate(system, burst, 10 * args.rate))
        drained = wait_for_views(system, 120.0)
        commits = json.loads(system.commits.read_text())["likes"]
        viral, even = list[list[float]](), list[list[float]]()
        for number in range(2 * args.rounds):
            kind, found = (("viral", viral), ("even", even))[number % 2]
            clicks = zipf_requests(int(5 * args.rate), 1 if kind == "viral" else 1000, number, exponent=0.0)
            found.append(asyncio.run(send_at_rate(system, renamed(clicks, f"{kind} {number}"), args.rate)))

    likes = len(steady) + len(burst)
    claim(
        "commits of the count store per like, steady rate and burst", ours=commits, peer=likes,
        peer_name="one commit per like", unit="commits", ratio=commits / likes, bar=1 / 200,
        ok=commits <= likes / 200, variant="commits",
    )  # fmt: skip
    refused = sum(latency == float("inf") for latency in in_burst)
    claim(
        f"seconds until the views have read a burst of {10 * args.rate:g} clicks/s for {args.burst:g} s, all with 202",
        ours=drained, peer=60.0, peer_name="a minute", unit="s", ratio=drained / 60, bar=1.0,
        ok=not refused and drained <= 60,
        samples=[{"refused": refused, "p50 ms": float(np.median(in_burst)) * 1000, "p99 ms": p99(in_burst)}],
        variant="burst",
    )  # fmt: skip
    ours, peer = (float(np.median([p99(round_) for round_ in rounds])) for rounds in (viral, even))
    claim(
        "p99 of a click on a viral answer", ours=ours, peer=peer, peer_name="clicks spread evenly", unit="ms",
        ratio=ours / peer, bar=1.5, ok=ours <= 1.5 * peer, variant="viral",
        samples=[{"viral": [p99(r) for r in viral], "even": [p99(r) for r in even]}],
    )  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:2] == ["--count"]:
        count_commits(*sys.argv[2:])
    else:
        main()
