"""States for checkpoint tests."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from whorl.train.checkpoint.format import save


def state(step: int = 1) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(step)
    return {
        "weights/a": torch.randn(300, 257, generator=rng),
        "weights/b": torch.randn(5, generator=rng).bfloat16(),
        "state/a/mean": torch.randn(300, 257, generator=rng).t(),  # not contiguous
        "buffers/scalar": torch.tensor(step),
        "buffers/none": torch.zeros(0, 4),
        "buffers/flags": torch.rand(7, generator=rng) < 0.5,
    }


def save_steps(folder: Path, *steps: int) -> None:
    for step in steps:
        save(folder, step, state(step), {})


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)
