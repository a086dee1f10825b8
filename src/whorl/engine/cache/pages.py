"""Storage of layer states: keys and values in pages, latents in pages, recurrent states in slots.

A batch is the concatenated rows of several sequences, N positions in all; rows of one position come first. Attention runs
in groups (`AttentionGroup`): the rows of one position together, their pages gathered and padded positions masked; each
longer row separately. This is the reference on every device. Kernels that read pages in place take over the whole step
(`engine/cpu`).

    k, v      [n_pages, KV, page_size, d]     position p of a row: page pages[p // page_size], offset p % page_size
    raw_keys  the same shape: keys before smearing, where a model mixes each key with its predecessor
    latents   [n_pages, page_size, width]

The subtle point is a window: pages outside of it already belong to another sequence. So the gather starts at the first page
that any query of the group sees, and the mask hides the rest by position.
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

MAX_DISTINCT_LENGTH = 64  # longer recurrent rows need not be grouped by length


@dataclass
class InputBatch:
    """The rows of one step.

    All tensors are on the CPU.

    ids, positions: [N].
    starts: R + 1 borders of the rows among the N positions.
    lengths: [R] positions of each row after this step.
    slots: [R].
    pages: for each layer group [R, P] int32.
    logit_indices: [W] positions among the N that need logits.
    n_single: rows of one position; they come first.
    previous_ids: [N, ngram_context] ids before each position, -1 where there are none, or None.
    adapter_indices: [R] adapters, 0 for none, or None.
    score_indices, score_targets: [S] positions among the N whose logits score an id, and that id; or None.
    n_alternatives: most likely ids returned in place of each scored one.
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
    score_indices: Tensor | None = None
    score_targets: Tensor | None = None
    n_alternatives: int = 0

    def split_rows(self) -> Iterator[InputBatch]:
        """Return each row as a separate batch."""
        for r, (a, b) in enumerate(pairwise(self.starts)):
            logit_indices = self.logit_indices[(self.logit_indices >= a) & (self.logit_indices < b)] - a
            scores: tuple[Tensor | None, Tensor | None] = None, None
            if self.score_indices is not None and self.score_targets is not None:
                own = (self.score_indices >= a) & (self.score_indices < b)
                scores = self.score_indices[own] - a, self.score_targets[own]
            yield InputBatch(
                self.ids[a:b], self.positions[a:b], [0, b - a], self.lengths[r : r + 1], self.slots[r : r + 1],
                [table[r : r + 1] for table in self.pages], logit_indices, int(b - a == 1),
                None if self.previous_ids is None else self.previous_ids[a:b],
                None if self.adapter_indices is None else self.adapter_indices[r : r + 1], *scores,
                self.n_alternatives,
            )  # fmt: skip


@dataclass
class AttentionGroup:
    """Rows that attend together: query_indices [B, T] among the N; pages [B, P]; key_positions [B, L]."""

    query_indices: Tensor
    pages: Tensor
    key_positions: Tensor
    query_positions: Tensor  # [B, T] positions
    n_keys: int  # number of keys, in a group of one row


