"""Seconds of identical training steps in fresh processes, with one cause of variation removed at a time.

    python bench/train/processes/step_variation.py [--shape 3x128/1024/8x512] [--processes 8]
    python bench/train/processes/step_variation.py --quick     # the defaults only; fp32 on a CPU that emulates bf16

Each process times the same compiled step with a replica for each core. Settings alternate. `defaults` is as in `whorl run`:
freed memory is kept, and arrays have huge pages. The rate of a bf16 product is measured in each process too: what varies
with it comes from the machine, and not from the program. Bar: with the defaults the slowest process takes at most 1.15 times
the fastest.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[3]))
from bench._run import ROOT, claim, emulates_bf16, parse, smoke

SETTINGS: dict[str, dict[str, str]] = {
    "defaults": {"THP_MEM_ALLOC_ENABLE": "1"},
    "small pages": {"THP_MEM_ALLOC_ENABLE": "0", "WHORL_BENCH_TRIM": "1"},
    "threads in place of replicas": {"THP_MEM_ALLOC_ENABLE": "1", "WHORL_BENCH_THREADS": "1"},
}
PROGRAM = """
import json, os, sys, time
import torch
from whorl.cli.jobs.machine import SHAPE
from whorl.machine.device_probe import usable_cores
from whorl.machine.malloc import keep_freed_memory
from whorl.plan.cost import decoder_config
from whorl.train.job import Job
from whorl.train.profiling.step_timer import time_steps

if not os.environ.get("WHORL_BENCH_TRIM"):
    keep_freed_memory()
layers, width, vocabulary, rows, length = map(int, SHAPE.fullmatch(sys.argv[1]).groups())
cores = max(n for n in range(1, usable_cores() + 1) if rows % n == 0)
threads = bool(os.environ.get("WHORL_BENCH_THREADS"))
a = torch.randn(2048, 2048).to(getattr(torch, sys.argv[4]))
def gemm():
    times = []
    for _ in range(5):
        began = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - began)
    return 2 * 2048**3 / min(times)
rates = [gemm()]
job = Job(tokens="", model=decoder_config(width, layers, vocabulary), seq_len=length, batch_size=rows, steps=1,
          dtype=sys.argv[4], compile=sys.argv[2] == "compiled", replicas=1 if threads else cores,
          threads=cores if threads else 1)
seconds = time_steps(job, float(sys.argv[3])).step_seconds
rates.append(gemm())
print(json.dumps({"ms": 1e3 * seconds, "gemm": sum(rates) / 2}))
"""


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--shape", default="3x128/1024/8x512")
        parser.add_argument("--processes", type=int, default=8)
        parser.add_argument("--seconds", type=float, default=1.5)
        parser.add_argument(
            "--quick",
            action="store_true",
            help="three processes of the defaults only",
        )

    a = parse(__doc__, arguments, smoke={"shape": "1x64/512/2x64", "processes": 1, "seconds": 0.02})
    settings = {"defaults": SETTINGS["defaults"]} if a.quick else SETTINGS
    found: dict[str, list[dict[str, float]]] = {name: [] for name in settings}
    dtype = "float32" if (a.quick or smoke()) and emulates_bf16() else "bfloat16"
    for _ in range(3 if a.quick else a.processes):
        for name, variables in settings.items():
            how = "eager" if smoke() else "compiled"
            done = subprocess.run(
                [sys.executable, "-c", PROGRAM, a.shape, how, str(a.seconds), dtype], env=os.environ | variables, cwd=ROOT,
                capture_output=True, text=True, check=True,
            )  # fmt: skip
            found[name].append(json.loads(done.stdout.splitlines()[-1]))
    for name, runs in found.items():
        times, rates = [r["ms"] for r in runs], [r["gemm"] for r in runs]
        work = [t * r for t, r in zip(times, rates, strict=True)]
        print(
            f"{name}: {min(times):.1f} to {max(times):.1f} ms, median {median(times):.1f}; {dtype} product "
            f"{min(rates) / 1e9:,.0f} to {max(rates) / 1e9:,.0f} GFLOP/s; time x rate varies by {max(work) / min(work):.2f}",
            flush=True,
        )
    slowest, fastest = max(r["ms"] for r in found["defaults"]), min(r["ms"] for r in found["defaults"])
    claim(
        f"training step, {a.shape}: slowest of {len(found['defaults'])} processes against the fastest",
        ours=round(slowest, 2), peer=round(fastest, 2), peer_name="fastest", unit="ms", ratio=slowest / fastest, bar=1.15,
        ok=slowest / fastest <= 1.15, samples=[found], quick=a.quick,
    )  # fmt: skip


if __name__ == "__main__":
    main()
