"""One pass over a chunk of texts: classes of characters, words with hashes, and segments with hashes.

All filters share it. A word is a run of characters that are not white space (`str.split`). Texts are arrays of code points:
one byte each if all of the chunk is ASCII, else four. Every text is followed by one line feed.

With S[i] the sum of code[j] * P^j for j < i (modulo 2^64), the run [a, b) has the hash (S[b] - S[a]) * P^-a, since an odd P
is invertible modulo 2^64. So one cumulative sum gives the hash of every word, line and paragraph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import regex
from numpy.typing import NDArray

from whorl.corpus.deduplication.shingles import NO_SPACES as SCRIPTS_WITHOUT_SPACES
from whorl.corpus.deduplication.shingles import P_INVERSE, P
from whorl.corpus.measures.measure import Texts
from whorl.tracking.seeds import splitmix64

Ints = NDArray[np.int64]
Hashes = NDArray[np.uint64]

CHUNK_CHARACTERS = 1 << 18  # so that the arrays of a chunk fit a CPU's cache
# WORDLIKE: neither space nor punctuation. NO_SPACES: of a script without spaces between words.
SPACE, WORDLIKE, LETTER, LINE_BREAK, TERMINAL, NO_SPACES = (1 << i for i in range(6))
_LINE_BREAKS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"  # of str.splitlines
# Punctuation: the Unicode categories P and Cc, and the symbols of ASCII.
_CLASSES = {SPACE: r"[\s\x1c-\x1f]", LETTER: r"\p{L}", TERMINAL: r"[\p{Sentence_Terminal}．｡]"}
_CLASSES[NO_SPACES] = SCRIPTS_WITHOUT_SPACES.pattern
_PUNCTUATION = r"[\p{P}\p{Cc}$+<=>^`|~]"


@dataclass(frozen=True)
class Scan:
    """A chunk of texts.

    Attributes:
        texts: [n_texts].
        codes: [n] code points.
        begin, end: [n_texts] where each text lies in `codes`, without its line feed.
    """

    texts: Sequence[str]
    codes: NDArray[Any]
    begin: Ints
    end: Ints

    @cached_property
    def classes(self) -> NDArray[np.uint8]:
        """Bits SPACE ... TERMINAL of each character, [n]."""
        found: NDArray[np.uint8] = character_classes(ascii_only=self.codes.dtype == np.uint8)[self.codes]
        return found

    @cached_property
    def _edges(self) -> tuple[Ints, Ints]:
        space = (self.classes & SPACE).view(bool)
        edges = np.flatnonzero(space[1:] != space[:-1]) + 1
        if len(space) and not space[0]:
            edges = np.concatenate([[0], edges])
        return edges[::2], edges[1::2]  # the last character is a line feed, so edges pair up

    @property
    def word_begin(self) -> Ints:
        """First character of each word, [n_words]."""
        return self._edges[0]

    @property
    def word_end(self) -> Ints:
        """Character after each word, [n_words]."""
        return self._edges[1]

    @cached_property
    def first_word(self) -> Ints:
        """Index of each text's first word, and the number of words: [n_texts + 1]."""
        return np.append(np.searchsorted(self.word_begin, self.begin), len(self.word_begin))

    @cached_property
    def word_text(self) -> Ints:
        """Index of each word's text, [n_words]."""
        return np.repeat(np.arange(len(self.texts)), np.diff(self.first_word))

    @cached_property
    def word_classes(self) -> NDArray[np.uint8]:
        """Bits of all characters of each word and of the white space after it, [n_words]."""
        if not len(self.word_begin):
            return np.zeros(0, np.uint8)
        return np.bitwise_or.reduceat(self.classes, self.word_begin)

    @cached_property
    def ends_line(self) -> NDArray[np.bool_]:
        """Whether each word is the last of a line (`str.splitlines`), [n_words]."""
        found: NDArray[np.bool_] = (self.word_classes & LINE_BREAK) != 0
        return found

    @cached_property
    def starts_line(self) -> NDArray[np.bool_]:
        """Whether each word is the first of a line, [n_words]."""
        return np.concatenate([np.ones(min(1, len(self.ends_line)), bool), self.ends_line[:-1]])

    @cached_property
    def _sums(self) -> Hashes:
        sums = np.zeros(len(self.codes) + 1, np.uint64)
        np.cumsum(self.codes * powers(len(self.codes))[0], out=sums[1:])
        return sums

    def hashes(self, begin: Ints, end: Ints) -> Hashes:
        """Return the hash of each run [begin, end) of characters."""
        return splitmix64((self._sums[end] - self._sums[begin]) * powers(len(self.codes))[1][begin])

    @cached_property
    def words(self) -> Hashes:
        """Hash of each word, [n_words]."""
        return self.hashes(self.word_begin, self.word_end)

    def unspaced(self, begin: Ints, end: Ints) -> NDArray[np.float64]:
        """Return the share of each run's characters that are of scripts without spaces between words."""
        sums = np.concatenate([[0], np.cumsum((self.classes & NO_SPACES) != 0)])
        share: NDArray[np.float64] = (sums[end] - sums[begin]) / np.maximum(end - begin, 1)
        return share

    @cached_property
    def line_feeds(self) -> Ints:
        """Positions of all line feeds, also of those after the texts."""
        return np.flatnonzero(self.codes == 10)

    def sum_words(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the sum of one value per word for each text, [n_texts]."""
        sums = np.concatenate([[0], np.cumsum(values)])
        found: NDArray[Any] = sums[self.first_word[1:]] - sums[self.first_word[:-1]]
        return found


def scans(batch: Texts) -> Iterator[tuple[list[int], Scan]]:
    """Yield chunks of a batch's texts with their indices, texts of ASCII apart from others."""
    for wanted in (True, False):
        chunk: list[int] = []
        size = 0
        for i, text in enumerate(batch.texts):
            if text.isascii() is not wanted:
                continue
            if chunk and size + len(text) > CHUNK_CHARACTERS:
                yield chunk, scan([batch.texts[k] for k in chunk])
                chunk, size = [], 0
            chunk.append(i)
            size += len(text)
        if chunk:
            yield chunk, scan([batch.texts[k] for k in chunk])


def scan(texts: Sequence[str]) -> Scan:
    """Return a chunk of these texts."""
    joined = "\n".join([*texts, ""])
    if joined.isascii():
        codes: NDArray[Any] = np.frombuffer(joined.encode(), np.uint8)
    else:
        codes = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), np.uint32)
    end = np.cumsum([len(text) + 1 for text in texts], dtype=np.int64) - 1
    begin = np.concatenate([[0], end[:-1] + 1]).astype(np.int64)[: len(texts)]
    return Scan(texts, codes, begin, end)


