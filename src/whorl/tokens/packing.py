"""Packing: documents of any length into rows of one length, without attention between documents.

A document of n ids (bos first, eos last) has n - 1 targets: every id but its bos. It is cut into chunks of `seq_len` inputs;
chunk i + 1 starts at the last target of chunk i, so each id is a target exactly once. Full chunks are rows. The remainders,
at most one chunk per document, are packed best-fit decreasing: the longest first, each into the fullest row where it fits.
(Ding et al. 2024, "Fewer Truncations Improve Language Modeling", https://arxiv.org/abs/2404.10830, pack whole documents so.)

A row [T] has
    tokens         inputs of the network; `pad` after the last segment
    targets        the next id of the *same* document, else `pad`
    segment_ids    1, 2, ... for the segments from left to right, 0 = padding
    positions      0, 1, ... from the start of each segment
    loss_mask      True where there is a target

Subtle: a row with one segment needs no document mask, because causal attention keeps real tokens from the padding after
them. Nearly all rows are such, and attention without a mask is faster. So `PackedRows.single_segment` marks them, and the
loader fills separate batches with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from whorl.errors import ConfigError, DataError


class IdSource(Protocol):
    """A stream of token ids with random access: an array, a memory map, or shards."""

    def __getitem__(self, where: slice, /) -> NDArray[np.unsignedinteger[Any]]: ...

    def take(self, positions: NDArray[np.int64], /) -> NDArray[np.unsignedinteger[Any]]:
        """Return the ids at positions [rows, n]; each row lies within one document."""
        ...


class PackedArrays(Protocol):
    """Destination of rows: arrays [B, T], a batch or a slot's views."""

    @property
    def tokens(self) -> NDArray[np.int64]: ...
    @property
    def targets(self) -> NDArray[np.int64]: ...
    @property
    def segment_ids(self) -> NDArray[np.int32]: ...
    @property
    def positions(self) -> NDArray[np.int32]: ...
    @property
    def loss_mask(self) -> NDArray[np.bool_]: ...


@dataclass(frozen=True)
class PackedRows:
    """The row table: which spans of the token stream each row has.

    Row r has the segments row_starts[r] : row_starts[r + 1]. A segment has segment_lengths inputs (and as many targets, one
    position later) from segment_starts.
    """

    seq_len: int
    row_starts: NDArray[np.int64]  # [rows + 1]
    segment_starts: NDArray[np.int64]  # [segments]
    segment_lengths: NDArray[np.int64]  # [segments]

    def __len__(self) -> int:
        return len(self.row_starts) - 1

    @cached_property
    def single_segment(self) -> NDArray[np.bool_]:
        """[rows] True where a row has a single segment, so that a causal mask is enough."""
        return np.equal(np.diff(self.row_starts), 1)

    @property
    def n_targets(self) -> int:
        """Number of targets of all rows."""
        return int(self.segment_lengths.sum())

    def segments(self, row: int) -> list[tuple[int, int]]:
        """Return (start in the stream, inputs) of each segment of a row, from left to right."""
        a, b = self.row_starts[row], self.row_starts[row + 1]
        return list(zip(self.segment_starts[a:b].tolist(), self.segment_lengths[a:b].tolist(), strict=True))

    def write(self, ids: IdSource, rows: NDArray[np.int64], out: PackedArrays, pad_id: int) -> int:
        """Write `rows` (at most B of them) into arrays [B, T]; positions without a token become padding.
        Returns the number of targets.

        Rows filled by one segment, nearly all, are written together: one gather and a few assignments.
        """
        first, count = self.row_starts[rows], np.arange(self.seq_len + 1)
        full = self.segment_lengths[first] == self.seq_len
        full_rows: Any = slice(None)
        if len(rows) < len(out.tokens) or not full.all():
            full_rows = np.flatnonzero(full)
            for array, padding in (
                (out.tokens, pad_id), (out.targets, pad_id), (out.segment_ids, 0), (out.positions, 0),
                (out.loss_mask, False),
            ):  # fmt: skip
                array[:] = padding
        chunks = ids.take(self.segment_starts[first[full], None] + count)
        out.tokens[full_rows] = chunks[:, :-1]
        out.targets[full_rows] = chunks[:, 1:]
        out.segment_ids[full_rows] = 1
        out.positions[full_rows] = count[:-1]
        out.loss_mask[full_rows] = True
        targets = self.seq_len * len(chunks)
        for b in np.flatnonzero(~full).tolist() if targets < self.seq_len * len(rows) else ():
            position = 0
            for segment, (start, size) in enumerate(self.segments(int(rows[b])), start=1):
                span = slice(position, position + size)
                ids_of_segment = ids[start : start + size + 1]
                out.tokens[b, span] = ids_of_segment[:-1]
                out.targets[b, span] = ids_of_segment[1:]
                out.segment_ids[b, span] = segment
                out.positions[b, span] = count[:size]
                out.loss_mask[b, span] = True
                position += size
            targets += position
        return targets


