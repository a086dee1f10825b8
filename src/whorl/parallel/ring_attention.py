"""Ring attention: full causal attention of rows whose positions are spread over the ranks of a context axis.

    shard_context(model, group)      a decoder whose `trunk` keeps this rank's positions of the row, T / R of T
    targets = take_context(targets, group)

Liu et al. 2023 (arXiv:2310.01889, section 3): keys and values move around a ring, R - 1 times. Each rank attends to the
block that it holds while the next one arrives, and joins the blocks by their log-sum-exp. In the backward keys and
values move again. Their gradients move along, one rank behind, and are back at their owner after R steps.

    L' = log(exp L + exp L_block),   O' = exp(L - L') O + exp(S_block - L') V_block

Causal rows in plain order would leave the first rank idle. In zig-zag order rank r of R holds parts r and 2 R - 1 - r of
2 R. Each rank then has half of the pairs of every block (Brandon et al. 2023, arXiv:2311.09431, have the same aim).

Local tensors only. Positions are embedded before the row is split, so n-grams see the ids before them. Smeared keys
get their predecessors from the neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from whorl.errors import ConfigError

QUERY_BLOCK = 256  # queries whose scores exist at a time


def context_order(length: int, size: int) -> Tensor:
    """Return the positions of each rank in zig-zag order, [size, length / size].

    Raises:
        ConfigError: 2 x size does not divide the length.
    """
    parts = 2 * size
    if length % parts:
        below = length - length % parts
        raise ConfigError(
            f"rows of {length} positions over {size} context ranks",
            expected=f"a multiple of 2 x {size}: the nearest are {below or parts} and {below + parts}",
        )
    chunks = torch.arange(length).view(parts, -1)
    return torch.cat([chunks[:size], chunks[size:].flip(0)], dim=1)


def take_context(row: Tensor, group: dist.ProcessGroup, dim: int = 1) -> Tensor:
    """Return this rank's positions of a whole row, in zig-zag order. dim: of the positions."""
    order = context_order(row.shape[dim], group.size())[group.rank()]
    return row.index_select(dim, order.to(row.device))


def shard_context(model: Any, group: dist.ProcessGroup, parts: int = 0) -> None:
    """Spread the positions of `model`, a decoder with `blocks` and `trunk`, over `group`.

    `prepare` gets whole rows; `trunk` returns the hidden states of this rank's positions, [B, T / R, d_model]. Gradients
    of parameters are those of these positions: sum them over the group. parts: `trunk` of a later stage of a pipeline gets
    this rank's positions, one of so many parts of the row.

    Raises:
        ConfigError: a mixer is not full causal attention; named with its block.
    """
    for number, block in enumerate(model.blocks):
        if hasattr(block, "mixer"):  # not removed by a pipeline
            shard_attention(f"blocks.{number}.mixer", block.mixer, group)
    trunk = model.trunk

    def sharded(x: Tensor, positions: Any, segments: Tensor | None = None, *rest: Any, **more: Any) -> Tensor:
        if positions is None:
            positions = torch.arange(x.shape[1] * max(1, parts), device=x.device)
        if isinstance(positions, tuple):  # rotary tables, [(B,) T, 1, rotary_dim]
            positions = tuple(take_context(t, group, -3) for t in positions)
        else:
            positions = take_context(positions, group, -1)
        segments = None if segments is None else take_context(segments, group)
        hidden: Tensor = trunk(x if parts else take_context(x, group), positions, segments, *rest, **more)
        return hidden

    model.trunk = sharded


def shard_attention(name: str, mixer: Any, group: dist.ProcessGroup) -> None:
    """Let a mixer attend to the keys of all ranks of `group`; it gets the positions of `take_context`.

    Raises:
        ConfigError: it is not full causal attention.
    """
    kind = type(mixer).__name__
    limits = [] if kind == "MultiHeadAttention" else [kind]
    for option in () if limits else ("softcap", "sink", "slopes", "context_dim"):
        limits += [option] if getattr(mixer, option) is not None else []
    if not limits:
        limits += [n for n in ("window", "stride", "block") if getattr(mixer.mask, n) is not None]
        limits += [] if mixer.mask.causal else ["causal = false"]
    if limits:
        raise ConfigError(
            f"{name} ({', '.join(limits)}) cannot be split over context ranks",
            expected="full causal softmax attention without a window, bias, softcap or sink",
            do="remove cp from the layout",
        )
    mixer.backend = partial(_attend, group=group)
    if mixer.smear is not None:
        mixer.smear.forward = partial(_smear, mixer.smear.forward, group)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float, *_: object, group: dist.ProcessGroup
) -> Tensor:
    """Return the attention of a layer (a backend of `nn/attention/backends.py`)."""
    if mask.allowed is not None or mask.key_allowed is not None or mask.offset:
        raise ConfigError(
            "attention over context ranks with padding, a matrix of pairs or a state",
            expected="rows of training with documents as segments [B, T]",
        )
    out: Tensor = ring_attention(q, k, v, mask.query_segments, scale, group)
    return out


