"""Memory against time: a training step with all activations kept, with none but the blocks' inputs, and in between.

Each contender is the same model of the same job with another `activation_budget`; rounds of steps in turns, medians. Of
each: the blocks remade, the bytes that autograd keeps (a fact, not a timing), the peak of all tensors alive in one
uncompiled step, and the time of a step, uncompiled and (unless --quick) compiled. The claim: activations fall to
at most a third while a step grows by at most a half (in arithmetic a forward more is a third more).

    python bench/train/activation_memory.py [--quick] [--shape 8x256/1024/8x512]      # layers x width / vocabulary / rows x tokens
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
from bench._run import claim

from whorl.machine.device_probe import probe
from whorl.models.activation_checkpointing import measure_activation_memory, peak_bytes
from whorl.models.language_model import saved_bytes
from whorl.parallel.process_group import ProcessGroup
from whorl.plan.cost import decoder_config
from whorl.train.job import Job
from whorl.train.lm.pretrain import allocate_shared, build_learner, build_model
from whorl.train.profiling.step_timer import random_batch

BYTES_BAR, TIME_BAR = 1 / 3, 1.5


class Contender:
    """A job with a budget, ready to take steps."""

    def __init__(self, job: Job) -> None:
        model = build_model(job)
        (self.update,) = build_learner(model, job, allocate_shared(model, job), ProcessGroup()).updates
        self.part, self.remade = random_batch(job, job.batch_size), model.checkpointed_blocks
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

    def timed(self, seconds: float) -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            began = time.perf_counter()
            self.step()
            self.times.append(time.perf_counter() - began)

    @property
    def seconds(self) -> float:
        return statistics.median(self.times)


def race(make: Callable[[int], Job], budgets: list[int], rounds: int, seconds: float) -> list[Contender]:
    """Contenders with `budgets`, timed in turns, there and back."""
    found = []
    for budget in budgets:
        torch.compiler.reset()
        found.append(Contender(make(budget)))
    for number in range(rounds):
        for one in found if number % 2 else reversed(found):
            one.timed(seconds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--shape", default="8x256/1024/8x512")
    a = parser.parse_args()
    text = "4x64/256/4x64" if a.quick else a.shape
    match = re.fullmatch(r"(\d+)x(\d+)/(\d+)/(\d+)x(\d+)", text)
    if match is None:
        parser.error(f"--shape {text}: expected layers x width / vocabulary / rows x tokens")
    layers, width, vocabulary, rows, length = map(int, match.groups())
    machine = probe()
    machine.apply()
    base = Job(
        tokens="", model=decoder_config(width, layers, vocabulary), seq_len=length, batch_size=rows, steps=10**6, dtype=machine.dtype,
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

        found = race(job, budgets, 2 if a.quick else 5, 0.2 if a.quick else 1.5)
        eager = eager or found
        for one, budget in zip(found, budgets, strict=True):
            samples.append(
                {"compiled": compiled, "budget": budget, "remade": one.remade, "kept": one.kept, "peak": one.peak,
                 "seconds": round(one.seconds, 5)}
            )  # fmt: skip
            print(
                f"{'compiled' if compiled else 'eager   '} budget {budget / 1e6:8.2f} MB: {one.remade} of {layers} remade, "
                f"{one.kept / 1e6:8.2f} MB kept, "
                + (f"{one.peak / 1e6:8.2f} MB at the peak of a step, " if one.peak else "")
                + f"{1e3 * one.seconds:8.2f} ms a step ({one.seconds / found[0].seconds:.2f} x)",
                flush=True,
            )
    least, all_ = eager[-1], eager[0]
    share, slower = least.kept / all_.kept, least.seconds / all_.seconds
    within = all(s["kept"] <= 1.002 * s["budget"] for s in samples)
    claim(
        "activations at most a third, a step at most half as long again, no budget exceeded",
        ours=least.kept,
        peer=all_.kept,
        unit="bytes kept",
        ratio=share,
        bar=BYTES_BAR,
        ok=share <= BYTES_BAR and slower <= TIME_BAR and within,
        samples=[*samples, {"slower": round(slower, 3), "within": within}],
        quick=a.quick,
    )


if __name__ == "__main__":
    main()
