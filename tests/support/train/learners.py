"""Tiny networks, an objective, micro-batches and a learner for the learner tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from whorl.objectives.next_token import Loss
from whorl.parallel.process_group import ProcessGroup
from whorl.train.learner.learner import Learner, SharedState
from whorl.train.learner.loop import train_loop
from whorl.train.learner.update import MicroBatch, Update, all_adamw


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


def adamw_update(nets: nn.ModuleDict, lr: float = 0.05, name: str = "a", **options: Any) -> Update:
    """Minimise the squared error of one network."""
    return Update(squared(nets[name]), all_adamw(nets, lr, f"{name}."), **options)


def adamw_learner(
    nets: nn.ModuleDict,
    lr: float = 0.05,
    shared: SharedState | None = None,
    world: ProcessGroup | None = None,
    **options: Any,
) -> Learner:
    return Learner(nets, [adamw_update(nets, lr, **options)], shared, world)


def run(learner: Learner, parts: Sequence[MicroBatch], **more: Any) -> None:
    """One step on each part."""
    train_loop(learner, iter(parts), lambda p: [[p]], last=len(parts), **more)