@torch.compiler.disable  # type: ignore[untyped-decorator]
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, scale: float, group: dist.ProcessGroup
) -> Tensor:
    """Return causal attention over the keys of all ranks, [B, H, T, d] in the type of q.

    q: [B, H, T, d]; k, v: [B, KV, T, d], H a multiple of KV; segments: [B, T] documents, or None. T: this rank's positions,
    in zig-zag order. Ranks call it in the same order.
    """
    out: Tensor = _Ring.apply(q, k, v, segments, scale, group)  # type: ignore[no-untyped-call]
    return out


def _pass_on(tensor: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, list[dist.Work]]:
    """Start to send a tensor to the next rank; return the previous rank's, complete after the works."""
    tensor, rank, size = tensor.contiguous(), group.rank(), group.size()
    received = torch.empty_like(tensor)
    send = dist.P2POp(dist.isend, tensor, group=group, group_peer=(rank + 1) % size)
    receive = dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % size)
    return received, dist.batch_isend_irecv([send, receive])


def _arrived(pending: tuple[Tensor, list[dist.Work]]) -> Tensor:
    for work in pending[1]:
        work.wait()
    return pending[0]


def _gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tensors of all ranks, [R, ...]."""
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.stack(parts)


def _tiles(
    length: int, rank: int, owner: int, segments: Tensor | None, device: torch.device
) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Yield (queries, keys, allowed pairs or None for all) of this rank against the block of `owner`.

    segments: [R, B, T] of all ranks. Pairs: [B or 1, 1, 1, queries, keys].
    """
    half = length // 2
    start, stop = (half if owner > rank else 0), (half if owner < rank else length)
    for a in range(start, length, QUERY_BLOCK):
        b = min(a + QUERY_BLOCK, length)
        allowed, end = None, stop
        if owner == rank:  # both parts ascend, so the order within the rank is that of the row
            end = b
            at = torch.arange(end, device=device)
            allowed = (at <= at[a:, None])[None]
        if segments is not None:
            same = segments[rank][:, a:b, None] == segments[owner][:, None, :end]
            allowed = same if allowed is None else allowed & same
        yield slice(a, b), slice(0, end), None if allowed is None else allowed[:, None, None]


