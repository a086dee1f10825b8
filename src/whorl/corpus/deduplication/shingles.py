"""Sets of shingles: hashes of every run of n words (or characters) of a text.

A word is a run of letters, digits, underscores and non-ASCII bytes; its hash is a polynomial in its bytes. The numpy
path is vectorized over a block of documents. With S[i] the sum of byte[j] * P^j for j < i (modulo 2^64), the word
[a, b) has the hash (S[b] - S[a]) * P^-a. An odd P is invertible modulo 2^64. The native path computes the same.
`shingle_hashes` is the slow reference.

Scripts without spaces between words (Chinese, Japanese, Thai, Lao, Tibetan, Burmese, Khmer, Javanese and a few others)
give one word per character. The first two bytes of a character in UTF-8 show its script (`STANDS_ALONE`), so texts are not
decoded.

A document of fewer words than a shingle has one shingle, of all its words; one without a word has the empty shingle.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from whorl.corpus.deduplication.native import library, pointer
from whorl.corpus.deduplication.settings import MinHashConfig
from whorl.tracking.seeds import splitmix64

if TYPE_CHECKING:
    import pyarrow as pa

# First and last code point of the scripts in which each character counts as a word.
WORD_PER_CHARACTER = (
    (0x0E00, 0x0FFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x1980, 0x1AAF), (0x1B00, 0x1B7F), (0x2E80, 0x2FDF),
    (0x3040, 0x30FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xA980, 0xA9DF), (0xF900, 0xFAFF), (0x20000, 0x3FFFF),
)  # fmt: skip
NO_SPACES = re.compile(f"[{''.join(f'{chr(first)}-{chr(last)}' for first, last in WORD_PER_CHARACTER)}]")

BLOCK_BYTES = 2_000_000  # of text that are hashed at a time

_MASK = (1 << 64) - 1
P = 0x9E3779B97F4A7C15  # odd, so invertible modulo 2^64
P_INVERSE = pow(P, -1, 1 << 64)
_WORD_BYTES = [*range(48, 58), *range(65, 91), 95, *range(97, 123), *range(128, 256)]
_SPACES = [9, 10, 11, 12, 13, 32]


def _stand_alone() -> NDArray[np.bool_]:
    """Return whether a character that begins with these two bytes is a word: [first * 256 + second]."""
    table = np.zeros(1 << 16, bool)
    for first, last in WORD_PER_CHARACTER:
        for code in (*range(first, last, 64), last):
            one, two, *_ = chr(code).encode()
            table[one << 8 | two] = True
    return table


STANDS_ALONE = _stand_alone()


@dataclass(frozen=True)
class TextBlock:
    """TextBlock in one buffer: text i is data[starts[i] : ends[i]]."""

    data: NDArray[np.uint8]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]

    @classmethod
    def of(cls, texts: Sequence[bytes]) -> TextBlock:
        """Return byte strings as a block."""
        stops = np.cumsum([0, *map(len, texts)], dtype=np.int64)
        return cls(np.frombuffer(b"".join(texts), np.uint8), stops[:-1].copy(), stops[1:].copy())

    @classmethod
    def of_column(cls, column: pa.Array | pa.ChunkedArray, config: MinHashConfig) -> TextBlock:
        """Return a column of strings, normalized and cut to `max_document_bytes`; copies only what is normalized."""
        import pyarrow as pa

        column = column.cast(pa.large_string())
        if config.normalization != "none":
            import pyarrow.compute as pc  # takes 0.1 s

            if config.normalization == "nfkc_lower":
                column = pc.utf8_normalize(column, form="NFKC")
            column = pc.utf8_lower(column)
        array: Any = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        _, offsets, data = array.buffers()
        bounds = np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1]
        content = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
        starts = np.ascontiguousarray(bounds[:-1])
        return cls(content, starts, np.minimum(bounds[1:], starts + config.max_document_bytes))

    def __len__(self) -> int:
        return len(self.starts)

    def blocks(self, size: int = BLOCK_BYTES) -> list[tuple[int, int]]:
        """Return ranges of documents of at most `size` bytes, or of one longer document."""
        total = np.cumsum(self.ends - self.starts)
        out, begin = [], 0
        while begin < len(self):
            before = int(total[begin - 1]) if begin else 0
            end = max(int(np.searchsorted(total, before + size, side="right")), begin + 1)
            out.append((begin, end))
            begin = end
        return out

    def part(self, begin: int, end: int) -> TextBlock:
        """Return some of the texts, in the same buffer."""
        return TextBlock(self.data, self.starts[begin:end], self.ends[begin:end])


def hashed_bytes(config: MinHashConfig) -> NDArray[np.uint8]:
    """Return for each byte what is hashed in its place; 0 for a byte that separates. [256]"""
    table = np.arange(256, dtype=np.uint8)
    if config.unit == "words":
        separators = np.ones(256, bool)
        separators[_WORD_BYTES] = False
        table[separators] = 0
    else:
        table[_SPACES] = 0
    if config.digits == "zero":
        table[48:58] = 48
    return table


def block_shingles(texts: TextBlock, config: MinHashConfig) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Return the shingle hashes of a block of documents, with repetitions, where each document's begin, and the end.

    The numpy path needs about 60 bytes of memory per byte of text, the native path 16.
    """
    native = library()
    if native is None:
        return _block_shingles(texts, config)
    sizes = texts.ends - texts.starts
    table = hashed_bytes(config)
    words = np.empty(int(sizes.max(initial=0)) + 8, np.uint64)
    out = np.empty(int(sizes.sum()) + len(texts), np.uint64)
    first = np.empty(len(texts) + 1, np.int64)
    starts, ends = np.ascontiguousarray(texts.starts), np.ascontiguousarray(texts.ends)
    native.whorl_shingles(
        pointer(texts.data), pointer(starts), pointer(ends), len(texts), pointer(table), pointer(STANDS_ALONE),
        config.unit == "characters",
        config.shingle, pointer(words), pointer(out), pointer(first),
    )  # fmt: skip
    return out[: first[-1]], first


