"""Time of one durable append: a direct call, the embedded log, and each broker.

    python bench/log/latency.py
    python bench/log/latency.py --url kafka=kafka://broker:9092

One thread appends events of about 300 bytes, one after the other, and waits for each. The direct call puts the event into
a list: the cost without a log. Brokers are private servers on loopback, as the tests start them, with the settings
that survive kill -9; those that are not installed are left out. `--url NAME=URL` measures another server. Tansu keeps its
records in memory here, so that its figure is a lower bound.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse
from tests.support.log.servers import running

from whorl.log import Event, open_log

TEXT = "x" * 100


def percentiles(append: Callable[[Event], object], n: int) -> tuple[float, float]:
    """p50 and p99 of one append in ms."""
    times = []
    for i in range(n + n // 10):
        event = Event("feedback.given", f"actor {i % 100}", {"n": i, "text": TEXT})
        began = time.perf_counter()
        append(event)
        times.append(time.perf_counter() - began)
    p50, p99 = np.percentile(times[n // 10 :], [50, 99]) * 1000
    return float(p50), float(p99)


def main() -> None:
    args = parse(
        __doc__,
        lambda p: [
            p.add_argument("-n", type=int, default=2000, help="appends to each"),
            p.add_argument("--url", action="append", default=[], metavar="NAME=URL"),
            p.add_argument("--folder", help="of the embedded log; default the system's temporary folder"),
        ],
        smoke={"n": 50},
        quick={"n": 500},
    )
    calls: list[Event] = []
    found = {"direct call": percentiles(calls.append, args.n)}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=args.folder))
        urls = {"sqlite": f"sqlite:{folder}/events.db"} | dict(each.split("=", 1) for each in args.url)
        for kind in ("postgresql", "nats", "kafka"):
            if kind not in urls:
                try:
                    urls[kind] = stack.enter_context(running(kind)).url
                except pytest.skip.Exception as error:
                    print(f"{kind} is left out: {error}")
        for name, url in urls.items():
            with open_log(url) as log:
                log.create("latency")
                found[name] = percentiles(lambda event, log=log: log.append("latency", event), args.n)
    for name, (p50, p99) in found.items():
        print(f"{name:<12} p50 {p50:9.4f} ms   p99 {p99:9.4f} ms")
    ours = found.pop("sqlite")
    for name, (p50, p99) in found.items():
        claim(
            f"one durable append to the embedded log against {name}", ours=round(ours[0], 4), peer=round(p50, 4),
            peer_name=name, variant=name.replace(" ", "_"), unit="ms", ratio=ours[0] / p50, bar=0.0, ok=True,
            samples=[[round(v, 4) for v in ours], [round(p50, 4), round(p99, 4)]], quick=getattr(args, "quick", False),
        )  # fmt: skip


if __name__ == "__main__":
    main()
