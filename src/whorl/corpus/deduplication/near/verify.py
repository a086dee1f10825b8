"""Removal of near duplicates: every one is verified by its exact Jaccard similarity with a document that stays.

Documents of a component are visited in the order of preference. One is removed if an earlier one that stays has at least
the threshold's similarity; it names the first such. Up to `MAX_COMPARED_ALL` that stay are compared each, and of more, those
that share a band with it. So of a chain a - b - c, in which
only neighbors are similar, a and c stay. Documents of earlier corpora come first and always stay.

The price of exactness is small: two sorted sets of shingles are merged, at about a nanosecond per shingle.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from whorl.corpus.deduplication.native import library, pointer, pointers
from whorl.corpus.deduplication.near.minhash import band_keys, hash_functions, padded_functions
from whorl.corpus.deduplication.settings import MinHashConfig

MAX_COMPARED_ALL = (
    16  # also in native.cpp: documents of a component that stay, before bands choose among them
)
MAX_KEPT_PER_BUCKET = 256  # also in native.cpp: of more, the later ones are not compared


@dataclass(frozen=True)
class ShingleSets:
    """Sorted sets of shingles in a few arrays: set i is values[part[i]][begin[i] : begin[i] + length[i]]."""

    values: list[NDArray[np.uint64]]
    part: NDArray[np.int64]
    begin: NDArray[np.int64]
    length: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.part)

    def __getitem__(self, i: int) -> NDArray[np.uint64]:
        begin = self.begin[i]
        found: NDArray[np.uint64] = self.values[self.part[i]][begin : begin + self.length[i]]
        return found

    def addresses(self) -> NDArray[np.uint64]:
        """Return where each set begins in memory."""
        offset = self.begin.astype(np.uint64) * np.uint64(8)
        found: NDArray[np.uint64] = pointers(self.values)[self.part] + offset
        return found


def matches(
    sets: ShingleSets, component: NDArray[np.int64], text_file: NDArray[np.int64], stays: NDArray[np.bool_],
    config: MinHashConfig,
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:  # fmt: skip
    """Return which document makes each superfluous, or -1 if it stays, and their similarity.

    Args:
        sets: [n] in the order of preference within a component.
        component: [n] documents of a component follow one another.
        text_file: [n] documents with the same number, except 0, are not compared (`sign.text_files`).
        stays: [n] documents of earlier corpora, which are never removed.
    """
    matched, similarity = np.empty(len(sets), np.int64), np.empty(len(sets), np.float64)
    native = library()
    if native is None:
        return _matches(sets, component, text_file, stays, config)
    functions = padded_functions(config)
    addresses, lengths = sets.addresses(), np.ascontiguousarray(sets.length, np.int64)
    component, text_file = (np.ascontiguousarray(a, np.int64) for a in (component, text_file))
    fixed = np.ascontiguousarray(stays, np.uint8)
    native.whorl_remove(
        len(sets), pointer(addresses), pointer(lengths), pointer(component), pointer(text_file), pointer(fixed),
        pointer(functions[0]), pointer(functions[1]), config.hashes, config.bands, config.rows, config.similarity,
        pointer(matched), pointer(similarity),
    )  # fmt: skip
    return matched, similarity


def _matches(
    sets: ShingleSets, component: NDArray[np.int64], text_file: NDArray[np.int64], stays: NDArray[np.bool_],
    config: MinHashConfig,
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:  # fmt: skip
    """Compute `matches` in numpy."""
    matched, similarity = np.full(len(sets), -1), np.zeros(len(sets))
    buckets: dict[int, list[int]] = {}
    kept: list[int] = []
    functions = list(zip(*hash_functions(config.hashes, config.seed), strict=True))

    def keys_of(own: NDArray[np.uint64]) -> list[int]:
        signature = [np.min((own * a + b) >> np.uint64(32)) for a, b in functions]
        return [int(key) for key in band_keys(np.array([signature], np.uint32), config)[0]]

    def add(i: int) -> None:
        for key in set(keys_of(sets[i])):
            bucket = buckets.setdefault(key, [])
            if len(bucket) < MAX_KEPT_PER_BUCKET:
                bucket.append(i)

    for i in range(len(sets)):
        own = sets[i]
        if i and component[i] != component[i - 1]:
            buckets.clear()
            kept.clear()
        candidates = sorted({j for key in keys_of(own) for j in buckets.get(key, ())}) if buckets else kept
        for j in candidates if not stays[i] else ():
            if text_file[i] and text_file[i] == text_file[j]:
                continue
            common = len(np.intersect1d(own, sets[j], assume_unique=True))
            union = len(own) + len(sets[j]) - common
            if common >= config.similarity * union:
                matched[i], similarity[i] = j, common / union
                break
        else:
            kept.append(i)
            if buckets:
                add(i)
            elif len(kept) > MAX_COMPARED_ALL:
                for j in kept:
                    add(j)
    return matched, similarity
