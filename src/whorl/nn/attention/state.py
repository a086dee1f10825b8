"""KV cache of one attention layer: keys and values of all positions, or of the newest ones.

The subtle part is a window in decoding. Positions older than window - 1 are never attended to again, so the state drops
them. Within a call, queries attend to the stored keys and all new keys. Windows, strides and slopes depend on distances
only, which dropping keeps. Blocks depend on positions, so with `block` all keys are stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from whorl.nn.attention.short_conv import ShortConvState
from whorl.nn.mixer import check_state


class KeyValues(NamedTuple):
    """Keys and values, ready for attention.

    k: [B, KV, Tk, d]; v: [B, KV, Tk, d]; segments: [B, Tk] of the keys, or None; allowed: [B, Tk] bool, or None;
    start: position of the first key (above 0 where a window dropped older ones).
    """

    k: Tensor
    v: Tensor
    segments: Tensor | None = None
    allowed: Tensor | None = None
    start: int = 0


@dataclass
class KeyValueState:
    """Preallocated KV cache of one layer.

    k, v: [B, KV, size, d]. The last min(length, size) positions are filled, the oldest first. size is the capacity, or
    window - 1 where that is less. segments: [B, size], made at the first call with segments. Earlier positions have
    segment 0. smear_state: the previous raw keys. context: keys of cross-attention, computed once.

    Raises:
        ConfigError: by `extend`, when more than `capacity` positions are added.
    """

    k: Tensor
    v: Tensor
    capacity: int
    length: int = 0
    segments: Tensor | None = None
    smear_state: ShortConvState | None = None
    context: KeyValues | None = None

    @property
    def n_bytes(self) -> int:
        """Bytes of the whole preallocated state."""
        tensors = [self.k, self.v, self.segments]
        if self.context is not None:
            tensors += self.context[:4]
        return sum(t.nbytes for t in tensors if t is not None) + (
            self.smear_state.n_bytes if self.smear_state else 0
        )

    @property
    def n_held(self) -> int:
        """Number of past positions that are stored."""
        return min(self.length, self.k.shape[2])

    def check(self, batch: int, n_new: int) -> None:
        """Raise ConfigError unless `n_new` positions of `batch` rows fit."""
        check_state(batch, n_new, self.k.shape[0], self.length, self.capacity)

    def resolve_segments(self, segments: Tensor | None, batch: int, n_new: int) -> Tensor | None:
        """Return segments of the new positions, [B, n_new]. By default each row continues its last document."""
        if segments is None and self.segments is not None:
            newest = (
                self.segments[:, self.n_held - 1 : self.n_held]
                if self.n_held
                else self.segments.new_zeros(batch, 1)
            )
            return newest.expand(-1, n_new)
        if segments is not None and self.segments is None:
            self.segments = torch.zeros(batch, self.k.shape[2], dtype=torch.long, device=self.k.device)
        return segments

    def extend(self, k: Tensor, v: Tensor, segments: Tensor | None) -> KeyValues:
        """Append new k, v [B, KV, T, d] and return the stored keys followed by the new ones.

        Gradients reach the new keys and stop at the state (as in Transformer-XL, arXiv:1901.02860).
        """
        held, n_new = self.n_held, k.shape[2]
        start = self.length - held
        self.check(k.shape[0], n_new)
        with_grad = torch.is_grad_enabled()  # then a graph may hold these keys while the next call writes
        self.length += n_new
        whole = [
            append_positions(self.k, k, held, with_grad, 2),
            append_positions(self.v, v, held, with_grad, 2),
        ]
        ids = None
        if segments is not None and self.segments is not None:
            ids = append_positions(self.segments, segments.to(self.segments.dtype), held, False, 1)
        return KeyValues(whole[0], whole[1], ids, None, start)


def append_positions(kept: Tensor, new: Tensor, held: int, copy: bool, dim: int) -> Tensor:
    """Write `new` after the first `held` positions of `kept`, dropping the oldest when full.

    Returns [.., held + new, ..], the held and the new positions: a view of `kept` where all fit, or a copy with `copy`.
    """
    n_new, size = new.shape[dim], kept.shape[dim]
    stop = held + n_new
    if stop <= size and not copy:
        kept.narrow(dim, held, n_new).copy_(new)
        return kept.narrow(dim, 0, stop).to(new.dtype)
    whole = torch.cat([kept.narrow(dim, 0, held).to(new.dtype), new], dim=dim)
    keep = min(stop, size)
    kept.narrow(dim, 0, keep).copy_(whole.detach().narrow(dim, stop - keep, keep))
    return whole


def extend_segments(
    kept: Tensor | None, new: Tensor | None, start: int, length: int, capacity: int
) -> Tensor | None:
    """Write new segments [B, length] at `start` of kept [B, capacity], which is allocated at the first segments.

    As in `KeyValueState`: positions before the first segments have segment 0, and a call without segments continues the
    last document. Returns None while no call had segments.
    """
    if kept is None:
        if new is None:
            return None
        kept = new.new_zeros(new.shape[0], capacity)
    elif new is None:
        new = kept[:, start - 1 : start] if start else torch.zeros_like(kept[:, :1])
    kept[:, start : start + length] = new
    return kept
