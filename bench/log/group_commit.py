"""Durable appends per second of 32 writers: with group commit, with one commit each, and persist-queue.

    python bench/log/group_commit.py

Every writer is a thread that appends one event of about 300 bytes after the other, and waits until it is on disk
(SQLite, WAL, `synchronous=FULL`). The first peer is the same log with one transaction for each append; the second is
`SQLiteQueue` of persist-queue (pip install persist-queue) at the same setting. The three take turns; a figure is the
median of its rounds.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse

from whorl.log import Event
from whorl.log.sqlite import SqliteLog
from whorl.log.writer import BATCH

TEXT = "x" * 100


def appends_a_second(append: Callable[[int, int], object], writers: int, seconds: float) -> float:
    """Appends a second by threads that call `append(writer, n)`."""
    end, counts = time.perf_counter() + seconds, [0] * writers

    def write(number: int) -> None:
        while time.perf_counter() < end:
            append(number, counts[number])
            counts[number] += 1

    began = time.perf_counter()
    threads = [threading.Thread(target=write, args=(n,)) for n in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - began)


def log_rate(batch: int, folder: str, writers: int, seconds: float) -> float:
    """Appends a second to a log whose transactions have at most `batch` events."""
    with SqliteLog(f"sqlite:{folder}/events.db", batch) as log:
        log.create("feedback")
        return appends_a_second(
            lambda w, n: log.append("feedback", Event("feedback.given", f"actor {w}", {"n": n, "text": TEXT})),
            writers, seconds,
        )  # fmt: skip


def queue_rate(folder: str, writers: int, seconds: float) -> float:
    """Appends a second to persist-queue."""
    from persistqueue import SQLiteQueue

    queue = SQLiteQueue(folder, multithreading=True)
    queue._putter.execute("PRAGMA synchronous=FULL")  # its default, made certain
    put = lambda w, n: queue.put({"type": "feedback.given", "key": f"actor {w}", "n": n, "text": TEXT})  # noqa: E731
    return appends_a_second(put, writers, seconds)


def main() -> None:
    args = parse(
        __doc__,
        lambda p: [
            p.add_argument("--writers", type=int, default=32),
            p.add_argument("--seconds", type=float, default=3.0, help="of each measurement"),
            p.add_argument("--rounds", type=int, default=5),
            p.add_argument(
                "--folder", help="on the disk to be measured; default the system's temporary folder"
            ),
        ],
        smoke={"seconds": 0.2, "rounds": 1},
        quick={"seconds": 2.0, "rounds": 3},
    )
    kinds: dict[str, Callable[[str], float]] = {
        "group": lambda folder: log_rate(BATCH, folder, args.writers, args.seconds),
        "single": lambda folder: log_rate(1, folder, args.writers, args.seconds),
    }
    if importlib.util.find_spec("persistqueue"):
        kinds["queue"] = lambda folder: queue_rate(folder, args.writers, args.seconds)
    else:
        print("persist-queue is left out: pip install persist-queue")
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(args.rounds):
        for kind, measure in kinds.items():
            with tempfile.TemporaryDirectory(dir=args.folder) as folder:
                found[kind].append(measure(folder))
    ours = median(found["group"])
    for kind, name, bar in (("single", "one commit each", 5.0), ("queue", "persist-queue", 2.0)):
        if kind not in found:
            continue
        ratio = median(a / b for a, b in zip(found["group"], found[kind], strict=True))
        claim(
            f"durable appends of {args.writers} writers with group commit", ours=round(ours), variant=kind,
            peer=round(median(found[kind])), peer_name=name, unit="appends/s", ratio=ratio, bar=bar, ok=ratio >= bar,
            samples=[[round(a), round(b)] for a, b in zip(found["group"], found[kind], strict=True)],
            quick=getattr(args, "quick", False),
        )  # fmt: skip


if __name__ == "__main__":
    main()