class _Ring(torch.autograd.Function):
    """Ring attention. Queries are [B, KV, G, T, d], in groups of G that share a key."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, scale: float, group: dist.ProcessGroup
    ) -> Tensor:  # fmt: skip
        rank, size, length = group.rank(), group.size(), q.shape[2]
        documents = None if segments is None else _gather(segments, group)
        grouped = _grouped(q, k)
        held = torch.stack([k, v])
        wide = torch.promote_types(q.dtype, torch.float32)
        out = grouped.new_zeros(grouped.shape, dtype=wide)
        lse = grouped.new_full(grouped.shape[:-1], float("-inf"), dtype=wide)
        for step in range(size):
            pending = _pass_on(held, group) if step < size - 1 else None
            for at, to, allowed in _tiles(length, rank, (rank - step) % size, documents, q.device):
                scores = _scores(grouped[..., at, :], held[0, :, :, to], scale, allowed)
                # The first block has the query's own key, so `joined` is finite.
                joined = torch.logaddexp(lse[..., at], scores.logsumexp(dim=-1))
                p = (scores - joined[..., None]).exp().to(q.dtype)
                out[..., at, :] *= (lse[..., at] - joined).exp()[..., None]
                out[..., at, :] += _product(p, held[1, :, :, to])
                lse[..., at] = joined
            held = held if pending is None else _arrived(pending)
        result = out.flatten(1, 2).to(q.dtype)
        ctx.save_for_backward(q, k, v, documents, result, lse)
        ctx.settings = scale, group
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, documents, out, lse = ctx.saved_tensors
        scale, group = ctx.settings
        rank, size, length = group.rank(), group.size(), q.shape[2]
        grouped, d_out = _grouped(q, k), _grouped(gradients[0], k)
        held = torch.stack([k, v])
        delta = (d_out.to(lse.dtype) * _grouped(out, k)).sum(dim=-1, keepdim=True)
        d_q = torch.zeros_like(grouped, dtype=lse.dtype)
        behind: tuple[Tensor, list[dist.Work]] | None = None  # gradients of the block that is held
        for step in range(size):
            pending = _pass_on(held, group) if step < size - 1 else None
            d_held = torch.zeros_like(held, dtype=lse.dtype)
            for at, to, allowed in _tiles(length, rank, (rank - step) % size, documents, q.device):
                keys, values = held[0, :, :, to], held[1, :, :, to]
                scores = _scores(grouped[..., at, :], keys, scale, allowed)
                p = (scores - lse[..., at, None]).exp()
                d_p = _product(d_out[..., at, :], values.mT)
                d_s = (p * (d_p - delta[..., at, :]) * scale).to(q.dtype)
                d_q[..., at, :] += _product(d_s, keys)
                d_held[0, :, :, to] += d_s.flatten(2, 3).mT @ grouped[..., at, :].flatten(2, 3)
                d_held[1, :, :, to] += p.to(q.dtype).flatten(2, 3).mT @ d_out[..., at, :].flatten(2, 3)
            if behind is not None:
                d_held += _arrived(behind)
            behind = _pass_on(d_held, group) if size > 1 else (d_held, [])
            held = held if pending is None else _arrived(pending)
        assert behind is not None
        d_k, d_v = _arrived(behind).to(k.dtype)
        return d_q.flatten(1, 2).to(q.dtype), d_k, d_v, None, None, None


def _grouped(q: Tensor, k: Tensor) -> Tensor:
    return q.reshape(len(q), k.shape[1], -1, *q.shape[2:])


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return left [B, KV, G, T, n] @ right [B, KV, n, m] -> [B, KV, G, T, m], the heads of a group as rows."""
    product: Tensor = left.flatten(2, 3) @ right
    return product.view(*left.shape[:-1], -1)


def _scores(q: Tensor, k: Tensor, scale: float, allowed: Tensor | None) -> Tensor:
    """Return the scores of grouped queries, at least fp32, -inf where not allowed."""
    scores: Tensor = (_product(q, k.mT) * scale).to(torch.promote_types(q.dtype, torch.float32))
    return scores if allowed is None else scores.masked_fill(~allowed, float("-inf"))


class _GatherLast(torch.autograd.Function):
    """All ranks' x, [R, ...]; the gradient is this rank's part of the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        total = gradients[0].contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total[ctx.group.rank()], None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _smear(
    smear: Callable[..., Tensor], group: dist.ProcessGroup,
    x: Tensor, segments: Tensor | None = None, state: object = None,
) -> Tensor:  # fmt: skip
    """Return smeared keys x [B, T, KV, d]: each part of a row is a row after the last position before it."""
    rank, size = group.rank(), group.size()
    if segments is None:
        segments = torch.zeros(x.shape[:2], dtype=torch.long, device=x.device)
    parts, documents = (torch.stack(t.chunk(2, dim=1)) for t in (x, segments))  # [2, B, T / 2, ...]

    def before(lasts: Tensor) -> Tensor:
        """Return what precedes both parts, [2, B, 1, ...]. lasts: [R, 2, B, ...]."""
        ordered = torch.cat([lasts[:, 0], lasts[:, 1].flip(0)])
        return torch.stack([ordered[rank - 1], ordered[2 * size - 2 - rank]])[:, :, None]

    last_x: Tensor = _GatherLast.apply(parts[:, :, -1], group)  # type: ignore[no-untyped-call]
    last_documents = before(_gather(documents[:, :, -1], group))
    if rank == 0:
        last_documents[0] = documents.min() - 1  # nothing precedes the row
    rows = torch.cat([before(last_x), parts], dim=2).flatten(0, 1)
    ids = torch.cat([last_documents, documents], dim=2).flatten(0, 1)
    return torch.cat(smear(rows, ids)[:, 1:].chunk(2), dim=1)
