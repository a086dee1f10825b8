"""The four decisions of the like counter, each reversed, and the damage in numbers.

    python bench/loop/decisions.py

| decision | reversed | damage |
|---|---|---|
| the relationship is stored separately from its aggregate | a counter alone: like + 1, unlike - 1 | wrong counts |
| counts are eventual | each request changes the count row in its own transaction | likes/s |
| the log comes first | the count first, then the log; both may be cut off by a crash | clicks that a rebuild loses |
| everything is idempotent | deliveries are added blindly | clicks counted twice after crashes |

Both sides of a row get the same clicks: Zipf 1.1 over answers, one request in twenty sent again.
"""

from __future__ import annotations

import argparse
import queue
import random
import sqlite3
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench._run import claim, parse
from bench.loop._system import Request, zipf_requests
from bench.loop.exact import brute_force

from whorl.log import Event, open_log
from whorl.log.memory import MemoryLog
from whorl.loop.counter.cache import LocalCache
from whorl.loop.counter.counts import Counts
from whorl.loop.counter.likes import LikesView
from whorl.loop.events import FEEDBACK, FeedbackGiven, create_topics
from whorl.loop.streams.store import ViewStore
from whorl.loop.streams.worker import ViewWorker

CRASH = 0.001  # of a process, for each request or batch
Likes = dict[str, int]


def sent_again(requests: Sequence[Request], share: float = 0.05) -> list[Request]:
    """Return the requests as a server gets them: some twice."""
    draw = random.Random(0)
    return [r for r in requests for _ in range(1 + (draw.random() < share))]


def event_of(request: Request) -> Event:
    return FeedbackGiven(request.actor, request.completion, request.kind).event(request.id, 1e9)


def fold(log: MemoryLog, crashes: int = 0) -> Likes:
    """Return likes by the view; kill its worker between the commit and the commit to the group, `crashes` times."""
    store = ViewStore("sqlite::memory:")
    for kill in [True] * crashes + [False]:
        worker = ViewWorker(LikesView(), log, store, limit=500)
        for point in worker.steps():
            if point == "idle" or (kill and point == "folded"):
                break
        if not kill:
            worker.close()
        log.put_document("group/view/likes", b"", log.document("group/view/likes")[1])  # its session is over
    answers = list(store.scan("likes", "counts"))
    return {answer: count["likes"] for answer, count in Counts(store, LocalCache()).get(answers).items()}


def filled(deliveries: Sequence[Request]) -> MemoryLog:
    log = MemoryLog()
    create_topics(log)
    for start in range(0, len(deliveries), 1000):
        log.append(FEEDBACK, *(event_of(r) for r in deliveries[start : start + 1000]))
    return log


def wrong(found: Likes, expected: Likes) -> int:
    """Return the likes that differ, summed over answers."""
    return sum(
        abs(found.get(answer, 0) - expected.get(answer, 0)) for answer in found.keys() | expected.keys()
    )


def report(
    variant: str, what: str, ours: float, reversed_: float, unit: str, *, ok: bool, detail: dict[str, float]
) -> None:
    print(f"{variant}: {ours:,.0f} as built, {reversed_:,.0f} reversed, {unit}")
    ratio = ours / reversed_ if reversed_ else 0.0
    claim(
        what, ours=ours, peer=reversed_, peer_name="the decision reversed", unit=unit, ratio=ratio, bar=1.0, ok=ok,
        samples=[detail], variant=variant,
    )  # fmt: skip


def relationship(requests: Sequence[Request], expected: Likes) -> None:
    deliveries, counter, last = sent_again(requests), Counter[str](), dict[tuple[str, str], str]()
    for r in deliveries:  # a page takes its like back once; a reload or another device likes again
        before = last.get((r.actor, r.completion), "none")
        counter[f"{r.completion}/0"] += (r.kind == "like") - (before == "like" and r.kind != "like")
        last[r.actor, r.completion] = r.kind
    ours, other = wrong(fold(filled(deliveries)), expected), wrong(dict(counter), expected)
    detail = {"likes": sum(expected.values()), "deliveries": len(deliveries)}
    report(
        "relationship", "likes that are counted wrongly without memberships", ours, other, "likes",
        ok=ours == 0 < other, detail=detail,
    )  # fmt: skip


