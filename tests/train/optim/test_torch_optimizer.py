"""`TorchOptimizer` against torch's AdamW and the optimizers it wraps."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from whorl.errors import ConfigError
from whorl.train.optim.optimizers import Muon
from whorl.train.optim.torch_optimizer import TorchOptimizer


def gradient(shape: torch.Size, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def start() -> list[nn.Parameter]:
    """The last is not contiguous."""
    return [nn.Parameter(gradient(torch.Size(s), 0)) for s in ((4, 3), (3,), ())] + [
        nn.Parameter(gradient(torch.Size((3, 5)), 1).t())
    ]


def test_torch_optimizer_adamw_matches_torch() -> None:
    """Groups, a scheduler, missing gradients, and a state dict that is loaded halfway."""
    ours, theirs = start(), start()
    made = []
    for params, kind in ((ours, TorchOptimizer), (theirs, torch.optim.AdamW)):
        groups = [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:], "lr": 0.03}]
        made.append(kind(groups, lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.0))
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in made]
    for step in range(12):
        if step == 6:
            state = copy.deepcopy(made[0].state_dict())
            made[0] = TorchOptimizer([{"params": ours[:2]}, {"params": ours[2:]}], lr=1.0, betas=(0.5, 0.5))
            made[0].load_state_dict(state)
            schedules[0] = torch.optim.lr_scheduler.ExponentialLR(made[0], 0.9, last_epoch=5)
            for group, theirs_group in zip(made[0].param_groups, made[1].param_groups, strict=True):
                group["lr"] = theirs_group["lr"]  # a schedule steps when it is made
        for n, (p, q) in enumerate(zip(ours, theirs, strict=True)):
            has_none = n == 1 and step in (0, 1, 4)
            p.grad = q.grad = None if has_none else gradient(p.shape, 100 * n + step)
        for optimizer, schedule in zip(made, schedules, strict=True):
            optimizer.step()
            schedule.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-5)


def test_torch_optimizer_muon_matches_muon() -> None:
    matrices = [nn.Parameter(gradient(torch.Size(s), 0)) for s in ((8, 6), (6, 8), (4, 4))]
    plain = {str(n): p.detach().clone() for n, p in enumerate(matrices)}
    muon, ours = (
        Muon([list(plain.items())], 0.05, weight_decay=0.2),
        TorchOptimizer(matrices, "muon", lr=0.05, weight_decay=0.2),
    )
    for step in range(4):
        gradients = {str(n): gradient(p.shape, 10 * step + n) for n, p in enumerate(matrices)}

        def loss(gradients: dict[str, Tensor] = gradients) -> float:
            for n, p in enumerate(matrices):
                p.grad = gradients[str(n)].clone()
            return 3.0

        assert ours.step(loss) == 3.0
        muon.step(gradients, 1.0)
    for n, p in enumerate(matrices):
        torch.testing.assert_close(p.detach(), plain[str(n)])


@pytest.mark.parametrize("name", ["muon", "soap"])
def test_torch_optimizer_takes_matrices_only(name: str) -> None:
    with pytest.raises(ConfigError, match="a matrix"):
        TorchOptimizer([nn.Parameter(torch.zeros(3))], name, lr=0.1)
    p = nn.Parameter(gradient(torch.Size((4, 3)), 0))
    before, optimizer = float(p.detach().square().sum()), TorchOptimizer([p], name, lr=0.05)
    for _ in range(5):
        optimizer.zero_grad()
        p.square().sum().backward()
        optimizer.step()
    assert float(p.detach().square().sum()) < before
