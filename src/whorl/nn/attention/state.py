"""What decoding keeps of a layer of attention: keys and values, of all positions or of the newest.

The subtle part is a window while decoding. Nothing older than window - 1 positions is ever seen again, so the state keeps
just that many and drops the oldest; inside of a call the queries meet what was kept and all that is new. Distances are all
that a window, a stride or a slope look at, and they survive the dropping; blocks do not, so with `block` all is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from whorl.nn.attention.short_conv import ShortConvState
from whorl.nn.mixer import check_state


class KeyValues(NamedTuple):
    """Keys and values, ready to be attended to.

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
    """What decoding keeps of one layer: keys and values, preallocated.

    k, v: [B, KV, room, d], of which the last min(length, room) positions are filled, the oldest first; room is the
    capacity, or window - 1 where that is less. segments: [B, room], made when a segment is first named (positions before
    that are of segment 0). short: the past of smeared keys. context: of cross-attention, made once.

    Raises:
        ConfigError: by `extend`, when more than `capacity` positions come in.
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
        """Bytes of all that is kept, of the whole capacity."""
        tensors = [self.k, self.v, self.segments]
        if self.context is not None:
            tensors += self.context[:4]
        return sum(t.nbytes for t in tensors if t is not None) + (
            self.smear_state.n_bytes if self.smear_state else 0
        )

    @property
    def n_held(self) -> int:
        """Positions of the past that are still there."""
        return min(self.length, self.k.shape[2])

    def check(self, batch: int, n_new: int) -> None:
        """Raises ConfigError unless `more` positions of `batch` rows fit."""
        check_state(batch, n_new, self.k.shape[0], self.length, self.capacity)

    def resolve_segments(self, segments: Tensor | None, batch: int, n_new: int) -> Tensor | None:
        """Segments of the new positions, [B, more]: by default each row goes on in its last document."""
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
        """k, v: [B, KV, T, d] new; -> all that the new queries may attend to: the past, then these.

        Gradients reach the new ones and stop at the state (as in Transformer-XL, arXiv:1901.02860).
        """
        held, more = self.n_held, k.shape[2]
        start = self.length - held
        self.check(k.shape[0], more)
        learning = torch.is_grad_enabled()  # then a graph may hold these keys while the next call writes
        self.length += more
        whole = [_append(self.k, k, held, learning, 2), _append(self.v, v, held, learning, 2)]
        ids = None
        if segments is not None and self.segments is not None:
            ids = _append(self.segments, segments.to(self.segments.dtype), held, False, 1)
        return KeyValues(whole[0], whole[1], ids, None, start)


def _append(kept: Tensor, new: Tensor, held: int, apart: bool, dim: int) -> Tensor:
    """Writes `new` behind the `held` first positions of `kept`, dropping the oldest where there is no room.

    -> [.., held + new, ..] the held ones and the new: a view of `kept` where all fit, unless it has to stand `apart`.
    """
    more, room = new.shape[dim], kept.shape[dim]
    stop = held + more
    if stop <= room and not apart:
        kept.narrow(dim, held, more).copy_(new)
        return kept.narrow(dim, 0, stop).to(new.dtype)
    whole = torch.cat([kept.narrow(dim, 0, held).to(new.dtype), new], dim=dim)
    keep = min(stop, room)
    kept.narrow(dim, 0, keep).copy_(whole.detach().narrow(dim, stop - keep, keep))
    return whole


def extend_segments(
    kept: Tensor | None, new: Tensor | None, start: int, length: int, capacity: int
) -> Tensor | None:
    """Writes new [B, length] behind `start` positions of kept [B, capacity], which the first named segment allocates.

    As in `KeyValueState`: positions before the first named one are of segment 0, and without a name a row goes on in its
    last document. None while no segment was ever named.
    """
    if kept is None:
        if new is None:
            return None
        kept = new.new_zeros(new.shape[0], capacity)
    elif new is None:
        new = kept[:, start - 1 : start] if start else torch.zeros_like(kept[:, :1])
    kept[:, start : start + length] = new
    return kept
