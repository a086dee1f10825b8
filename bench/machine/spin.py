"""Time of products and of training steps by how waiting threads of OpenMP spin, with busy processes and without.

    python bench/machine/spin.py [--rounds 20] [--turns 10000 3000 1000]
    python bench/machine/spin.py --quick      # fewer rounds

    default    libgomp's: 300,000 turns, some milliseconds
    N          GOMP_SPINCOUNT of N turns; the first one is the setting of Whorl (`whorl/__init__.py`)
    passive    OMP_WAIT_POLICY=PASSIVE: no turns

Each setting has a process with a thread on each core, since libgomp reads the variables as it is loaded. The processes
run in turn: products [2048, 192] x [192, 192], then SGD steps of a decoder with 3 layers of width 192 on 8 rows of 256
tokens. At the same time, 0, 1 or 2 other processes compute. A ratio is the median over the rounds of the
default's time by the setting's time. On a quiet machine, a step may lose 2 %.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from os import environ
from pathlib import Path
from statistics import median
from time import perf_counter

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench._run import claim, parse, sized, skip
from bench._turns import Gate, Turn

# This file imports whorl after torch: otherwise the variable would be set in the process of the default.
VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
PARTS = ("product", "step")
WIDTH, LAYERS, ROWS, LENGTH, VOCABULARY = 192, 3, 8, 256, 1024
ROUNDS, QUICK = {"rounds": 20, "products": 100, "steps": 4}, {"rounds": 4, "products": 50, "steps": 2}
SMOKE = {"rounds": 1, "products": 3, "steps": 1, "busy": [0, 1]}


def work(gate: Gate, products: int, steps: int) -> None:
    """Report the milliseconds of a product and of a training step, each the mean of a turn."""
    import torch
    from torch.nn.functional import cross_entropy

    from whorl.models import make_model, whorl_decoder

    rng = torch.Generator().manual_seed(0)
    a, b = torch.randn(ROWS * LENGTH, WIDTH, generator=rng), torch.randn(WIDTH, WIDTH, generator=rng)
    model = make_model(
        whorl_decoder(
            vocab_size=VOCABULARY,
            d_model=WIDTH,
            n_layers=LAYERS,
            n_heads=3,
            n_kv_heads=3,
            mlp_hidden=4 * WIDTH,
        ),
        rng,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    ids = torch.randint(VOCABULARY, (sized(ROWS, 1), LENGTH + 1), generator=rng)
    while True:
        began = perf_counter()
        for _ in range(products):
            torch.mm(a, b)
        between = perf_counter()
        for _ in range(steps):
            logits = model.logits(model(ids[:, :-1]))
            cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        ended = perf_counter()
        gate({"product": 1e3 * (between - began) / products, "step": 1e3 * (ended - between) / steps})


def turn(variables: dict[str, str], products: int, steps: int, threads: int) -> Turn:
    """Start the process of a setting."""
    before = {name: environ.pop(name) for name in VARIABLES if name in environ}
    environ.update(variables)
    try:
        return Turn(work, products, steps, threads=threads)
    finally:
        for name in variables:
            del environ[name]
        environ.update(before)


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def options(parser: argparse.ArgumentParser) -> None:
    import whorl  # imports nothing else

    parser.add_argument("--turns", type=int, nargs="+", default=[whorl.SPIN_COUNT], help="of waiting threads")
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1, 2], help="numbers of busy processes")
    for name, value in ROUNDS.items():
        parser.add_argument(f"--{name}", type=int, default=value)


def main() -> None:
    args = parse(__doc__, options, smoke=SMOKE, quick=QUICK)
    from whorl.machine.device_probe import usable_cores

    if (threads := usable_cores()) < 2:
        skip("one core: no thread waits for another; run it on at least two")
    settings = {
        "default": dict[str, str](),
        **{str(turns): {"GOMP_SPINCOUNT": str(turns)} for turns in args.turns},
        "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
    }
    ours = str(args.turns[0])
    turns = {
        name: turn(variables, args.products, args.steps, threads) for name, variables in settings.items()
    }
    try:
        for process in turns.values():
            process.step()  # not counted
        for busy in args.busy:
            with busy_processes(busy):
                times = {name: {part: list[float]() for part in PARTS} for name in turns}
                for _ in range(args.rounds):
                    for name, process in turns.items():
                        report = process.step().report
                        for part in PARTS:
                            times[name][part].append(report[part])
            ratios = {
                name: {part: median(map(_divide, times["default"][part], made[part])) for part in PARTS}
                for name, made in times.items()
            }
            for name, made in times.items():
                line = ", ".join(f"{p} {median(made[p]):.3f} ms ({ratios[name][p]:.3f} x)" for p in PARTS)
                print(f"{busy} busy processes, {name}: {line}", flush=True)
            bar, ratio = (0.98 if not busy else 1.0), ratios[ours]["step"]
            claim(
                f"training step with {ours} turns of waiting threads, with {busy} busy processes",
                ours=median(times[ours]["step"]), peer=median(times["default"]["step"]), unit="ms", ratio=ratio, bar=bar,
                ok=ratio >= bar, samples=[ratios], peer_name="libgomp's default", variant=f"{busy}_busy", quick=args.quick,
            )  # fmt: skip
    finally:
        for process in turns.values():
            process.close()


def _divide(default: float, made: float) -> float:
    return default / made


if __name__ == "__main__":
    main()
