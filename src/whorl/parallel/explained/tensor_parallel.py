"""Tensor parallelism: a column-parallel and a row-parallel linear layer, with one all-reduce in each direction.

    up, down = ColumnLinear(mlp.up), RowLinear(mlp.down)        # from layers that are equal on all ranks
    y = down(relu(up(x)))                                       # x and y are whole on every rank, the middle is 1 / n

Column: a rank has 1 / n of the output features, and the gradient of x is a sum over ranks. Row: it has 1 / n of the input
features, and the output is a sum over ranks (Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053, section 3).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear

from whorl.errors import ConfigError


class _Column(torch.autograd.Function):
    """x W^T + b. The gradient of x is summed over ranks while that of W is computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad_x = (grad @ weight).contiguous()
        work = dist.all_reduce(grad_x, async_op=True)
        rows = grad.reshape(-1, grad.shape[-1])
        grad_weight = rows.T @ x.reshape(-1, x.shape[-1]) if ctx.needs_input_grad[1] else None
        work.wait()
        return grad_x, grad_weight, rows.sum(0) if ctx.needs_input_grad[2] else None


class _Sum(torch.autograd.Function):
    """The sum over ranks. Its gradient is the same on all ranks, so it passes unchanged."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor) -> Tensor:
        total = partial.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad


class _Linear(nn.Module):
    def __init__(self, full: nn.Linear) -> None:
        super().__init__()
        dim, ranks = int(isinstance(self, RowLinear)), dist.get_world_size()
        size = full.weight.shape[dim]
        if size % ranks:
            below = size - size % ranks
            raise ConfigError(
                f"{('out', 'in')[dim]}_features {size} does not divide by {ranks} ranks",
                expected=f"{below or ranks} or {below + ranks}",
            )

        def part(tensor: Tensor) -> nn.Parameter:
            return nn.Parameter(
                tensor.detach().chunk(ranks, dim)[dist.get_rank()].clone(), tensor.requires_grad
            )

        self.weight = part(full.weight)
        self.bias = full.bias if dim or full.bias is None else part(full.bias)


class ColumnLinear(_Linear):
    """[.., in] -> [.., out / n]: this rank's output features of a linear layer, which must divide by the ranks."""

    def forward(self, x: Tensor) -> Tensor:
        return _Column.apply(x, self.weight, self.bias)  # type: ignore[no-any-return, no-untyped-call]


class RowLinear(_Linear):
    """[.., in / n] -> [.., out]: the sum of what each rank's input features give, and the bias once."""

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = _Sum.apply(linear(x, self.weight))  # type: ignore[no-untyped-call]
        return total if self.bias is None else total + self.bias
