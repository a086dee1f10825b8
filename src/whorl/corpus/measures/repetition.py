"""Repetition within a document: lines, paragraphs and n-grams of words (Rae et al. 2021, Gopher, appendix A1).

An n-gram can only repeat where both its (n-1)-grams do. So one sort of all 2-grams finds the candidates of the 3-grams, and
so on: few are left from 4 on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from whorl.corpus.measures.scan import Hashes, Ints, Scan
from whorl.tracking.seeds import splitmix64

TOP_ORDERS, DUPLICATE_ORDERS = (2, 3, 4), (5, 6, 7, 8, 9, 10)
COLUMNS = {
    "duplicate_line_fraction": "float64",
    "duplicate_line_characters": "float64",  # as a fraction of the text's characters, as all below
    "duplicate_paragraph_fraction": "float64",
    "duplicate_paragraph_characters": "float64",
    **{f"top_{n}_gram_characters": "float64" for n in TOP_ORDERS},
    **{f"duplicate_{n}_gram_characters": "float64" for n in DUPLICATE_ORDERS},
    "line_repeat_characters": "float64",  # of non-blank lines, as a fraction of the characters without line feeds (FineWeb)
}
_STEP = np.uint64(0xD1B54A32D192ED03)


def repetition(scan: Scan) -> dict[str, NDArray[Any]]:
    """Return `COLUMNS` of a chunk, each [n_texts]."""
    length = np.maximum(scan.end - scan.begin, 1)
    columns = {**_lines(scan, length), **_paragraphs(scan, length)}
    n_words, lengths = len(scan.word_text), scan.word_end - scan.word_begin
    sums = np.concatenate([[0], np.cumsum(lengths)])
    left = scan.first_word[1:][scan.word_text] - np.arange(n_words)  # words to the end of the text
    grams, at = splitmix64(scan.words + scan.word_text.astype(np.uint64) * _STEP), np.arange(n_words)
    for n in range(2, DUPLICATE_ORDERS[-1] + 1):
        # `at`: words at which an (n-1)-gram begins that repeats, as does the next one
        keep = left[at] >= n
        grams, at = grams[keep], at[keep]
        grams = splitmix64(grams * _STEP + scan.words[at + n - 1])
        grams, at, group, first = _repeated(grams, at)
        if n in TOP_ORDERS:
            columns[f"top_{n}_gram_characters"] = _top(scan, n, at, group, first, sums) / length
        else:
            order = np.argsort(at)
            columns[f"duplicate_{n}_gram_characters"] = (
                _duplicates(scan, n, at[order], group[order], sums) / length
            )
        repeats = np.zeros(n_words + 1, bool)
        repeats[at] = True
        follows = repeats[at + 1]
        grams, at = grams[follows], at[follows]
    return columns


def _repeated(grams: Hashes, at: Ints) -> tuple[Hashes, Ints, Ints, Ints]:
    """Return the hashes and places of those that occur twice or more, sorted by hash, with their groups.

    The index is a key's low bits: numpy sorts numbers several times as fast as it sorts their indices.
    Returns: hashes, places, group of each, index of each group's first.
    """
    bits = np.uint64(max(len(grams) - 1, 1).bit_length())
    keys = np.sort(grams >> bits << bits | np.arange(len(grams), dtype=np.uint64))
    index = (keys & ((np.uint64(1) << bits) - np.uint64(1))).astype(np.int64)
    keys >>= bits
    same = keys[1:] == keys[:-1]
    repeats = np.zeros(len(keys), bool)
    repeats[1:] = same
    repeats[:-1] |= same
    index, keys = index[repeats], keys[repeats]
    is_first = np.ones(len(keys), bool)
    is_first[1:] = keys[1:] != keys[:-1]
    return grams[index], at[index], np.cumsum(is_first) - 1, np.flatnonzero(is_first)


def _top(scan: Scan, n: int, at: Ints, group: Ints, first: Ints, sums: Ints) -> Ints:
    """Return, for each text, count * length of its most frequent n-gram (the first of them), joined by spaces."""
    n_texts = len(scan.texts)
    begins = scan.first_word[:-1]
    best = np.where(np.diff(scan.first_word) >= n, begins, -1)  # none repeats: the first, once
    count = np.ones(n_texts, np.int64)
    if len(first):
        counts, places = np.diff(np.append(first, len(at))), at[first]
        texts = scan.word_text[places]
        order = np.lexsort((places, -counts, texts))
        chosen = order[np.flatnonzero(np.diff(texts[order], prepend=-1))]
        best[texts[chosen]], count[texts[chosen]] = places[chosen], counts[chosen]
    size = sums[np.minimum(best + n, len(sums) - 1)] - sums[np.maximum(best, 0)] + n - 1
    return np.where(best >= 0, size * count, 0)


def _duplicates(scan: Scan, n: int, at: Ints, group: Ints, sums: Ints) -> NDArray[Any]:
    """Return the characters of n-grams that repeat an earlier one; n-grams that overlap one are skipped."""
    seen, places, following = set[int](), [], 0
    for place, number in zip(at.tolist(), group.tolist(), strict=True):
        if place >= following:
            if number in seen:
                places.append(place)
                following = place + n
            else:
                seen.add(number)
    found = np.array(places, np.int64)
    size = sums[found + n] - sums[found]
    return np.bincount(scan.word_text[found], size, minlength=len(scan.texts))


def _lines(scan: Scan, length: Ints) -> dict[str, NDArray[Any]]:
    feeds, n_texts = scan.line_feeds, len(scan.texts)
    begin = np.concatenate([[0], feeds[:-1] + 1])
    filled = feeds > begin
    begin, end = begin[filled], feeds[filled]
    text = np.searchsorted(scan.end, begin, side="right")
    size = (end - begin) * _repeats_earlier(scan, begin, end, text)
    # Like a split at runs of line feeds: an empty line before the first and after the last run.
    lead = np.array([t.startswith("\n") for t in scan.texts], bool)
    trail = np.array([t.endswith("\n") for t in scan.texts], bool)
    n_lines = np.bincount(text, minlength=n_texts) + lead + trail
    duplicates = np.bincount(text[size > 0], minlength=n_texts) + (lead & trail)
    words = np.searchsorted(scan.word_begin, begin) < np.searchsorted(scan.word_begin, end)
    n_feeds = np.bincount(np.searchsorted(scan.end, feeds), minlength=n_texts) - 1
    return {
        "duplicate_line_fraction": duplicates / np.maximum(n_lines, 1),
        "duplicate_line_characters": np.bincount(text, size, minlength=n_texts) / length,
        "line_repeat_characters": np.bincount(text, size * words, minlength=n_texts)
        / np.maximum(scan.end - scan.begin - n_feeds, 1),
    }


def _paragraphs(scan: Scan, length: Ints) -> dict[str, NDArray[Any]]:
    n_texts = len(scan.texts)
    some = np.flatnonzero(np.diff(scan.first_word))  # texts with a word
    begin, end = scan.word_begin[scan.first_word[some]], scan.word_end[scan.first_word[some + 1] - 1]
    feeds = scan.line_feeds
    is_first = np.diff(feeds, prepend=-2) > 1
    first = feeds[is_first]
    last = feeds[np.append(is_first[1:], True)] if len(feeds) else feeds
    long = last > first
    first, last = first[long], last[long]
    text = np.searchsorted(end, first, side="right")  # of the texts with a word: the first that ends after it
    inside = text < len(some)
    inside[inside] = first[inside] > begin[text[inside]]
    begins = np.sort(np.concatenate([begin, last[inside] + 1]))
    ends = np.sort(np.concatenate([end, first[inside]]))
    owner = some[np.searchsorted(begin, begins, side="right") - 1] if len(some) else begins
    repeats = _repeats_earlier(scan, begins, ends, owner)
    counts = np.bincount(owner, minlength=n_texts)
    return {
        "duplicate_paragraph_fraction": np.bincount(owner, repeats, minlength=n_texts)
        / np.maximum(counts, 1),
        "duplicate_paragraph_characters": np.bincount(owner, (ends - begins) * repeats, minlength=n_texts)
        / length,
    }


def _repeats_earlier(scan: Scan, begin: Ints, end: Ints, text: Ints) -> NDArray[np.bool_]:
    """Return whether each run of characters equals an earlier one of the same text."""
    keys = splitmix64(scan.hashes(begin, end) + text.astype(np.uint64) * _STEP)
    _, at, _, first = _repeated(keys, np.arange(len(keys)))
    later = np.zeros(len(keys), bool)
    later[at] = True
    later[at[first]] = False
    return later
