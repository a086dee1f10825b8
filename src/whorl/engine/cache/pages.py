"""What layers keep while serving: keys and values in pages, latents in pages, states of fixed size in slots.

A batch is rows of several sequences one behind another, N positions in all; those of one position stand first. Attention
takes it in groups (`Piece`): the rows of one position together, their pages gathered side by side and what is too long for a
row masked; each longer row by itself. That is the reference for every device; where a machine has kernels that read pages
in place, they take the whole step (`engine/native`).

    k, v      [n_pages, KV, page_size, d]     position p of a row: page pages[p // page_size], place p % page_size
    raw       the same shape: keys as they were before they were smeared, where a model mixes each with its predecessor
    latents   [n_pages, page_size, width]

The subtle part is a window: what it left behind is another's page by now, so the gather begins at the first page that any
query of the piece sees, and the mask hides the rest by position.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whorl.nn.attention.backends import attend
from whorl.nn.attention.mask import Mask
from whorl.nn.attention.paged import PagedLatent, PagedState
from whorl.nn.mixer import PooledState

MAX_DISTINCT_LENGTH = 64  # beyond so many positions no state of fixed size asks how many there were


@dataclass
class InputBatch:
    """The rows of one step (see the top of this file).

    ids, positions: [N]; starts: borders of the rows among the N, R + 1 of them; lengths: [R] positions of each row after
    this step; slots: [R]; pages: for each layer group [R, P] int32; wanted: [W] which of the N need logits; before:
    [N, reach] ids before each, -1 where there are none (for n-gram memories), or None; n_single: rows of one position, which
    stand first; adapters: [R] numbers of adapters, 0 for none, or None.
    """

    ids: Tensor
    positions: Tensor
    starts: list[int]
    lengths: list[int]
    slots: list[int]
    pages: list[np.ndarray[Any, np.dtype[np.int32]]]
    logit_indices: Tensor
    n_single: int
    previous_ids: Tensor | None = None
    adapter_indices: list[int] | None = None
    sample_indices: list[int] | None = None  # which of the W a token is drawn from; None: all

    def split_rows(self) -> Iterator[InputBatch]:
        """Each row as a batch of its own."""
        for r, (a, b) in enumerate(pairwise(self.starts)):
            wanted = self.logit_indices[(self.logit_indices >= a) & (self.logit_indices < b)] - a
            yield InputBatch(
                self.ids[a:b], self.positions[a:b], [0, b - a], self.lengths[r : r + 1], self.slots[r : r + 1],
                [table[r : r + 1] for table in self.pages], wanted, int(b - a == 1),
                None if self.previous_ids is None else self.previous_ids[a:b],
                None if self.adapter_indices is None else self.adapter_indices[r : r + 1],
            )  # fmt: skip


@dataclass
class AttentionGroup:
    """Rows that are attended to together: where [B, T] among the N; pages [B, P]; at: [B, L] positions of the keys."""

    query_indices: Tensor
    pages: Tensor
    key_positions: Tensor
    query_positions: Tensor  # [B, T] positions
    n_keys: int  # of the keys that there are, of a single row


class PageIndex:
    """Where a step's positions lie, for the layers of one group: made once a step, used by each of them."""

    def __init__(
        self, batch: InputBatch, group: int, page_size: int, window: int | None, device: str
    ) -> None:
        table = torch.from_numpy(batch.pages[group].astype(np.int64))
        starts = torch.tensor(batch.starts)
        rows = torch.repeat_interleave(torch.arange(len(table)), starts.diff())
        positions = batch.positions.cpu()
        self.page = table[rows, positions // page_size].to(device)  # [N] of each new position
        self.page_offset = (positions % page_size).to(device)
        back = (positions - 1).clamp_min(0)
        self.previous_page = table[rows, back // page_size].to(device)
        self.previous_page_offset = (back % page_size).to(device)
        self.is_first = (positions == 0).to(device)
        self.groups: list[AttentionGroup] = []
        n = batch.n_single

        def piece(a: int, b: int, queries: Tensor, where: Tensor, longest: int, shortest: int) -> None:
            first = 0 if window is None else max(0, shortest - window) // page_size
            stop = -(-longest // page_size)
            pages = table[a:b, first:stop].to(device)
            at = torch.arange(first * page_size, stop * page_size, device=device)
            self.groups.append(
                AttentionGroup(
                    where.to(device),
                    pages,
                    at.expand(b - a, -1),
                    queries.to(device),
                    longest - first * page_size,
                )
            )

        if n:
            lengths = batch.lengths[:n]
            piece(0, n, positions[:n, None], torch.arange(n)[:, None], max(lengths), min(lengths))
        for r in range(n, len(batch.lengths)):
            a, b = batch.starts[r], batch.starts[r + 1]
            length = batch.lengths[r]
            piece(r, r + 1, positions[None, a:b], torch.arange(a, b)[None], length, length - (b - a) + 1)


class KVPages(PagedState):
    """Keys and values of one layer."""

    def __init__(
        self,
        n_pages: int,
        n_kv_heads: int,
        page_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: str,
        keep_raw_keys: bool,
    ) -> None:
        shape = (n_pages, n_kv_heads, page_size, head_dim)
        self.k, self.v = (torch.zeros(shape, dtype=dtype, device=device) for _ in "kv")
        self.raw_keys = torch.zeros(shape, dtype=dtype, device=device) if keep_raw_keys else None
        self.page_index: PageIndex | None = None
        self.length = 0  # of no meaning here: rows differ

    @property
    def tensors(self) -> list[Tensor]:
        """All that a page of this layer is; pages are the first dimension."""
        return [self.k, self.v] if self.raw_keys is None else [self.k, self.v, self.raw_keys]

    @property
    def n_bytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)

    def predecessors(self, k: Tensor) -> Tensor:
        p = self._require_page_index()
        assert self.raw_keys is not None
        self.raw_keys[p.page, :, p.page_offset] = k[0].to(
            self.raw_keys.dtype
        )  # first: a row's second key wants its first
        before = self.raw_keys[p.previous_page, :, p.previous_page_offset].to(k.dtype)
        return torch.where(p.is_first[:, None, None], k[0], before)[None]

    def write(self, k: Tensor, v: Tensor) -> None:
        p = self._require_page_index()
        self.k[p.page, :, p.page_offset] = k[0].transpose(0, 1).to(self.k.dtype)
        self.v[p.page, :, p.page_offset] = v[0].transpose(0, 1).to(self.v.dtype)

    def attend(
        self,
        q: Tensor,
        mask: Mask,
        scale: float | None,
        bias: Tensor | None = None,
        softcap: float | None = None,
        sink: Tensor | None = None,
        backend: str = "auto",
    ) -> Tensor:
        y = torch.empty_like(q)
        zero = torch.zeros((), dtype=torch.long, device=q.device)
        allows = mask.mask_mod()
        for piece in self._require_page_index().groups:
            k, v = self._gather_kv(piece, q.dtype)  # [B, KV, L, d]
            distance = piece.query_positions[:, :, None] - piece.key_positions[:, None, :]  # [B, T, L]
            seen = allows(zero, zero, piece.query_positions[:, :, None], piece.key_positions[:, None, :])
            slopes = None if bias is None else -bias[:, None, None] * distance[:, None].abs()
            if piece.query_indices.shape[1] == 1:  # decoding rows: what a row sees differs by its length
                each = Mask(causal=False, key_allowed=seen[:, 0])
            else:
                k, v = k[:, :, : piece.n_keys], v[:, :, : piece.n_keys]
                each = dataclasses.replace(mask, offset=piece.n_keys - piece.query_indices.shape[1])
                if slopes is not None:
                    slopes = slopes[..., : piece.n_keys]
            mine = q[0].transpose(0, 1)[piece.query_indices].transpose(1, 2)  # [B, H, T, d]
            out = attend(mine, k, v, each, scale, slopes, softcap, sink, backend)
            y[0].transpose(0, 1)[piece.query_indices] = out.transpose(1, 2)
        return y

    def _gather_kv(self, group: AttentionGroup, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self._gather(self.k, group).to(dtype), self._gather(self.v, group).to(dtype)

    def _gather(self, pool: Tensor, group: AttentionGroup) -> Tensor:
        got = pool[group.pages]  # [B, P, KV, page, d]
        batch, n, heads, size, d = got.shape
        return got.transpose(1, 2).reshape(batch, heads, n * size, d)

    def _require_page_index(self) -> PageIndex:
        assert self.page_index is not None, "a step begins with its places"
        return self.page_index


class LatentPages(PagedLatent):
    """The latents of one layer."""

    def __init__(self, n_pages: int, page_size: int, width: int, dtype: torch.dtype, device: str) -> None:
        self.latents = torch.zeros(n_pages, page_size, width, dtype=dtype, device=device)
        self.page_index: PageIndex | None = None
        self.length = 0

    @property
    def tensors(self) -> list[Tensor]:
        """All that a page of this layer is."""
        return [self.latents]

    @property
    def n_bytes(self) -> int:
        return self.latents.nbytes

    def write(self, rows: Tensor) -> None:
        assert self.page_index is not None
        self.latents[self.page_index.page, self.page_index.page_offset] = rows[0].to(self.latents.dtype)

    def attention_groups(self) -> list[tuple[Tensor, Tensor, Mask]]:
        assert self.page_index is not None
        found = []
        for piece in self.page_index.groups:
            rows = self.latents[piece.pages].flatten(1, 2)  # [B, L, width]
            if piece.query_indices.shape[1] == 1:
                mask = Mask(causal=False, key_allowed=piece.key_positions <= piece.query_positions)
            else:
                rows = rows[:, : piece.n_keys]
                mask = Mask(offset=piece.n_keys - piece.query_indices.shape[1])
            found.append((piece.query_indices, rows, mask))
        return found


class RecurrentStates(PooledState):
    """States of fixed size, a row for each slot, of whatever kind the mixer makes."""

    def __init__(self, mixer: Any, n_slots: int, capacity: int, dtype: torch.dtype, device: str) -> None:
        self.capacity, self.dtype, self.device = capacity, dtype, device
        self.states = mixer.new_state(n_slots, capacity, dtype=dtype, device=device)
        self.batch: InputBatch | None = None

    @property
    def n_bytes(self) -> int:
        n: int = self.states.n_bytes
        return n

    def run_mixer(self, mixer: Any, x: Tensor, positions: Tensor | None) -> Tensor:
        assert self.batch is not None and positions is not None
        y = torch.empty_like(x)
        for rows in self._row_groups(self.batch):
            spans = [(self.batch.starts[r], self.batch.starts[r + 1]) for r in rows]
            where = torch.tensor([list(range(a, b)) for a, b in spans], device=x.device)
            held = self.batch.lengths[rows[0]] - where.shape[1]
            slots = torch.tensor([self.batch.slots[r] for r in rows], device=x.device)
            if held:
                state = _map_tensors(self.states, functools.partial(_select_rows, slots=slots), held)
            else:
                state = mixer.new_state(len(rows), self.capacity, dtype=self.dtype, device=self.device)
            y[0, where] = mixer(x[0, where], positions=positions[0, where], state=state)
            _scatter_rows(self.states, state, slots)
        return y

    def _row_groups(self, batch: InputBatch) -> list[list[int]]:
        """Rows that are computed together: decoding ones of one length (or all far along), each longer one by itself."""
        together: dict[int, list[int]] = {}
        for r in range(batch.n_single):
            together.setdefault(min(batch.lengths[r], MAX_DISTINCT_LENGTH + 1), []).append(r)
        return [*together.values(), *([r] for r in range(batch.n_single, len(batch.lengths)))]

    def read(self, slot: int) -> Any:
        """A copy of one slot's state."""
        at = torch.tensor([slot], device=self.device)
        return _map_tensors(self.states, lambda t: t[at].clone(), 0)

    def write(self, slot: int, state: Any) -> None:
        """Puts back what `read` gave."""
        _scatter_rows(self.states, state, torch.tensor([slot], device=self.device))


def _select_rows(t: Tensor, slots: Tensor) -> Tensor:
    return t[slots]


def _map_tensors(state: Any, change: Any, length: int) -> Any:
    """The same kind of state with every tensor changed, `length` positions long."""
    if isinstance(state, Tensor):
        return change(state)
    if isinstance(state, tuple):
        return tuple(_map_tensors(part, change, length) for part in state)
    if dataclasses.is_dataclass(state) and not isinstance(state, type):
        fields = {
            f.name: _map_tensors(getattr(state, f.name), change, length) for f in dataclasses.fields(state)
        }
        return type(state)(**{**fields, **({"length": length} if "length" in fields else {})})
    return state


def _scatter_rows(whole: Any, part: Any, slots: Tensor) -> None:
    """Writes the rows of `part` to `slots` of `whole`, tensor by tensor."""
    if isinstance(whole, Tensor):
        whole[slots] = part.to(whole.dtype)
    elif isinstance(whole, tuple):
        for w, p in zip(whole, part, strict=True):
            _scatter_rows(w, p, slots)
    elif dataclasses.is_dataclass(whole):
        for f in dataclasses.fields(whole):
            w, p = getattr(whole, f.name), getattr(part, f.name)
            if w is not None and p is not None:
                _scatter_rows(w, p, slots)
