"""Ensembles of classifiers by quantile buckets (Su et al. 2024, Nemotron-CC, arXiv:2412.02595).

Scores of different classifiers have different scales. So each is replaced by its bucket of equally many documents, from 0
(lowest) to n - 1, and a document gets the highest bucket that any classifier gives it. docs/corpus.md has the same in SQL.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from whorl.errors import ConfigError, DataError


def quantile_buckets(scores: ArrayLike, n_buckets: int = 20) -> NDArray[np.int64]:
    """Return floor(n_buckets * fraction of documents with a lower score) of each, [n] -> [n].

    Equal scores share a bucket, so the result does not depend on the order of documents.

    Raises:
        ConfigError: n_buckets is less than one.
        DataError: a score is NaN.
    """
    values: NDArray[Any] = np.asarray(scores, np.float64)
    if n_buckets < 1:
        raise ConfigError(f"n_buckets is {n_buckets}", expected="at least 1")
    if np.isnan(values).any():
        raise DataError(f"the score of document {int(np.isnan(values).argmax())} is no number")
    lower = np.searchsorted(np.sort(values), values)
    return n_buckets * lower // max(len(values), 1)


def ensemble_buckets(columns: Sequence[ArrayLike], n_buckets: int = 20) -> NDArray[np.int64]:
    """Return the highest bucket of each document over several classifiers' scores, each [n].

    Raises:
        ConfigError: there are no columns, or n_buckets is less than one.
        DataError: the columns differ in length, or a score is NaN.
    """
    if not columns:
        raise ConfigError("the ensemble has no classifier", expected="at least one column of scores")
    buckets = [quantile_buckets(scores, n_buckets) for scores in columns]
    if len({len(found) for found in buckets}) > 1:
        raise DataError(
            f"the ensemble's columns have {', '.join(str(len(found)) for found in buckets)} scores",
            expected="one score per document in each",
        )
    highest: NDArray[np.int64] = np.max(buckets, axis=0)
    return highest