def pack(starts: NDArray[np.int64], lengths: NDArray[np.int64], seq_len: int) -> PackedRows:
    """Pack documents into rows.

    Args:
        starts: [documents] start of each in the token stream.
        lengths: [documents] ids of each, bos and eos included.
        seq_len: T, the inputs of a row.

    Returns:
        The full rows in stream order, then the rows of remainders. The same input gives the same rows.

    Raises:
        ConfigError: `seq_len` is not positive.
    """
    if seq_len < 1:
        raise ConfigError(f"rows of {seq_len} tokens cannot be packed", expected="seq_len of at least 1")
    inputs = np.maximum(lengths - 1, 0)
    n_full, rest = inputs // seq_len, inputs % seq_len
    document = np.repeat(np.arange(len(inputs)), n_full)
    nth = np.arange(len(document)) - np.repeat(np.cumsum(n_full) - n_full, n_full)
    full_start = starts[document] + nth * seq_len

    short = np.flatnonzero(rest)
    short = short[np.argsort(-rest[short], kind="stable")]
    rows = best_fit_decreasing(rest[short].tolist(), seq_len)
    order = short[np.fromiter((i for row in rows for i in row), np.int64, len(short))]
    per_row = np.array([1] * len(full_start) + [len(row) for row in rows], np.int64)
    return PackedRows(
        seq_len=seq_len,
        row_starts=np.concatenate((np.zeros(1, np.int64), np.cumsum(per_row))),
        segment_starts=np.concatenate((full_start, (starts + n_full * seq_len)[order])),
        segment_lengths=np.concatenate((np.full(len(full_start), seq_len, np.int64), rest[order])),
    )


def best_fit_decreasing(sizes: list[int], capacity: int) -> list[list[int]]:
    """Put items, sorted by descending size, each into the fullest row that still has space; returns the items of each row.

    Rows are indexed by their free space, and a bit set marks which amounts occur, so the time is linear in the items for a
    fixed capacity.
    """
    rows: list[list[int]] = []
    rows_by_space: list[list[int]] = [[] for _ in range(capacity + 1)]
    free_mask = 0  # bit r is set if some row has r free positions
    for item, size in enumerate(sizes):
        candidates = free_mask >> size
        if candidates:
            space = size + (candidates & -candidates).bit_length() - 1
            row = rows_by_space[space].pop()
            if not rows_by_space[space]:
                free_mask &= ~(1 << space)
        else:
            space, row = capacity, len(rows)
            rows.append([])
        rows[row].append(item)
        if space > size:
            rows_by_space[space - size].append(row)
            free_mask |= 1 << (space - size)
    return rows


def random_windows(
    ids: NDArray[Any], batch_size: int, seq_len: int, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (inputs, targets) [batch_size, seq_len] of windows at random positions; targets are one id later.

    It is the sampler of nanoGPT: documents run into each other, and an epoch has no end. Training here uses `pack`.

    Args:
        ids: ids in a row, for example `numpy.load(path, mmap_mode="r")`. Only the windows are read.

    Raises:
        DataError: fewer than seq_len + 1 ids.
    """
    if len(ids) <= seq_len:
        raise DataError(
            f"{len(ids):,} ids hold no window of {seq_len} ids", expected=f"at least {seq_len + 1:,}"
        )
    starts = rng.integers(0, len(ids) - seq_len, size=batch_size).tolist()
    windows = np.stack([np.asarray(ids[start : start + seq_len + 1]) for start in starts]).astype(np.int64)
    return windows[:, :-1], windows[:, 1:]
