"""Simulated histories of the views: 10,000 seeds without a violation, and six planted faults that are found.

    python bench/loop/simulated.py [--seeds 10000]

`loop/simulation.py` describes the world; `tests/support/loop/faults.py` plants the faults.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections import Counter
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench._run import claim, parse
from tests.support.loop.faults import FAULTS

from whorl.loop.simulation import SimulatedWorld
from whorl.machine.device_probe import usable_cores


def history(seed: int) -> tuple[list[str], dict[str, int]]:
    world = SimulatedWorld(seed)
    return [f"seed {seed}: {violation}" for violation in world.run()], world.points


def main() -> None:
    args = parse(
        __doc__, lambda parser: parser.add_argument("--seeds", type=int, default=10_000), smoke={"seeds": 100}
    )
    began, found, points = time.monotonic(), list[str](), Counter[str]()
    with multiprocessing.get_context("spawn").Pool(usable_cores()) as pool:
        for violations, own in pool.imap_unordered(history, range(args.seeds), chunksize=20):
            found += violations
            points.update(own)
    seconds = time.monotonic() - began
    print(f"{args.seeds:,} histories in {seconds:.0f} s: {dict(points)}", *found, sep="\n")
    first = {fault.__name__: next(seed for seed in count() if fault(seed).run()) for fault in FAULTS}
    print(f"first seed that finds each fault: {first}")
    claim(
        f"violations in {args.seeds:,} simulated histories", ours=len(found), peer=len(FAULTS),
        peer_name="planted faults found", unit="violations", ratio=float(len(found)), bar=0.0, ok=not found,
        samples=[{"seconds": round(seconds, 1), "points": dict(points), "first seed of each fault": first}],
    )  # fmt: skip


if __name__ == "__main__":
    main()
