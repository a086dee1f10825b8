"""What the operating system can do for a training step: cores held fast, huge pages, another allocator, against the default.

    as it is     replicas on whichever core the kernel likes, small pages, glibc's allocator (`runs/machine.py` tunes it)
    pinned       each replica on a core of its own (`runs/pinning.py`)
    huge: torch  torch's allocator asks for huge pages (`runs/pages.py`), and what the learner holds is asked for too
    huge: glibc  the C library asks for them (GLIBC_TUNABLES=glibc.malloc.hugetlb=1)
    both         pinned, and torch's huge pages
    ALLOCATOR    jemalloc or tcmalloc by LD_PRELOAD, where the system has one

Some of these are decided when a process starts, so every contender is processes of its own (one replica a core), which wait
while it is not their turn. A round gives each a turn, there and back; of each, the median step over all rounds, and of each
round the ratio to the default's step of that round. The claim: nothing beats the default by 3 %; where it fails, it says
which setting to turn on. A fact beside the times: how many bytes lay on huge pages.

    python bench/train_system.py [--quick]          # about 3.5 minutes: two shapes of up to six contenders
"""

from __future__ import annotations

import argparse
import ctypes.util
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from _claim import claim

from whorl.plan.cost import shape
from whorl.runs import probe
from whorl.runs.machine import ram_bytes
from whorl.runs.pages import GLIBC_HUGE, HUGE_ALLOCATIONS, huge_bytes, setting
from whorl.runs.pinning import pinned
from whorl.train.learner import Shared
from whorl.train.pretrain import Job, build_model, learner_of, shared_of
from whorl.train.timing import random_part
from whorl.train.world import World, start_replicas

BAR = 1.03
# layers, width, vocabulary, rows, length: a quickstart's, and a middling one
SHAPES = {"small": (3, 128, 1024, 8, 512), "middling": (6, 384, 8192, 16, 256)}
QUICK = {"tiny": (1, 64, 256, 4, 64)}


def contenders() -> dict[str, tuple[dict[str, bool], dict[str, str]]]:
    """Name -> (fields of the job, environment)."""
    found: dict[str, tuple[dict[str, bool], dict[str, str]]] = {
        "as it is": ({}, {}),
        "pinned": ({"pin": True}, {}),
        "huge: torch": ({"huge_pages": True}, HUGE_ALLOCATIONS),
        "huge: glibc": ({}, GLIBC_HUGE),
        "both": ({"pin": True, "huge_pages": True}, HUGE_ALLOCATIONS),
    }
    for name in ("jemalloc", "tcmalloc"):
        if library := ctypes.util.find_library(name):
            found[name] = ({}, {"LD_PRELOAD": library})
    return found


def work(world: World, job: Job, shared: Shared) -> None:
    """What each replica does: steps for as long as rank 0 is told to. Rank 0 alone reads and writes."""
    import torch

    torch.set_num_threads(job.threads)
    (update,) = learner_of(build_model(job), job, shared, world).updates
    part = random_part(job, job.batch_rows // job.replicas)
    with pinned(world.rank, world.size, job.threads, on=job.pin):
        while True:
            asked = float(sys.stdin.readline() or -1) if world.rank == 0 else 0.0
            seconds = world.exchange(asked)[0][0]
            if seconds < 0:
                return
            began, times = time.perf_counter(), []
            while world.exchange(time.perf_counter() - began)[0][0] < seconds or not times:
                start = time.perf_counter()
                update.accumulate(update.objective(part))
                update.step(1e-3)
                times.append(time.perf_counter() - start)
            if world.rank == 0:
                print(json.dumps({"times": times, "huge": huge_bytes()}), flush=True)


def serve(text: str) -> None:
    """A contender: a job in, answers out."""
    job = Job.model_validate_json(text)
    shared = shared_of(build_model(job), job)
    world = start_replicas(job.replicas, work, job, shared)
    try:
        work(world, job, shared)
    finally:
        world.close()


class Contender:
    """Processes of one setting, which wait while it is not their turn."""

    def __init__(self, job: Job, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", job.model_dump_json()],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def turn(self, seconds: float) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{seconds}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a contender ended with status {self.process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def race(job: Job, rounds: int, seconds: float) -> dict[str, dict[str, Any]]:
    """Of each contender: median step, median ratio to the default's of the same round, bytes on huge pages."""
    racing = {
        name: Contender(job.model_copy(update=fields), environment)
        for name, (fields, environment) in contenders().items()
    }
    steps: dict[str, list[float]] = {name: [] for name in racing}
    huge = dict.fromkeys(racing, 0)
    try:
        for one in racing.values():  # what is compiled once, the others find
            one.turn(0.0)
        for number in range(rounds):
            for name in racing if number % 2 else reversed(racing):
                answer = racing[name].turn(seconds)
                steps[name].append(statistics.median(answer["times"]))
                huge[name] = answer["huge"]
    finally:
        for one in racing.values():
            one.close()
    base = steps["as it is"]
    return {
        name: {
            "seconds": statistics.median(each),
            "faster": statistics.median(b / s for b, s in zip(base, each, strict=True)),
            "huge_megabytes": round(huge[name] / 1e6, 1),
        }
        for name, each in steps.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--serve", metavar="JOB", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.serve:
        serve(a.serve)
        return
    machine = probe()
    print(
        f"{machine.cores} cores, {ram_bytes() / 1e9:.1f} GB; huge pages: {setting() or 'none'}, shared memory: "
        f"{setting('shmem_enabled') or 'none'}"
    )
    samples: list[dict[str, Any]] = []
    for size, (layers, width, vocabulary, rows, length) in (QUICK if a.quick else SHAPES).items():
        job = Job(
            tokens="", model=shape(width, layers, vocabulary), length=length, batch_rows=rows, steps=10**6,
            replicas=machine.cores if rows % machine.cores == 0 else 1, dtype=machine.dtype, compile=not a.quick,
        )  # fmt: skip
        found = race(job, 2 if a.quick else 6, 0.1 if a.quick else 2.0)
        for name, one in found.items():
            samples.append({"shape": size, "setting": name, **one})
            print(
                f"{size:9} {name:12} {1e3 * one['seconds']:8.2f} ms a step, {one['faster']:.3f} x as fast as it is, "
                f"{one['huge_megabytes']:7.1f} MB on huge pages",
                flush=True,
            )
    best = max(samples, key=lambda s: s["faster"])
    base = next(s for s in samples if s["shape"] == best["shape"] and s["setting"] == "as it is")
    claim(
        f"no setting of the system beats the default by 3 % (best: {best['setting']}, {best['shape']})",
        ours=base["seconds"],
        peer=best["seconds"],
        unit="s/step",
        ratio=best["faster"],
        bar=BAR,
        ok=best["faster"] <= BAR,
        samples=samples,
        quick=a.quick,
    )


if __name__ == "__main__":
    main()
