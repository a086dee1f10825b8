"""Tiny networks, an objective and micro-batches for the learner tests."""

from __future__ import annotations

import torch
from torch import nn

from whorl.objectives.next_token import Loss
from whorl.train.learner.update import MicroBatch


def networks() -> nn.ModuleDict:
    torch.manual_seed(0)
    made = nn.ModuleDict({name: nn.Linear(2, 1) for name in ("a", "b", "target")})
    for p in made["target"].parameters():
        p.requires_grad_(False)
    return made


def squared(net: nn.Module):
    def objective(part: MicroBatch) -> Loss:
        error = (net(part["x"]) - part["y"]).square()
        return Loss(error.sum(), torch.tensor(float(len(error))), {"error": error.sum().detach()})

    return objective


def part(rows: int = 8, seed: int = 0) -> MicroBatch:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 2, generator=g)
    return {"x": x, "y": x.sum(dim=1, keepdim=True)}
