"""Replicas of one thread each against one process with all threads: tokens/s of a compiled training step.

    python bench/train/processes/replicas_or_threads.py [--shapes 3x128/1024/8x512,6x384/8192/16x256] [--quick]

The planner takes a replica for each core. Bar: at no shape are threads faster than replicas.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from bench._run import claim, parse, smoke

from whorl.cli.jobs.machine import SHAPE
from whorl.machine.device_probe import probe
from whorl.machine.malloc import keep_freed_memory
from whorl.plan.cost import decoder_config
from whorl.train.job import Job
from whorl.train.profiling.step_timer import time_steps

SHAPES = "3x128/1024/8x512,3x192/1024/8x256,6x384/8192/16x256"
ROUNDS = 3


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--shapes", default=SHAPES)
        parser.add_argument("--rounds", type=int, default=ROUNDS)
        parser.add_argument("--seconds", type=float, default=3.0)
        parser.add_argument("--quick", action="store_true", help="the first shape, one short round")

    a = parse(__doc__, arguments, smoke={"shapes": "1x64/512/2x64", "rounds": 1, "seconds": 0.02})
    if a.quick:
        a.seconds = min(a.seconds, 1.0)
    keep_freed_memory()  # as in our replicas
    machine = probe()
    machine.apply()
    shapes, rounds = (a.shapes.split(",")[:1], 1) if a.quick else (a.shapes.split(","), a.rounds)
    for shape in shapes:
        match = SHAPE.fullmatch(shape)
        if match is None:
            sys.exit(f"--shapes {shape}: expected layers x width / vocabulary / rows x tokens")
        layers, width, vocabulary, rows, length = map(int, match.groups())
        cores = max(n for n in range(1, machine.cores + 1) if rows % n == 0)
        job = Job(
            tokens="", model=decoder_config(width, layers, vocabulary), seq_len=length, batch_size=rows, steps=1,
            dtype=machine.dtype, compile=not smoke(),
        )  # fmt: skip
        ways = {"replicas": {"replicas": cores, "threads": 1}, "threads": {"replicas": 1, "threads": cores}}
        speeds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, changes in ways.items():
                timing = time_steps(job.model_copy(update=changes), a.seconds)
                speeds[name].append(rows * length / timing.step_seconds)
        best = {name: max(values) for name, values in speeds.items()}
        claim(
            f"training step, {shape}: {cores} replicas against {cores} threads", ours=round(best["replicas"]),
            peer=round(best["threads"]), peer_name="threads", unit="tokens/s", ratio=best["replicas"] / best["threads"],
            bar=1.0, ok=best["replicas"] >= best["threads"], samples=[speeds], quick=a.quick,
            variant=shape.split("/")[0],
        )  # fmt: skip


if __name__ == "__main__":
    main()
