"""Data parallelism: equal to one process."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from whorl.errors import ConfigError
from whorl.parallel.explained.ddp import DDP
from whorl.parallel.ranks import run_ranks


class Toy(nn.Module):
    """With tied, frozen and unused parameters, a buffer, and a branch that only some rows take."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 8, bias=False)
        self.third = nn.Linear(8, 8, bias=False)
        self.branch = nn.Linear(8, 3)
        self.last = nn.Linear(8, 3)
        self.unused = nn.Linear(2, 2)
        self.first.bias.requires_grad_(False)
        self.register_buffer("shift", torch.randn(8))
        if tied:
            self.third.weight = self.second.weight

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.third(torch.relu(self.second(torch.relu(self.first(x))))) + self.shift)
        out = self.last(h)
        rare = x[:, 0] > 1
        return torch.where(rare[:, None], self.branch(h), out) if rare.any() else out


def data(steps: int, rows: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(steps, rows, 6, generator=torch.Generator().manual_seed(1)).clamp(max=0.9)
    x[1::2, 0, 0] = 2.0  # in each second step the first row, so rank 0 alone, uses the branch
    return x, torch.randn(steps, rows, 3, generator=torch.Generator().manual_seed(2))


def two_ranks() -> list[int]:
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = data(4, 8)
    counts = []
    for tied, sizes in ((False, (0, None)), (True, (0.0004,))):
        for bucket_mb in sizes:
            torch.manual_seed(0)
            one = Toy(tied)
            torch.manual_seed(rank)
            model = DDP(Toy(tied), bucket_mb)
            counts.append(len(model.buckets))
            optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05, weight_decay=0.5) for m in (one, model)]
            for step in range(4):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                nn.functional.mse_loss(one(x[step]), y[step]).backward()
                mine = slice(rank * 8 // world, (rank + 1) * 8 // world)
                _backwards(model, x[step, mine], y[step, mine], parts=2 if step == 2 else 1)
                for optimizer in optimizers:
                    optimizer.step()
                for (name, found), expected in zip(
                    model.module.named_parameters(), one.parameters(), strict=True
                ):
                    assert (found.grad is None) == (expected.grad is None), (name, step)
                    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
            assert torch.equal(model.module.shift, one.shift)
    model(x[0]).sum().backward()
    with pytest.raises(ConfigError, match="second backward"):
        model(x[0]).sum().backward()
    return counts


def _backwards(model: DDP, x: Tensor, y: Tensor, parts: int) -> None:
    for rows, labels in zip(x.chunk(parts), y.chunk(parts), strict=True):
        (nn.functional.mse_loss(model(rows), labels) / parts).backward()
        model.finish_gradient_synchronization()


def test_ddp_equals_one_process_for_each_size_of_buckets():
    counts = run_ranks(2, two_ranks)
    assert counts[0] == counts[1] == [9, 1, 3]