def word_hash(word: str) -> int:
    """Return the hash of one word."""
    return int(scan([word]).words[0])


def powers(n: int) -> tuple[Hashes, Hashes]:
    """Return P^i and P^-i modulo 2^64, for i < n."""
    size = CHUNK_CHARACTERS * 2
    while size < n:
        size *= 2
    first, second = _powers(size)
    return first[:n], second[:n]


@cache
def _powers(n: int) -> tuple[Hashes, Hashes]:
    found = []
    for base in (P, P_INVERSE):
        factors = np.full(n, base, np.uint64)
        factors[:1] = 1
        found.append(np.multiply.accumulate(factors))
    return found[0], found[1]


@cache
def character_classes(*, ascii_only: bool) -> NDArray[np.uint8]:
    """Return the bits of every code point, or of the first 128."""
    everything = "".join(map(chr, range(128 if ascii_only else 0x110000)))
    classes = np.full(len(everything), WORDLIKE, np.uint8)
    for match in regex.finditer(rf"{_PUNCTUATION}+|[\s\x1c-\x1f]+", everything):
        classes[match.start() : match.end()] = 0
    for bit, pattern in _CLASSES.items():
        for match in regex.finditer(f"{pattern}+", everything):
            classes[match.start() : match.end()] |= bit
    for character in _LINE_BREAKS:
        if ord(character) < len(classes):
            classes[ord(character)] |= LINE_BREAK
    return classes
