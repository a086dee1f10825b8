"""Memory against time of activation checkpointing: all activations kept, only the blocks' inputs kept, and steps in between.

    python bench/train/activation_memory.py [--quick] [--shape 8x256/1024/8x512]

Each contender is the same model and job with another `activation_budget`. Blocks of steps run in turns; figures are
medians. The script reports for each contender the number of recomputed blocks, the bytes that autograd keeps (exact),
and the peak of all live tensors in one uncompiled step. It also reports the step time, uncompiled and (unless --quick)
compiled.

The claim: activations fall to at most a third, while a step takes at most 1.5 times as long. One more forward pass is a
third more arithmetic.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse, sized
from bench.train._live_tensors import peak_bytes

from whorl.machine.device_probe import probe
from whorl.models.activation_checkpointing import measure_activation_memory
from whorl.models.language_model import saved_bytes
from whorl.parallel.process_group import ProcessGroup
from whorl.plan.cost import decoder_config
from whorl.train.job import Job
from whorl.train.lm.build import allocate_shared, build_learner, build_model
from whorl.train.profiling.step_timer import random_batch

BYTES_BAR, TIME_BAR = 1 / 3, 1.5


class Contender:
    """A job with a budget, and its step times."""

    def __init__(self, job: Job) -> None:
        model = build_model(job)
        (self.update,) = build_learner(model, job, allocate_shared(model, job), ProcessGroup()).updates
        self.part, self.recomputed = random_batch(job, job.batch_size), model.checkpointed_blocks
        x, where = model.prepare(self.part["tokens"])
        trunk = torch.compile(model.trunk, dynamic=False) if job.compile else model.trunk
        own = [*model.parameters(), *model.buffers()]
        self.kept = saved_bytes(lambda: trunk(x.detach().requires_grad_(), where), own)
        self.step()
        self.peak = 0 if job.compile else peak_bytes(self.step)
        self.times: list[float] = []

    def step(self) -> None:
        self.update.accumulate(self.update.objective(self.part))
        self.update.step(1e-3)

    def time_steps(self, seconds: float) -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            began = time.perf_counter()
            self.step()
            self.times.append(time.perf_counter() - began)

    @property
    def seconds(self) -> float:
        return statistics.median(self.times)


def run_in_turns(
    make: Callable[[int], Job], budgets: list[int], rounds: int, seconds: float
) -> list[Contender]:
    """Contenders with `budgets`, timed in turns, in alternating order."""
    found = []
    for budget in budgets:
        torch.compiler.reset()
        found.append(Contender(make(budget)))
    for number in range(rounds):
        for contender in found if number % 2 else reversed(found):
            contender.time_steps(seconds)
    return found


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--quick", action="store_true")
        parser.add_argument("--shape", default="8x256/1024/8x512")

    a = parse(__doc__, arguments, smoke={"quick": True})
    text = "4x64/256/4x64" if a.quick else a.shape
    match = re.fullmatch(r"(\d+)x(\d+)/(\d+)/(\d+)x(\d+)", text)
    if match is None:
        sys.exit(f"--shape {text}: expected layers x width / vocabulary / rows x tokens")
    layers, width, vocabulary, rows, length = map(int, match.groups())
    machine = probe()
    machine.apply()
    base = Job(
        tokens="", model=decoder_config(width, layers, vocabulary), seq_len=length, batch_size=rows, steps=10**6,
        dtype=machine.dtype,
        device=machine.device, threads=machine.threads, compile=False,
    )  # fmt: skip
    kept = measure_activation_memory(build_model(base), length).at_rows(rows)
    counts = sorted({0, layers // 4, layers // 2, 3 * layers // 4, layers - 1})
    budgets = [kept.peak(count) for count in counts]
    samples = []
    eager: list[Contender] = []
    for compiled in (False,) if a.quick else (False, True):

        def job(budget: int, compiled: bool = compiled) -> Job:
            return base.model_copy(update={"activation_budget": f"{budget}B", "compile": compiled})

        found = run_in_turns(
            job, budgets, sized(2, 1) if a.quick else 5, sized(0.2, 0.02) if a.quick else 1.5
        )
        eager = eager or found
        for contender, budget in zip(found, budgets, strict=True):
            samples.append(
                {"compiled": compiled, "budget": budget, "recomputed": contender.recomputed, "kept": contender.kept,
                 "peak": contender.peak,
                 "seconds": round(contender.seconds, 5)}
            )  # fmt: skip
            print(
                f"{'compiled' if compiled else 'eager   '} budget {budget / 1e6:8.2f} MB: "
                f"{contender.recomputed} of {layers} blocks recomputed, "
                f"{contender.kept / 1e6:8.2f} MB kept, "
                + (f"{contender.peak / 1e6:8.2f} MB peak of a step, " if contender.peak else "")
                + f"{1e3 * contender.seconds:8.2f} ms per step ({contender.seconds / found[0].seconds:.2f} x)",
                flush=True,
            )
    least, all_ = eager[-1], eager[0]
    share, slower = least.kept / all_.kept, least.seconds / all_.seconds
    within = all(s["kept"] <= 1.002 * s["budget"] for s in samples)
    claim(
        "bytes of activations with checkpointing; step time at most 1.5 times, no budget exceeded", ours=least.kept,
        peer=all_.kept, peer_name="all activations kept", unit="bytes kept", ratio=share, bar=BYTES_BAR,
        ok=share <= BYTES_BAR and slower <= TIME_BAR and within,
        samples=[*samples, {"slower": round(slower, 3), "within": within}], quick=a.quick,
    )  # fmt: skip


if __name__ == "__main__":
    main()
