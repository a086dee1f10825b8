"""Packing: documents of any length into rows of one length, without anybody seeing a neighbour.

A document of n ids (bos first, eos last) has n - 1 things to predict: every id but its bos. It is cut into
chunks of `length` inputs; chunk i + 1 begins at the last target of chunk i, so each of the n - 1 is a
target exactly once. Full chunks are rows as they are. What is left over at the ends of documents, at most
one chunk a document, is packed best-fit decreasing, the longest first, each into the fullest row where it
fits (as in Ding et al. 2024, "Fewer Truncations Improve Language Modeling",
https://arxiv.org/abs/2404.10830, applied to the remainders alone).

A row [T] comes out as
    tokens         what the network reads; `pad` after the last segment
    targets        the id that follows in the *same* document; `pad` where there is none
    segment_ids    1, 2, ... for the segments from left to right, 0 = padding
    positions      0, 1, ... from the start of each segment
    loss_mask      True where there is a target

What is subtle: a row with one segment needs no document mask, because causal attention alone keeps every
real token from the padding behind it. Such rows are *plain*; nearly all rows are, and an attention kernel
without a mask is faster. So plain rows are kept apart from mixed ones (`Rows.plain`), and the loader fills
batches with either.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from whorl.errors import ConfigError


class IdSource(Protocol):
    """A stream of token ids that can be read from a place: an array, a memory map, or shards."""

    def __getitem__(self, where: slice, /) -> NDArray[np.unsignedinteger[Any]]: ...

    def take(self, positions: NDArray[np.int64], /) -> NDArray[np.unsignedinteger[Any]]:
        """The ids at [rows, n] places, of which each row is a stretch of one document."""
        ...


class PackedArrays(Protocol):
    """Where rows are written: arrays [B, T], a batch or a slot's views."""

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
    """The row table: which stretches of the token stream stand in which row. Row r holds segments
    first[r] : first[r + 1]; a segment reads `size` inputs (and as many targets, one further) from `start`."""

    seq_len: int
    row_starts: NDArray[np.int64]  # [rows + 1]
    segment_starts: NDArray[np.int64]  # [segments]
    segment_lengths: NDArray[np.int64]  # [segments]

    def __len__(self) -> int:
        return len(self.row_starts) - 1

    @cached_property
    def single_segment(self) -> NDArray[np.bool_]:
        """[rows] True where a row is a single segment, so that a causal mask is enough."""
        return np.equal(np.diff(self.row_starts), 1)

    @property
    def n_targets(self) -> int:
        """How many targets all rows have together."""
        return int(self.segment_lengths.sum())

    @property
    def fill_fraction(self) -> float:
        """Share of all places that hold a token, the rest is padding."""
        return self.n_targets / max(1, len(self) * self.seq_len)

    def segments(self, row: int) -> list[tuple[int, int]]:
        """(start in the stream, inputs) of each segment of a row, from left to right."""
        a, b = self.row_starts[row], self.row_starts[row + 1]
        return list(zip(self.segment_starts[a:b].tolist(), self.segment_lengths[a:b].tolist(), strict=True))

    def write(self, ids: IdSource, rows: NDArray[np.int64], out: PackedArrays, pad_id: int) -> int:
        """Write `rows` (at most B of them) into arrays [B, T]; places without a token become padding.
        Returns the number of targets.

        Rows that one segment fills, nearly all, are written together: one gather and a few assignments.
        """
        first, count = self.row_starts[rows], np.arange(self.seq_len + 1)
        full = self.segment_lengths[first] == self.seq_len
        together: Any = slice(None)
        if len(rows) < len(out.tokens) or not full.all():
            together = np.flatnonzero(full)
            for array, padding in (
                (out.tokens, pad_id), (out.targets, pad_id), (out.segment_ids, 0), (out.positions, 0),
                (out.loss_mask, False),
            ):  # fmt: skip
                array[:] = padding
        stretches = ids.take(self.segment_starts[first[full], None] + count)
        out.tokens[together] = stretches[:, :-1]
        out.targets[together] = stretches[:, 1:]
        out.segment_ids[together] = 1
        out.positions[together] = count[:-1]
        out.loss_mask[together] = True
        targets = self.seq_len * len(stretches)
        for b in np.flatnonzero(~full).tolist() if targets < self.seq_len * len(rows) else ():
            at = 0
            for segment, (start, size) in enumerate(self.segments(int(rows[b])), start=1):
                place = slice(at, at + size)
                stretch = ids[start : start + size + 1]
                out.tokens[b, place] = stretch[:-1]
                out.targets[b, place] = stretch[1:]
                out.segment_ids[b, place] = segment
                out.positions[b, place] = count[:size]
                out.loss_mask[b, place] = True
                at += size
            targets += at
        return targets


def pack(starts: NDArray[np.int64], lengths: NDArray[np.int64], seq_len: int) -> PackedRows:
    """Lay documents into rows.

    Args:
        starts: [documents] where each begins in the token stream.
        lengths: [documents] how many ids each has, bos and eos included.
        length: T, the inputs of a row.

    Returns:
        The full rows in stream order, then the rows of left-overs. The same input gives the same rows.

    Raises:
        ConfigError: `length` is not positive.
    """
    if seq_len < 1:
        raise ConfigError(f"rows of {seq_len} tokens are impossible", expected="a row length of at least 1")
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
    """Put items, given from the longest, each into the fullest row that still has room.

    Rows are kept by the room they have left, and a bit set says which amounts of room there are, so that the
    time is linear in the items for a fixed length.
    """
    rows: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0  # bit r is set where some row has room for r more
    for item, size in enumerate(sizes):
        enough = rooms >> size
        if enough:
            room = size + (enough & -enough).bit_length() - 1
            row = by_room[room].pop()
            if not by_room[room]:
                rooms &= ~(1 << room)
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(item)
        if room > size:
            by_room[room - size].append(row)
            rooms |= 1 << (room - size)
    return rows
