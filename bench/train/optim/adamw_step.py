"""AdamW's step: ours (one pass per line of the formula), ours with torch's fused kernel, and torch's two implementations.

    python bench/train/optim/adamw_step.py [--quick]

The sizes are those of an agent (a dozen small tensors) and of the tensors that AdamW trains in a language model of 10 M
parameters (embedding and head; with `optim.optimizer = "adamw"` all of it). Gradients are given; only `step` is timed.
All four run in turns for many rounds; figures are medians. Before that, all take the same 20 steps and must agree.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[3]))
from bench._run import claim, parse_quick, sized

from whorl.train.optim.optimizers import AdamW

RATE, BETAS, EPS = 1e-3, (0.9, 0.95), 1e-12  # so small that its place in the formula changes no weight
SHAPES = {
    "agent": [(64, 8), (64,), (64, 64), (64,), (4, 64), (4,)] * 2,
    "10 M": [(8192, 384), (8192, 384)] + [(384, 384), (1536, 384), (384, 1536), (384,)] * 3,
}


def contiguous(shapes: list[tuple[int, ...]]) -> dict[str, Tensor]:
    """Zeros of these shapes in one contiguous piece of memory, as in a learner with one replica."""
    sizes = [torch.Size(s).numel() for s in shapes]
    parts = torch.split(torch.zeros(sum(sizes)), sizes)
    return {str(n): part.view(s) for n, (s, part) in enumerate(zip(shapes, parts, strict=True))}


class Contender:
    """Weights, gradients and one way to take a step."""

    def __init__(self, kind: str, shapes: list[tuple[int, ...]]) -> None:
        g = torch.Generator().manual_seed(0)
        self.weights, gradients = contiguous(shapes), contiguous(shapes)
        for part in (self.weights, gradients):
            for t in part.values():
                t.copy_(torch.randn(t.shape, generator=g))
        self.step: Callable[[], object]
        if kind.startswith("ours"):
            moments = {f"{n}/{m}": t for m in ("mean", "square") for n, t in contiguous(shapes).items()}
            ours = AdamW(
                list(self.weights.items()), dict.fromkeys(self.weights, RATE), betas=BETAS, eps=EPS,
                fused=kind == "ours, fused", allocate=lambda name, _: moments[name],
            )  # fmt: skip
            self.step = lambda: ours.step(gradients, 1.0)
        else:
            params = [torch.nn.Parameter(w) for w in self.weights.values()]
            for p, gradient in zip(params, gradients.values(), strict=True):
                p.grad = gradient
            fused = kind == "torch, fused"
            torchs = torch.optim.AdamW(
                params, lr=RATE, betas=BETAS, eps=EPS, weight_decay=0.0, fused=fused, foreach=not fused
            )
            self.step = torch.no_grad()(torchs.step)


KINDS = ("ours", "ours, fused", "torch, foreach", "torch, fused")


def measure(size: str, rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds per step of each contender in each round."""
    contenders = {kind: Contender(kind, SHAPES[size]) for kind in KINDS}
    for _ in range(20):
        for each in contenders.values():
            each.step()
    for each in contenders.values():
        for name, w in each.weights.items():
            torch.testing.assert_close(w, contenders["ours"].weights[name], atol=1e-5, rtol=1e-4)
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(rounds):
        for kind in KINDS[number % 4 :] + KINDS[: number % 4]:
            began = time.perf_counter()
            for _ in range(steps):
                contenders[kind].step()
            times[kind].append((time.perf_counter() - began) / steps)
    return times


def main() -> None:
    quick = parse_quick(__doc__)
    torch.set_num_threads(1)
    rounds = sized(5, 1) if quick else 21
    found = {
        "agent": measure("agent", rounds, 50 if quick else 500),
        "10 M": measure("10 M", rounds, 1 if quick else 4),
    }
    medians = {size: {k: statistics.median(t) for k, t in times.items()} for size, times in found.items()}
    for size, each in medians.items():
        print(f"{size:>6}: " + "; ".join(f"{kind} {1e6 * seconds:,.0f} us" for kind, seconds in each.items()))
    ratios = {
        size: min(each["torch, foreach"], each["torch, fused"]) / each["ours"]
        for size, each in medians.items()
    }
    claim(
        "AdamW's step for an agent",
        ours=medians["agent"]["ours"],
        peer=min(medians["agent"]["torch, foreach"], medians["agent"]["torch, fused"]),
        peer_name="the faster of torch's two",
        unit="s/step",
        ratio=ratios["agent"],
        bar=1.0,
        ok=ratios["agent"] >= 1.0,
        samples=[{size: {k: round(v, 8) for k, v in each.items()}} for size, each in medians.items()],
        quick=quick,
    )  # fmt: skip


if __name__ == "__main__":
    main()
