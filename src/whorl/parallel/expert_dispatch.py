"""Mixtures of experts over the ranks of an expert axis: dropless dispatch by all-to-all, and placement by load.

    owners = place_experts(loads, ranks)            which rank holds each expert
    shard_experts(layer.experts, owners, group)     this rank keeps its experts and computes the tokens of all ranks

Each rank routes its own tokens. A row is sent once for each of its experts, computed there and sent back (GShard, Lepikhin
et al. 2020, arXiv:2006.16668, section 3.2; without a capacity, as in MegaBlocks, arXiv:2211.15841). How many rows
go where is exchanged first. Weights of the router are applied where the token came from.

Gradients of an expert are complete on its rank: they come from the tokens of all ranks of the axis. Those of all other
parameters are of this rank's tokens only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from whorl.errors import ConfigError, nearest_divisors

Compute = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # of `nn.experts.Experts.forward`


def place_experts(loads: Sequence[float], ranks: int) -> list[int]:
    """Return the rank of each expert: an equal number for each rank, and loads as equal as a greedy choice makes them.

    Experts are placed in descending order of load, each on the rank with the least load that has room (longest processing
    time first, Graham 1969). Without loads (all equal), contiguous pieces result from `[0] * n_experts`.

    Raises:
        ConfigError: the ranks do not divide the experts.
    """
    if len(loads) % ranks:
        raise ConfigError(
            f"{len(loads)} experts over {ranks} ranks",
            expected=f"a degree that divides them: the nearest are {nearest_divisors(len(loads), ranks)}",
        )
    room = len(loads) // ranks
    if len(set(loads)) == 1:
        return [e // room for e in range(len(loads))]
    owners, totals, held = [0] * len(loads), [0.0] * ranks, [0] * ranks
    for expert in sorted(range(len(loads)), key=lambda e: -loads[e]):
        rank = min((r for r in range(ranks) if held[r] < room), key=totals.__getitem__)
        owners[expert] = rank
        totals[rank] += loads[expert]
        held[rank] += 1
    return owners


def shard_experts(experts: Any, owners: Sequence[int], group: dist.ProcessGroup) -> None:
    """Keep this rank's part of `nn.experts.Experts` and compute over all ranks. Parameters keep their names."""
    compute, rank = experts.forward, group.rank()
    for part in ("up", "down"):
        whole = getattr(experts, part)
        setattr(experts, part, _Owned({e: whole[e] for e, owner in enumerate(owners) if owner == rank}))
    experts.forward = partial(dispatch, compute, torch.tensor(owners), group)


class _Owned(nn.ParameterList):
    """Some parameters of a list, under their numbers in it."""

    def __init__(self, parameters: Mapping[int, nn.Parameter]) -> None:
        super().__init__()
        for number, parameter in parameters.items():
            self.register_parameter(str(number), parameter)

    def __iter__(self) -> Iterator[Any]:
        return self.parameters()

    def __len__(self) -> int:
        return len(self._parameters)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def dispatch(
    compute: Compute, owners: Tensor, group: dist.ProcessGroup,
    x: Tensor, tokens: Tensor, weights: Tensor, counts: Tensor,
) -> Tensor:  # fmt: skip
    """Return the weighted sum of each token's experts, [N, d] in the type of x, computed where the experts are.

    compute: (rows [M, d], order [M], ones [M], counts [E / R]) -> [M, d], of this rank's experts. owners: [E] ranks.
    x: [N, d]; tokens, weights: [A], sorted by expert; counts: [E], summing to A (`nn/experts/router.py`).
    """
    size = group.size()
    by_rank = owners.to(x.device).argsort(stable=True)  # experts, those of rank 0 first
    places = torch.empty_like(by_rank).scatter_(0, by_rank, torch.arange(len(by_rank), device=x.device))
    order = torch.repeat_interleave(places, counts).argsort(stable=True)  # assignments, by rank and expert
    outgoing = counts[by_rank].view(size, -1).contiguous()
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing, group=group)
    sent, received = outgoing.sum(dim=1).tolist(), incoming.sum(dim=1).tolist()
    rows = _exchange(x.index_select(0, tokens[order]), sent, received, group)
    expert = torch.arange(incoming.shape[1], device=x.device).repeat(size)
    sorting = torch.repeat_interleave(expert, incoming.flatten()).argsort(stable=True)
    done = compute(rows, sorting, weights.new_ones(len(rows)), incoming.sum(dim=0))
    back = _exchange(done, received, sent, group)
    return torch.zeros_like(x).index_add(0, tokens[order], back * weights[order, None].to(x.dtype))


def _exchange(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    out: Tensor = _Exchange.apply(rows, sent, received, group)  # type: ignore[no-untyped-call]
    return out


class _Exchange(torch.autograd.Function):
    """All-to-all of rows; sent, received: how many to and from each rank. The gradients take the way back."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.settings = sent, received, group
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        sent, received, group = ctx.settings
        return _exchange(gradients[0], received, sent, group), None, None, None