def _block_shingles(texts: TextBlock, config: MinHashConfig) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Compute `block_shingles` in numpy."""
    parts = [texts.data[a:b] for a, b in zip(texts.starts, texts.ends, strict=True)]
    separator = np.full(1, 10, np.uint8)
    data = np.concatenate([x for part in parts for x in (part, separator)] or [separator])
    hashed = hashed_bytes(config)[data]
    starts, ends = _word_bounds(data, hashed, config)
    words = span_hashes(hashed, starts, ends)
    stops = np.cumsum([len(part) + 1 for part in parts], dtype=np.int64)  # document i ends before stops[i]
    first_word = np.concatenate([[0], np.searchsorted(starts, stops)]).astype(np.int64)  # [n_documents + 1]
    n_shingles = np.maximum(np.diff(first_word) - config.shingle + 1, 1)
    first = np.concatenate([[0], np.cumsum(n_shingles)]).astype(np.int64)
    at = np.arange(first[-1]) + np.repeat(first_word[:-1] - first[:-1], n_shingles)
    left = np.repeat(first_word[1:], n_shingles) - at  # words from this one to the document's end
    words = np.append(words, np.zeros(config.shingle, np.uint64))
    shingles = np.zeros(len(at), np.uint64)
    for i in range(config.shingle):
        shingles = shingles * np.uint64(P) + np.where(left > i, words[np.minimum(at + i, len(words) - 1)], 0)
    return splitmix64(shingles), first


def _word_bounds(
    data: NDArray[np.uint8], hashed: NDArray[np.uint8], config: MinHashConfig
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where the words, or characters, begin and end. The last byte is a separator."""
    heads = np.flatnonzero((data & 0xC0) != 0x80)
    if config.unit == "words":
        inside, alone, follows = hashed != 0, np.zeros(len(data), bool), np.zeros(len(data), bool)
        alone[:-1] = STANDS_ALONE[data[:-1].astype(np.int64) << 8 | data[1:]]
        follows[heads[1:]] = alone[heads[:-1]]  # the character before is a word
        before = np.concatenate([[False], inside[:-1]])
        begins = np.flatnonzero(inside & (~before | alone | follows))
        stops = np.flatnonzero(before & ~inside)
        after = np.append(begins[1:], len(data))[: len(begins)]
        return begins, np.minimum(after, stops[np.searchsorted(stops, begins, side="right")])
    own = hashed[heads] != 0
    return heads[:-1][own[:-1]], heads[1:][own[:-1]]


