"""Words as decontamination compares them: without case, punctuation, line ends and compatibility forms.

A word is a run of letters, digits and combining marks after NFKC and case folding. Scripts without spaces between words
(Chinese, Japanese, Thai, Lao, Tibetan and others) give one word per character. Format characters, such as the soft hyphen
and the zero-width space, are removed.

`hash_words` computes the hashes of a block of documents as arrays; `split_words` is the slow reference, which a test
compares with it.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whorl.corpus.deduplication.shingles import WORD_PER_CHARACTER, span_hashes

_FORMAT = re.compile("[\u00ad\u034f\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufe00-\ufe0f\ufeff]")
_ASCII_LOWER = np.arange(256, dtype=np.uint8)
_ASCII_LOWER[65:91] += 32
# Kinds of code points: 0 no word, 1 word, 2 a word of one character.
_ASCII_KINDS = np.array([chr(c).isalnum() and c < 128 for c in range(256)], np.uint8)


@dataclass(frozen=True)
class Words:
    """Hashes of the words of some documents, one after the other.

    hashes: [n_words]; document i has those from first[i] to first[i + 1].
    first: [n_documents + 1]
    """

    hashes: NDArray[np.uint64]
    first: NDArray[np.int64]


def normalize_text(text: str) -> str:
    """Return the text in NFKC and case-folded, without format characters."""
    if text.isascii():
        return text.lower()
    folded = unicodedata.normalize("NFKC", _FORMAT.sub("", text)).casefold()
    return unicodedata.normalize("NFKC", folded)


def split_words(text: str) -> list[str]:
    """Return the words of a text, normalized."""
    words: list[str] = []
    open_word = False
    for character in normalize_text(text):
        if not _is_word(character):
            open_word = False
        elif open_word and not _stands_alone(character):
            words[-1] += character
        else:
            words.append(character)
            open_word = not _stands_alone(character)
    return words


def hash_words(texts: Sequence[str]) -> Words:
    """Return the word hashes of a block of documents (about 60 bytes of memory per character)."""
    if all(text.isascii() for text in texts):
        data = "\n".join([*texts, ""]).encode()
        values: NDArray[Any] = _ASCII_LOWER[np.frombuffer(data, np.uint8)]
        kind = _ASCII_KINDS[values]
        lengths = [len(text) + 1 for text in texts]
    else:
        normal = [normalize_text(text) for text in texts]
        data = "\n".join([*normal, ""]).encode("utf-32-le", "surrogatepass")
        values = np.frombuffer(data, np.uint32)
        kind = _kinds()[values]
        lengths = [len(text) + 1 for text in normal]
    before = np.zeros_like(kind)
    before[1:] = kind[:-1]
    starts = np.flatnonzero((kind > 0) & ((before == 0) | (kind == 2) | (before == 2)))
    after = np.zeros_like(kind)
    after[:-1] = kind[1:]
    ends = np.flatnonzero((kind > 0) & ((after == 0) | (kind == 2) | (after == 2))) + 1
    stops = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return Words(span_hashes(values, starts, ends), np.searchsorted(starts, stops))


def ngram_hashes(words: NDArray[np.uint64], n: int) -> NDArray[np.uint64]:
    """Return the hash of each run of n words, [len(words) - n + 1]; runs across documents are included."""
    starts = np.arange(max(len(words) - n + 1, 0))
    return span_hashes(words, starts, starts + n)


def _is_word(character: str) -> bool:
    return character.isalnum() or unicodedata.category(character)[0] == "M"


def _stands_alone(character: str) -> bool:
    return any(first <= ord(character) <= last for first, last in WORD_PER_CHARACTER)


@cache
def _kinds() -> NDArray[np.uint8]:
    """Return the kind of every code point."""
    kinds = np.fromiter((_is_word(chr(c)) for c in range(0x110000)), np.uint8, 0x110000)
    for first, last in WORD_PER_CHARACTER:
        kinds[first : last + 1] *= 2
    return kinds
