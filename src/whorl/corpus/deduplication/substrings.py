"""Exact substring deduplication by a suffix array (Lee et al. 2022, arXiv:2107.06499).

Every run of at least n bytes that occurs more than once in the texts is found, within documents and between them. The
suffix array is built by prefix doubling and sorted by the first n bytes only. Adjacent suffixes of the full array have a
common prefix (LCP) of n bytes or more exactly if their ranks at depth n are equal. Suffixes whose prefix is unique at
depth 8, 16, 32 .. are left out of later sorts, so most of the text is sorted once.

The first occurrence of each window of n bytes stays whole; the other bytes of its later occurrences are removed. Spans do
not cross documents, and begin and end between characters (code points).

Subtle: a later occurrence that overlaps the first occurrence of another window keeps the common bytes. So "aaaaaaaa" with
n = 4 becomes "aaaa".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from whorl.corpus.deduplication.shingles import TextBlock
from whorl.errors import ConfigError, DataError

MAX_BYTES = 1 << 31  # of texts; two ranks share a 64-bit key


@dataclass(frozen=True)
class SubstringSpans:
    """Bytes that are removed, in order, and where the same bytes stay.

    document, start, end: [n] span, in UTF-8 bytes of its document.
    matched_document, matched_start: [n] first occurrence of the span's beginning. A span may continue with text of
        several first occurrences.
    """

    document: NDArray[np.int64]
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    matched_document: NDArray[np.int64]
    matched_start: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.start)

    @property
    def n_bytes(self) -> int:
        """Return how many bytes are removed."""
        return int((self.end - self.start).sum())


def repeated_spans(texts: Sequence[str], min_bytes: int = 200) -> SubstringSpans:
    """Return the spans of repeated substrings that are removed. The first occurrence, in the order of texts, stays.

    Memory: at most about 75 bytes per byte of text.

    Args:
        min_bytes: shortest substring. The paper has 50 tokens, about 200 bytes of English.

    Raises:
        ConfigError: `min_bytes` is below 1.
        DataError: the texts have more than `MAX_BYTES` bytes.
    """
    if min_bytes < 1:
        raise ConfigError(f"min_bytes is {min_bytes}", expected="1 or more", do="raise min_bytes")
    block = TextBlock.of([text.encode("utf-8", "surrogatepass") for text in texts])
    data, stops = block.data, block.ends
    if len(data) > MAX_BYTES:
        raise DataError(
            f"substring deduplication of {len(data)} bytes", expected=f"at most {MAX_BYTES} bytes", do="split the corpus"
        )  # fmt: skip
    at, ranks = _repeated_windows(data, stops, min_bytes)
    _, index, inverse = np.unique(ranks, return_index=True, return_inverse=True)
    first = at[index[inverse]]  # of each window: where its first occurrence begins
    later = at != first
    removed = _covered(at[later], min_bytes, len(data)) & ~_covered(at[~later], min_bytes, len(data))
    heads = np.flatnonzero((data & 0xC0) != 0x80)
    if len(heads):  # a character goes if all its bytes go
        lengths = np.diff(heads, append=len(data))
        removed = np.repeat(np.logical_and.reduceat(removed, heads), lengths)
    edges = np.diff(removed, prepend=False)
    edges[block.starts[(block.starts > 0) & (block.starts < len(data))]] = True
    cuts = np.flatnonzero(edges)
    start = cuts[removed[cuts]]
    end = np.append(cuts, len(data))[np.searchsorted(cuts, start, side="right")]
    window = np.searchsorted(at[later], start, side="right") - 1
    matched = first[later][window] + start - at[later][window]
    document, origin = _document(start, stops), _document(matched, stops)
    return SubstringSpans(
        document, start - block.starts[document], end - block.starts[document], origin,
        matched - block.starts[origin],
    )  # fmt: skip


def without_bytes(text: str, starts: Sequence[int], ends: Sequence[int]) -> str:
    """Return the text without these spans of its UTF-8, which are in order."""
    content, parts, at = text.encode("utf-8", "surrogatepass"), list[bytes](), 0
    for start, end in zip(starts, ends, strict=True):
        parts.append(content[at:start])
        at = end
    return b"".join([*parts, content[at:]]).decode("utf-8", "surrogatepass")


def _repeated_windows(
    data: NDArray[np.uint8], stops: NDArray[np.int64], n: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where windows of n bytes begin that occur more than once within documents, in order, and their ranks.

    Equal windows have equal ranks, and ranks have the lexicographic order.

    Args:
        stops: [n_documents] where documents end.
    """
    depth = min(n, 8)
    at = np.arange(max(len(data) - depth + 1, 0))
    at = at[at + depth <= stops[_document(at, stops)]]
    keys = np.zeros(len(at), np.uint64)
    for i in range(depth):
        keys = keys << np.uint64(8) | data[at + i]
    at, ranks = _group(at, keys)
    by_position = np.zeros(len(data) + 1, np.uint32)  # rank of the window at a position; 0 if it is unique
    while depth < n and len(at):
        step = min(depth, n - depth)
        by_position[:] = 0
        by_position[at] = ranks
        fits = at + depth + step <= stops[_document(at, stops)]
        fits &= by_position[np.minimum(at + step, len(data))] > 0
        at, ranks = at[fits], ranks[fits]
        keys = ranks.astype(np.uint64) << np.uint64(32) | by_position[at + step]
        at, ranks = _group(at, keys)
        depth += step
    return at, ranks


def _group(at: NDArray[np.int64], keys: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the positions whose key occurs more than once, and the ranks of their keys, from 1."""
    order = np.argsort(keys)
    keys = keys[order]
    new = np.ones(len(keys), bool)
    new[1:] = keys[1:] != keys[:-1]
    repeated = ~(new & np.append(new[1:], True))
    ranks = np.zeros(len(at), np.int64)
    ranks[order] = np.where(repeated, np.cumsum(new & repeated), 0)
    chosen = ranks > 0
    return at[chosen], ranks[chosen]


def _covered(at: NDArray[np.int64], n: int, size: int) -> NDArray[np.bool_]:
    """Return the bytes within windows of n bytes that begin at `at`: [size]."""
    change = np.zeros(size + 1, np.int8)  # windows begin at different positions, so each sum is 0, 1 or -1
    change[at] += 1
    change[at + n] -= 1
    covered: NDArray[np.bool_] = np.cumsum(change[:size], dtype=np.int64) > 0
    return covered


def _document(at: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the document of each byte position."""
    return np.searchsorted(stops, at, side="right").astype(np.int64)