def unique_shingles(texts: TextBlock, config: MinHashConfig) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Return each document's set of shingles, sorted, and where it begins: [n], [n_documents + 1]."""
    shingles, first = block_shingles(texts, config)
    native = library()
    if native is not None:
        native.whorl_unique(pointer(shingles), pointer(first), len(texts))
        return shingles[: first[-1]], first
    sets = [np.unique(shingles[a:b]) for a, b in itertools.pairwise(first)]
    bounds = np.cumsum([0, *map(len, sets)], dtype=np.int64)
    return np.concatenate([np.zeros(0, np.uint64), *sets]), bounds


def shingle_hashes(text: bytes, config: MinHashConfig | None = None) -> set[int]:
    """Reference: return the hashes of one document's shingles, computed word by word."""
    config = config or MinHashConfig()
    table, words, word = hashed_bytes(config).tolist(), list[int](), list[int]()
    is_character, alone = config.unit == "characters", False
    for byte, following in itertools.pairwise((*text, 10, 10)):
        is_tail, begins = byte & 0xC0 == 0x80, not is_character and bool(STANDS_ALONE[byte << 8 | following])
        continues = is_tail if is_character or alone else table[byte] != 0 and not begins
        if word and not continues:
            words.append(sum(b * pow(P, i, 1 << 64) for i, b in enumerate(word)) & _MASK)
            word = []
        if word or (table[byte] and not (is_character and is_tail)):
            alone = alone if word else begins
            word.append(table[byte])
        else:
            alone = False
    words, out = splitmix64(np.array(words, np.uint64)).tolist(), []
    for at in range(max(len(words) - config.shingle + 1, 1)):
        shingle = 0
        window = words[at : at + config.shingle]
        for value in window + [0] * (config.shingle - len(window)):
            shingle = (shingle * P + value) & _MASK
        out.append(shingle)
    return set(splitmix64(np.array(out, np.uint64)).tolist())


def jaccard_similarity(a: bytes, b: bytes, config: MinHashConfig | None = None) -> float:
    """Reference: return the exact Jaccard similarity of two documents' shingles."""
    first, second = shingle_hashes(a, config), shingle_hashes(b, config)
    return len(first & second) / len(first | second)


def span_hashes(
    values: NDArray[Any], starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> NDArray[np.uint64]:
    """Return a hash of each span values[starts[i] : ends[i]], which does not depend on where it is.

    Args:
        values: [n] numbers, such as bytes, code points, or the hashes of words.
    """
    sums = np.zeros(len(values) + 1, np.uint64)
    np.cumsum(values * _powers(P, len(values)), out=sums[1:])
    return splitmix64((sums[ends] - sums[starts]) * _powers(P_INVERSE, len(values) + 1)[starts])


def _powers(base: int, n: int) -> NDArray[np.uint64]:
    """Return base^0 .. base^(n-1) modulo 2^64."""
    return _power_table(base, 1 << max(10, (n - 1).bit_length()))[:n]


@lru_cache(maxsize=4)  # 32 MB each for a block of 4 MB
def _power_table(base: int, n: int) -> NDArray[np.uint64]:
    out = np.full(n, base, np.uint64)
    out[:1] = 1
    np.multiply.accumulate(out, out=out)
    out.setflags(write=False)
    return out