@dataclass
class PageIndex:
    """Page and offset of a step's positions for one layer group; made once per step and shared by its layers."""

    page: Tensor  # [N] page of each new position
    page_offset: Tensor
    previous_page: Tensor  # of the position before each
    previous_page_offset: Tensor
    is_first: Tensor  # [N] whether a position is the first of its row
    groups: list[AttentionGroup]

    @classmethod
    def _locate(cls, table: Tensor, rows: Tensor, positions: Tensor, page_size: int) -> PageIndex:
        """Return the index of `positions` [N] in `rows` [N] of `table` [R, P], without groups, on their device."""
        previous = (positions - 1).clamp_min(0)
        return cls(
            table[rows, positions // page_size], positions % page_size, table[rows, previous // page_size],
            previous % page_size, positions == 0, [],
        )  # fmt: skip

    @classmethod
    def of_batch(
        cls, batch: InputBatch, group: int, page_size: int, window: int | None, device: str
    ) -> PageIndex:
        """Return the index of a batch, whose tensors are on the CPU; the result is on `device`."""
        table = torch.from_numpy(batch.pages[group].astype(np.int64))
        starts = torch.tensor(batch.starts)
        rows = torch.repeat_interleave(torch.arange(len(table)), starts.diff())
        positions = batch.positions
        found = cls._locate(table, rows, positions, page_size)
        for name, t in vars(found).items():
            if isinstance(t, Tensor):
                setattr(found, name, t.to(device))

        def add_group(
            a: int, b: int, queries: Tensor, query_indices: Tensor, longest: int, shortest: int
        ) -> None:
            first = 0 if window is None else max(0, shortest - window) // page_size
            stop = -(-longest // page_size)
            pages = table[a:b, first:stop].to(device)
            key_positions = torch.arange(first * page_size, stop * page_size, device=device)
            found.groups.append(
                AttentionGroup(
                    query_indices.to(device),
                    pages,
                    key_positions.expand(b - a, -1),
                    queries.to(device),
                    longest - first * page_size,
                )
            )

        n = batch.n_single
        if n:
            lengths = batch.lengths[:n]
            add_group(0, n, positions[:n, None], torch.arange(n)[:, None], max(lengths), min(lengths))
        for r in range(n, len(batch.lengths)):
            a, b = batch.starts[r], batch.starts[r + 1]
            length = batch.lengths[r]
            add_group(r, r + 1, positions[None, a:b], torch.arange(a, b)[None], length, length - (b - a) + 1)
        return found

    @classmethod
    def of_decode_rows(cls, table: Tensor, positions: Tensor, page_size: int) -> PageIndex:
        """Return the index of rows of one position each, computed on the device of the tensors without waiting for it.

        table: [R, P] int64 pages; those that no query may see need only be valid. positions: [R].
        """
        n_rows, n_keys = len(table), table.shape[1] * page_size
        rows = torch.arange(n_rows, device=table.device)
        found = cls._locate(table, rows, positions, page_size)
        keys = torch.arange(n_keys, device=table.device).expand(n_rows, -1)
        found.groups.append(AttentionGroup(rows[:, None], table, keys, positions[:, None], n_keys))
        return found


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
        self.length = 0  # unused: rows have different lengths

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the layer; their first dimension is the page."""
        return [self.k, self.v] if self.raw_keys is None else [self.k, self.v, self.raw_keys]

    @property
    def n_bytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)

    def predecessors(self, k: Tensor) -> Tensor:
        p = self._require_page_index()
        assert self.raw_keys is not None
        # Written first: the second key of a row reads the first.
        self.raw_keys[p.page, :, p.page_offset] = k[0].to(self.raw_keys.dtype)
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
        for group in self._require_page_index().groups:
            k, v = self._gather_kv(group, q.dtype)  # [B, KV, L, d]
            # distance: [B, T, L]
            distance = group.query_positions[:, :, None] - group.key_positions[:, None, :]
            visible = allows(zero, zero, group.query_positions[:, :, None], group.key_positions[:, None, :])
            slopes = None if bias is None else -bias[:, None, None] * distance[:, None].abs()
            # Decoding rows: visible keys depend on the row's length.
            if group.query_indices.shape[1] == 1:
                group_mask = Mask(causal=False, key_allowed=visible[:, 0])
            else:
                k, v = k[:, :, : group.n_keys], v[:, :, : group.n_keys]
                group_mask = dataclasses.replace(mask, offset=group.n_keys - group.query_indices.shape[1])
                if slopes is not None:
                    slopes = slopes[..., : group.n_keys]
            queries_of_group = q[0].transpose(0, 1)[group.query_indices].transpose(1, 2)  # [B, H, T, d]
            out = attend(queries_of_group, k, v, group_mask, scale, slopes, softcap, sink, backend)
            y[0].transpose(0, 1)[group.query_indices] = out.transpose(1, 2)
        return y

    def _gather_kv(self, group: AttentionGroup, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self._gather(self.k, group).to(dtype), self._gather(self.v, group).to(dtype)

    def _gather(self, pool: Tensor, group: AttentionGroup) -> Tensor:
        got = pool[group.pages]  # [B, P, KV, page, d]
        batch, n, heads, size, d = got.shape
        return got.transpose(1, 2).reshape(batch, heads, n * size, d)

    def _require_page_index(self) -> PageIndex:
        assert self.page_index is not None, "page_index is set at the start of a step"
        return self.page_index


class LatentPages(PagedLatent):
    """The latents of one layer."""

    def __init__(self, n_pages: int, page_size: int, width: int, dtype: torch.dtype, device: str) -> None:
        self.latents = torch.zeros(n_pages, page_size, width, dtype=dtype, device=device)
        self.page_index: PageIndex | None = None
        self.length = 0

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the layer; their first dimension is the page."""
        return [self.latents]

    @property
    def n_bytes(self) -> int:
        return self.latents.nbytes

    def write(self, rows: Tensor) -> None:
        assert self.page_index is not None
        self.latents[self.page_index.page, self.page_index.page_offset] = rows[0].to(self.latents.dtype)

    def attention_groups(self) -> list[tuple[Tensor, Tensor, Mask]]:
        assert self.page_index is not None
        groups = []
        for group in self.page_index.groups:
            rows = self.latents[group.pages].flatten(1, 2)  # [B, L, width]
            if group.query_indices.shape[1] == 1:
                mask = Mask(causal=False, key_allowed=group.key_positions <= group.query_positions)
            else:
                rows = rows[:, : group.n_keys]
                mask = Mask(offset=group.n_keys - group.query_indices.shape[1])
            groups.append((group.query_indices, rows, mask))
        return groups


class RecurrentStates(PooledState):
    """Recurrent states of a mixer, one row per slot."""

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
            query_indices = torch.tensor([list(range(a, b)) for a, b in spans], device=x.device)
            n_before = self.batch.lengths[rows[0]] - query_indices.shape[1]
            slots = torch.tensor([self.batch.slots[r] for r in rows], device=x.device)
            if n_before:
                state = _map_tensors(self.states, functools.partial(_select_rows, slots=slots), n_before)
            else:
                state = mixer.new_state(len(rows), self.capacity, dtype=self.dtype, device=self.device)
            y[0, query_indices] = mixer(
                x[0, query_indices], positions=positions[0, query_indices], state=state
            )
            _scatter_rows(self.states, state, slots)
        return y

    def _row_groups(self, batch: InputBatch) -> list[list[int]]:
        """Rows that run together: decoding rows of equal length (or all long ones); each longer row separately."""
        by_length: dict[int, list[int]] = {}
        for r in range(batch.n_single):
            by_length.setdefault(min(batch.lengths[r], MAX_DISTINCT_LENGTH + 1), []).append(r)
        return [*by_length.values(), *([r] for r in range(batch.n_single, len(batch.lengths)))]

    def read(self, slot: int) -> Any:
        """Return a copy of one slot's state."""
        key_positions = torch.tensor([slot], device=self.device)
        return _map_tensors(self.states, lambda t: t[key_positions].clone(), 0)

    def write(self, slot: int, state: Any) -> None:
        """Write a state that `read` returned."""
        _scatter_rows(self.states, state, torch.tensor([slot], device=self.device))


def _select_rows(t: Tensor, slots: Tensor) -> Tensor:
    return t[slots]


def _map_tensors(state: Any, change: Any, length: int) -> Any:
    """Return a state of the same type with every tensor mapped, `length` positions long."""
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
    """Write the rows of `part` to `slots` of `whole`, tensor by tensor."""
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