def eventual(requests: Sequence[Request], folder: Path, writers: int) -> None:
    """Time the acknowledgement of each click: appended to the log, or counted in its own transaction."""

    def run(work: Callable[[], Callable[[Request], object]]) -> float:
        waiting: queue.SimpleQueue[Request] = queue.SimpleQueue()
        for request in requests:
            waiting.put(request)

        def write() -> None:
            do = work()
            while True:
                try:
                    do(waiting.get_nowait())
                except queue.Empty:
                    return

        threads = [threading.Thread(target=write) for _ in range(writers)]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return len(requests) / (time.perf_counter() - began)

    with open_log(f"sqlite:{folder / 'events.db'}") as log:
        create_topics(log)
        ours = run(lambda: lambda request: log.append(FEEDBACK, event_of(request)))
    path = folder / "counts.db"

    def connect() -> sqlite3.Connection:
        opened = sqlite3.connect(path, timeout=60, isolation_level=None)
        opened.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL")
        return opened

    connect().execute("CREATE TABLE counts (answer TEXT PRIMARY KEY, likes INTEGER)")

    def at_once() -> Callable[[Request], object]:
        database = connect()
        query = "INSERT INTO counts VALUES (?, 1) ON CONFLICT DO UPDATE SET likes = likes + 1"
        return lambda request: database.execute(query, (request.completion,))

    other = run(at_once)
    report(
        "eventual", f"clicks/s of {writers} writers, appended to the log or counted at once", ours, other, "likes/s",
        ok=ours > other, detail={"clicks": len(requests)},
    )  # fmt: skip


def log_first(requests: Sequence[Request], expected: Likes) -> None:
    """Crash between two writes of a request. Log first: the client sends again. Count first: it was answered."""
    draw, log, counted, lost = random.Random(1), MemoryLog(), Counter[str](), 0
    create_topics(log)
    for r in requests:
        if draw.random() >= CRASH:
            log.append(FEEDBACK, event_of(r))
        else:
            lost += 1
        counted[f"{r.completion}/0"] += r.kind == "like"
    rebuilt = fold(log)
    ours, other = wrong(fold(filled(requests)), expected), wrong(rebuilt, expected)
    report(
        "log_first", "likes that a rebuild from the log gets wrong", ours, other, "likes", ok=ours == 0 < other,
        detail={"clicks counted and not logged": lost},
    )  # fmt: skip


def idempotence(requests: Sequence[Request], expected: Likes, crashes: int) -> None:
    log = filled(sent_again(requests))
    ours = wrong(fold(log, crashes), expected)
    blind, state, draw = Counter[str](), dict[tuple[str, str], str](), random.Random(2)
    batches = [requests[start : start + 500] for start in range(0, len(requests), 500)]
    again = set(draw.sample(range(len(batches)), min(crashes, len(batches))))
    for number, batch in enumerate(batches):
        delta = Counter[str]()
        for r in batch:
            delta[f"{r.completion}/0"] += (r.kind == "like") - (state.get((r.actor, r.completion)) == "like")
            state[r.actor, r.completion] = r.kind
        for _ in range(1 + (number in again)):  # killed before its offset was committed, and delivered again
            for answer, likes in delta.items():
                blind[answer] += likes
    other = wrong(dict(blind), expected)
    report(
        "idempotence", f"likes that are counted wrongly after {crashes} crashes of the aggregator", ours, other, "likes",
        ok=ours == 0 < other, detail={"batches delivered twice": len(again)},
    )  # fmt: skip


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--requests", type=int, default=100_000)
        parser.add_argument("--answers", type=int, default=10_000)
        parser.add_argument("--writers", type=int, default=32)
        parser.add_argument("--crashes", type=int, default=20)

    args = parse(__doc__, arguments, smoke={"requests": 5000, "answers": 200, "writers": 8, "crashes": 3})
    requests = zipf_requests(args.requests, args.answers, 0)
    expected = {answer: count["likes"] for answer, count in brute_force(requests).items()}
    relationship(requests, expected)
    log_first(requests, expected)
    idempotence(requests, expected, args.crashes)
    with tempfile.TemporaryDirectory() as folder:
        eventual(requests[: args.requests // 5], Path(folder), args.writers)


if __name__ == "__main__":
    main()
