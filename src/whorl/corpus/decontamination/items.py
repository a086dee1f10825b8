"""Items of test sets, and the index of their word n-grams.

An item of n words or more has all its n-grams. A shorter one has a single n-gram of all its words, if it has at least
`min_words`. An item with fewer cannot be found: it is returned by name, and a set of nothing else is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from whorl.corpus.decontamination.words import hash_words, ngram_hashes
from whorl.data.files import expand_globs
from whorl.data.formats import read_strings
from whorl.errors import ConfigError, DataError


@dataclass(frozen=True)
class TestItem:
    """A text that must not be in the training data. id: "gsm8k_test.jsonl:17" for record 17 of that file."""

    __test__ = False  # no class of tests

    test_set: str
    id: str
    text: str


def read_test_set(files: Sequence[str], field: str) -> list[TestItem]:
    """Return the items of JSONL, Parquet, Arrow or tar files; patterns and URLs are allowed.

    Args:
        field: the text's field in each record.

    Raises:
        DataError: a file is missing or has no records, a record cannot be read, or has no text in this field.
    """
    items: list[TestItem] = []
    for name in expand_globs(files):
        test_set, before = Path(name).name, len(items)
        for number, text in read_strings(name, field, "test set"):
            if not text.strip():
                raise DataError(
                    f"the test set {name}, record {number}, has only white space in the field {field!r}",
                    expected="the text of a test item",
                    do="remove the record, or name the right field",
                )
            items.append(TestItem(test_set, f"{test_set}:{number}", text))
        if len(items) == before:
            raise DataError(
                f"the test set {name} is empty",
                expected="at least one record",
                do="check the path, or leave it out",
            )
    return items


@dataclass(frozen=True)
class ItemIndex:
    """The n-grams of test items.

    lengths, hashes: [n_grams] words and hash of each distinct n-gram, sorted by length, then hash.
    gram_items: [n_postings] items of each n-gram; n-gram g has those from gram_first[g] to gram_first[g + 1].
    items: the items that can be found. too_short: those that cannot.
    """

    items: Sequence[TestItem]
    too_short: Sequence[TestItem]
    lengths: NDArray[np.int64]
    hashes: NDArray[np.uint64]
    gram_first: NDArray[np.int64]
    gram_items: NDArray[np.int64]

    @classmethod
    def build(cls, items: Iterable[TestItem], n: int = 13, min_words: int | None = None) -> ItemIndex:
        """Return the index of these items.

        Args:
            n: words of an n-gram.
            min_words: items of at least so many words are matched by a single n-gram of all their words; default n.

        Raises:
            ConfigError: min_words is not between 1 and n.
            DataError: there are no items, or all are too short.
        """
        least = n if min_words is None else min_words
        if not 1 <= least <= n:
            raise ConfigError(f"min_words is {least}", expected=f"from 1 to n, which is {n}")
        given = list(items)
        if not given:
            raise DataError("the test set has no items", expected="at least one", do="check its files")
        words = hash_words([item.text for item in given])
        counts = np.diff(words.first)
        usable = np.flatnonzero(counts >= least)
        if not len(usable):
            raise DataError(
                f"all {len(given)} test items are shorter than {least} words, the first is {given[0].id}",
                expected=f"items of at least {least} words",
                do="set decontaminate.min_words, or a smaller decontaminate.n",
            )
        parts = []  # [n_grams, 3]: length, hash, item
        for number, item in enumerate(usable.tolist()):
            length = min(n, int(counts[item]))
            found = np.unique(ngram_hashes(words.hashes[words.first[item] : words.first[item + 1]], length))
            column = np.ones(len(found), np.uint64)
            parts.append(np.stack([column * np.uint64(length), found, column * np.uint64(number)]))
        lengths, hashes, of_item = np.concatenate(parts, axis=1)
        order = np.lexsort((of_item, hashes, lengths))
        lengths, hashes, of_item = lengths[order], hashes[order], of_item[order]
        is_new = np.ones(len(order), bool)
        is_new[1:] = (hashes[1:] != hashes[:-1]) | (lengths[1:] != lengths[:-1])
        return cls(
            [given[i] for i in usable.tolist()],
            [given[i] for i in np.flatnonzero(counts < least).tolist()],
            lengths[is_new].astype(np.int64),
            hashes[is_new],
            np.append(np.flatnonzero(is_new), len(order)),
            of_item.astype(np.int64),
        )

    def save(self, path: Path) -> None:
        """Write the n-grams, which is all that a search needs; equal indices give equal bytes."""
        np.save(path, np.stack([self.lengths.astype(np.uint64), self.hashes]))
