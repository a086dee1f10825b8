"""Training of byte-pair encoding: which pairs of tokens become a token.

Sennrich et al. 2016 (https://arxiv.org/abs/1508.07909) on bytes, as in GPT-2. Start from the 256 bytes. Repeatedly take the
most frequent pair of neighbors inside pre-tokens and make it a token. The order of the tokens is their rank; encoding
applies the lowest rank first. Deterministic: the highest count wins, ties go to the greatest pair of byte strings.

`train_naive` is this paragraph as code and counts everything again for each merge. `train` gives the same list and counts
once. All distinct pre-tokens are concatenated in one array, as a linked list over its positions (`prev`, `next`). Each
position has the count of its pre-token as weight. Each pair keeps the positions where it occurred. A merge is one
vectorized edit of those positions: unlink the right halves, write the new token over the left halves, update the counts of
the neighboring pairs.

Subtle:
- A list of positions may be stale (a neighbor was merged since), so it is checked against the current symbols. A symbol
  only grows, so a pair that has left a position never returns.
- In a run such as "aaaa" the pair (a, a) overlaps itself; runs are merged from the left, every second position.
- A pair's count only falls after its creation, except for pairs with the newest token. So the heap is lazy: an entry with
  a stale count goes back with its true count.
- Two pairs can spell the same bytes (a+bc, ab+c). A token is its bytes: the second pair merges into the existing token.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.int64]

_SHIFT = 20  # a pair (a, b) is the integer a << 20 | b
_MASK = (1 << _SHIFT) - 1
_BORDER, _GONE = -1, -2  # symbols of a border between pre-tokens, and of a merged position


def train(
    counts: Mapping[bytes, int],
    n_tokens: int,
    *,
    min_count: int = 2,
    progress: Callable[[int], None] | None = None,
) -> list[bytes]:
    """Learn a vocabulary from counted pre-tokens.

    Args:
        counts: pre-token -> count (`pretokens.count_pretokens`).
        n_tokens: size of the vocabulary, the 256 bytes included.
        min_count: a less frequent pair makes no token.
        progress: called with the number of tokens so far, at each new token.

    Returns:
        Tokens by rank: the 256 bytes, then the merged ones. Fewer than `n_tokens` if pairs run out.
    """
    tokens = [bytes([i]) for i in range(256)]
    merges = _merges(counts, n_tokens, min_count, progress)
    return tokens + list(dict.fromkeys(left + right for left, right in merges))


def train_merges(
    counts: Mapping[bytes, int], n_tokens: int, *, min_count: int = 2
) -> list[tuple[bytes, bytes]]:
    """Learn a vocabulary as `train` does; return the merged pairs in order.

    The tokens are the 256 bytes and the distinct concatenations of the pairs. There may be more pairs than new tokens,
    since two pairs can spell the same bytes.
    """
    return list(_merges(counts, n_tokens, min_count))


def _merges(
    counts: Mapping[bytes, int],
    n_tokens: int,
    min_count: int,
    progress: Callable[[int], None] | None = None,
) -> Iterator[tuple[bytes, bytes]]:
    """Yield the pairs in the order of their merges. Arguments as of `train`."""
    tokens = [bytes([i]) for i in range(256)]
    rank_of = {t: i for i, t in enumerate(tokens)}
    order = [_descending(t) for t in tokens]  # sorts in the reverse order of the tokens
    words = _Words(counts)
    heap = [(-n, order[k >> _SHIFT], order[k & _MASK], k) for k, n in words.counts.items() if n >= min_count]
    heapq.heapify(heap)
    while len(tokens) < n_tokens and heap:
        top = heap[0]
        key, count = top[3], words.counts.get(top[3], 0)
        if count != -top[0]:
            if count >= min_count:
                heapq.heapreplace(heap, (-count, *top[1:]))
            else:
                heapq.heappop(heap)
            continue
        heapq.heappop(heap)
        left, right = tokens[key >> _SHIFT], tokens[key & _MASK]
        yield left, right
        merged = left + right
        rank = rank_of.get(merged)
        if rank is None:
            rank = rank_of[merged] = len(tokens)
            tokens.append(merged)
            order.append(_descending(merged))
            if progress:
                progress(len(tokens))
        for grown in words.merge(key, rank):
            if (n := words.counts[grown]) >= min_count:
                heapq.heappush(heap, (-n, order[grown >> _SHIFT], order[grown & _MASK], grown))


def train_naive(counts: Mapping[bytes, int], n_tokens: int, *, min_count: int = 2) -> list[bytes]:
    """Reference for `train`: counts everything again for each merge. Slow; for tests."""
    tokens = [bytes([i]) for i in range(256)]
    words = [([bytes([b]) for b in word], n) for word, n in counts.items()]
    while len(tokens) < n_tokens:
        pairs: Counter[tuple[bytes, bytes]] = Counter()
        for word, n in words:
            for pair in pairwise(word):
                pairs[pair] += n
        pair, count = max(pairs.items(), key=lambda item: (item[1], item[0]), default=((b"", b""), 0))
        if count < min_count:
            break
        if pair[0] + pair[1] not in tokens:
            tokens.append(pair[0] + pair[1])
        for word, _ in words:
            i = 0
            while i < len(word) - 1:
                if (word[i], word[i + 1]) == pair:
                    word[i : i + 2] = [pair[0] + pair[1]]
                i += 1
    return tokens


def _descending(token: bytes) -> str:
    """Return a key that sorts byte strings in descending order: complemented bytes, then a character above every byte."""
    return token.translate(_COMPLEMENT).decode("latin-1") + "\u0100"


_COMPLEMENT = bytes(255 - i for i in range(256))


class _Words:
    """All pre-tokens as one linked list of symbols, with the count and the positions of every pair."""

    def __init__(self, counts: Mapping[bytes, int]) -> None:
        text = b"\0" + b"".join(word + b"\0" for word in counts)  # the zero bytes become borders below
        lengths = np.fromiter(map(len, counts), np.int64, len(counts))
        borders = np.concatenate(([0], np.cumsum(lengths + 1)))
        self.symbol = np.frombuffer(text, np.uint8).astype(np.int64)
        self.symbol[borders] = _BORDER
        self.weight = np.zeros(len(text), np.int64)
        self.weight[1:] = np.repeat(np.fromiter(counts.values(), np.int64, len(counts)), lengths + 1)
        self.prev = np.arange(-1, len(text) - 1)
        self.next = np.arange(1, len(text) + 1)
        self.counts: dict[int, int] = {}
        self.where: dict[int, list[Positions]] = {}
        left = np.flatnonzero((self.symbol[:-1] >= 0) & (self.symbol[1:] >= 0))
        self._add(self.symbol[left] << _SHIFT | self.symbol[left + 1], left)

    def _add(self, keys: Positions, positions: Positions) -> list[int]:
        """Count new pairs and store their positions; returns the pairs."""
        if not len(keys):
            return []
        order = np.argsort(keys, kind="stable")
        keys, positions = keys[order], positions[order]
        first = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1])))
        gained = np.add.reduceat(self.weight[positions], first).tolist()
        pairs: list[int] = keys[first].tolist()
        ends = [*first[1:].tolist(), len(keys)]
        for pair, n, start, end in zip(pairs, gained, first.tolist(), ends, strict=True):
            self.counts[pair] = self.counts.get(pair, 0) + n
            self.where.setdefault(pair, []).append(positions[start:end])
        return pairs

    def _remove(self, keys: Positions, weights: Positions) -> None:
        if not len(keys):
            return
        order = np.argsort(keys)
        keys = keys[order]
        first = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1])))
        lost = np.add.reduceat(weights[order], first).tolist()
        for pair, n in zip(keys[first].tolist(), lost, strict=True):
            if pair in self.counts:  # the pair being merged is already deleted
                self.counts[pair] -= n

    def merge(self, pair: int, new: int) -> list[int]:
        """Replace every occurrence of `pair` by the symbol `new`; returns the pairs that grew."""
        symbol, a, b = self.symbol, pair >> _SHIFT, pair & _MASK
        position_lists = self.where.pop(pair)
        del self.counts[pair]
        at = np.concatenate(position_lists) if len(position_lists) > 1 else position_lists[0]
        right = self.next[at]
        current = (symbol[at] == a) & (symbol[right] == b)
        at, right = at[current], right[current]
        if a == b:
            at, right = _every_other(at, self.next)
        before, after = self.prev[at], self.next[right]
        weight, before_symbol, after_symbol = self.weight[at], symbol[before], symbol[after]
        symbol[right] = _GONE
        # Where two merges touch (abab), the border between them is counted as the right neighbor of the first only.
        has_left = (before_symbol >= 0) & (symbol[before] != _GONE)
        has_right = after_symbol >= 0
        self._remove(
            np.concatenate((before_symbol[has_left] << _SHIFT | a, b << _SHIFT | after_symbol[has_right])),
            np.concatenate((weight[has_left], weight[has_right])),
        )
        symbol[at] = new
        self.next[at] = after
        self.prev[after] = at
        left_at, right_at = before[has_left], at[has_right]
        return self._add(
            np.concatenate((symbol[left_at] << _SHIFT | new, new << _SHIFT | symbol[after[has_right]])),
            np.concatenate((left_at, right_at)),
        )


def _every_other(at: Positions, following: Positions) -> tuple[Positions, Positions]:
    """From positions of (a, a), select those that a greedy merge from the left uses; returns them and their right halves."""
    at = np.sort(at)
    index = np.arange(len(at))
    linked = np.concatenate(([False], at[1:] == following[at[:-1]]))
    run_start = np.maximum.accumulate(np.where(linked, 0, index))
    at = at[(index - run_start) % 2 == 0]
    return at, following[at]


def _printable_bytes() -> list[str]:
    """GPT-2's map from each byte to one printable character, which the standard file uses."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    unused = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(unused)) for b in range(256)]


CHAR_OF_BYTE = _printable_bytes()
BYTE_OF_CHAR = {character: byte for byte, character in enumerate(CHAR_OF_BYTE)}


def to_printable(token: bytes) -> str:
    """Return the characters that stand for a token's bytes in a standard file."""
    return "".join(CHAR_OF_BYTE[b] for b in token)
