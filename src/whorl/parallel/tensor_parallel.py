"""Tensor parallelism with sequence parallelism: how one rank of an axis holds a part of each matrix.

    x [B, T / tp, d] --norm--> gather T --> column-split product --> heads, hidden units of this rank
                                            row-split product    --> sum over ranks, this rank's T / tp positions

Shoeybi et al. 2019 (arXiv:1909.08053, section 3); positions outside of the products are split, too: Korthikanti et al. 2022
(arXiv:2205.05198, section 4.2.2). Embedding and head are split by vocabulary; the loss exchanges three numbers per token.

Everything is local tensors: CPU kernels and custom functions have no rules for DTensors. Gradients of parameters that all
ranks hold are sums over this rank's positions only, and are summed over the axis after the backward (`Shard.partial`).

`reduce_scatter` is an all-to-all and a local sum in rank order: gloo's own is several times slower, and the order makes the
bits of a run repeatable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.nn import functional as F

FIRST = "first"  # held by the first rank of the axis alone: the bias of a row-split product is added once


@dataclass(frozen=True)
class Shard:
    """How a parameter is held on the tensor axis.

    dim: that is split; None: every rank holds the whole; or FIRST.
    sections: lengths along `dim` that are split each, as queries, keys and values of one matrix; empty: the whole length.
    padded: to a multiple of the ranks, with zeros.
    partial: a whole parameter; each rank has the gradient of its positions only.
    """

    dim: int | str | None = None
    sections: tuple[int, ...] = ()
    padded: bool = False
    partial: bool = False

    def ranges(self, length: int, rank: int, size: int) -> list[tuple[int, int]]:
        """Return (start, stop) of this rank's parts along `dim` of a whole parameter, without padding."""
        found, start = [], 0
        for section in self.sections or (length,):
            own = -(-section // size)
            low, high = (min(start + own * r, start + section) for r in (rank, rank + 1))
            found.append((low, high))
            start += section
        return found

    def take(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """Return a copy of this rank's part."""
        if not isinstance(self.dim, int):
            return whole.clone()
        dim, length = self.dim, whole.shape[self.dim]
        parts = [whole.narrow(dim, a, b - a) for a, b in self.ranges(length, rank, size)]
        part = torch.cat(parts, dim)
        missing = -(-length // size) - part.shape[dim] if self.padded else 0
        return torch.cat([part, part.new_zeros(missing, *part.shape[1:])]) if missing else part


def gather_tensor(x: Tensor, group: dist.ProcessGroup, dim: int = 1) -> Tensor:
    """Return the x of all ranks, joined along `dim`."""
    parts: Tensor = collectives.all_gather_single(x.movedim(dim, 0).contiguous(), 0, group)
    return parts.movedim(0, dim)


def reduce_scatter_tensor(x: Tensor, group: dist.ProcessGroup, dim: int = 1) -> Tensor:
    """Return this rank's part along `dim` of the sum of x over ranks, added in rank order in at least fp32."""
    moved = x.movedim(dim, 0).contiguous()
    parts = collectives.all_to_all_single(moved, None, None, group)
    total: Tensor = parts.view(group.size(), -1, *parts.shape[1:]).sum(
        0, dtype=torch.promote_types(x.dtype, torch.float32)
    )
    return total.to(x.dtype).movedim(0, dim)


def _own(x: Tensor, group: dist.ProcessGroup, dim: int = 1) -> Tensor:
    return x.chunk(group.size(), dim)[group.rank()].contiguous()


def _sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total: Tensor = collectives.all_reduce(x, "sum", group)
    return total


def _keep(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x


class _Exchange(torch.autograd.Function):
    """A collective forward, and its transpose backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, group: dist.ProcessGroup) -> Tensor:
        ctx.name, ctx.group = name, group
        return _PAIRS[name][0](x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _PAIRS[ctx.name][1](gradients[0], ctx.group), None, None


_PAIRS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "gather": (gather_tensor, reduce_scatter_tensor),  # of positions, before a column-split product
    "reduce_scatter": (reduce_scatter_tensor, gather_tensor),  # after a row-split product
    "split": (_own, gather_tensor),  # of equal tensors on all ranks, whose gradients are equal, too
    "sum": (_sum, _keep),  # into equal tensors on all ranks
}


def exchange(name: str, x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return "gather", "reduce_scatter", "split" or "sum" of x [B, T, d] over a group, differentiable."""
    out: Tensor = _Exchange.apply(x, name, group)  # type: ignore[no-untyped-call]
    return out


def vocabulary_look_up(table: Callable[[], Tensor], group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    """Return the function that embeds ids [B, T] by a table whose rows are split over `group`; equal on all ranks."""

    def look_up(ids: Tensor) -> Tensor:
        rows = table()
        own = ids - group.rank() * len(rows)
        inside = (own >= 0) & (own < len(rows))
        found = F.embedding(own.clamp(0, len(rows) - 1), rows)
        return exchange("sum", found * inside[..., None].to(found.dtype), group)

    return look_up


def vocabulary_logits_step(
    vocabulary: int, group: dist.ProcessGroup
) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Return the step between logits [n, V / tp] and their gradient of a loss over all V (`objectives/next_token.py`).

    Largest logit, sum of exponentials and the target's logit are exchanged; padded columns take no part.
    """

    def step(
        logits: Tensor, targets: Tensor, keep: Tensor, z_loss: float = 0.0, softcap: float | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        raw, width, rank = logits, logits.shape[-1], group.rank()
        logits = logits.float()
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        columns = torch.arange(width, device=logits.device) + rank * width
        logits = logits.masked_fill(columns >= vocabulary, float("-inf"))
        highest = collectives.all_reduce(logits.amax(-1, keepdim=True), "max", group)
        exponentials = (logits - highest).exp()
        onehot = columns[None, :] == targets[:, None]
        at_target = logits.masked_fill(~onehot, 0.0).sum(-1, keepdim=True)
        sums = _sum(torch.cat([exponentials.sum(-1, keepdim=True), at_target], -1), group)
        log_normalizer = highest + sums[:, :1].log()
        nll = (log_normalizer - sums[:, 1:]) * keep[:, None]
        total = (nll + z_loss * log_normalizer.square() * keep[:, None]).sum()
        p = exponentials / sums[:, :1]
        gradient = (p * (1.0 + 2.0 * z_loss * log_normalizer) - onehot.float()) * keep[:, None]
        if softcap is not None:
            gradient = gradient * (1.0 - (logits / softcap).square()).masked_fill(columns >= vocabulary, 0.0)
        return total, nll.sum(), gradient.to(raw.dtype)

    return step


def shard_parameters(model: nn.Module, shards: Mapping[str, Shard], rank: int, size: int) -> None:
    """Replace each parameter of `model` by this rank's part, in place; names stay."""
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            shard = shards[f"{path}.{name}" if path else name]
            if shard.dim == FIRST and rank:
                setattr(module, name, None)
            elif isinstance(shard.dim, int):
                with torch.no_grad():
                    part = nn.Parameter(shard.take(parameter.detach(), rank, size))
                setattr(module, name, part)


def split_products(modules: Sequence[nn.Module], group: dist.ProcessGroup) -> None:
    """Gather the positions before each module, and sum and split its output."""

    def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return exchange("gather", args[0], group), *args[1:]

    def after(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        return exchange("reduce_scatter", out, group)

    for module in modules:
        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)
