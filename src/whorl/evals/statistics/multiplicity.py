"""Correction of p-values when a comparison covers many tasks.

    Holm                   the i-th smallest of m p-values is multiplied by m - i + 1, i from 1; the chance of even one
                           false finding is at most alpha (Holm 1979)
    Benjamini-Hochberg     the i-th smallest is multiplied by m / i; the expected share of false findings is at most
                           alpha, for independent or positively dependent tasks (Benjamini and Hochberg 1995)

Adjusted p-values are monotone in the raw ones and at most 1. A task counts as a finding if its adjusted value is at
most alpha.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from whorl.errors import ConfigError, DataError


def holm(p_values: ArrayLike) -> NDArray[np.float64]:
    """Return adjusted p-values [m] in the order given. Raises DataError: a value is not in 0 to 1."""
    p, order = _sorted(p_values)
    adjusted = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    return _restored(adjusted, order)


def benjamini_hochberg(p_values: ArrayLike) -> NDArray[np.float64]:
    """Return adjusted p-values [m] in the order given. Raises DataError: a value is not in 0 to 1."""
    p, order = _sorted(p_values)
    scaled = p[order] * len(p) / np.arange(1, len(p) + 1)
    return _restored(np.minimum.accumulate(scaled[::-1])[::-1], order)


CORRECTIONS = {"holm": holm, "benjamini-hochberg": benjamini_hochberg}


def adjust(p_values: ArrayLike, method: str = "holm") -> NDArray[np.float64]:
    """Return adjusted p-values by the named method. Raises ConfigError: there is no such method."""
    if method not in CORRECTIONS:
        raise ConfigError(f"no correction {method!r}", expected=f"one of: {', '.join(CORRECTIONS)}")
    return CORRECTIONS[method](p_values)


def _sorted(p_values: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
    p = np.asarray(p_values, np.float64)
    if p.ndim != 1 or not ((p >= 0) & (p <= 1)).all():
        raise DataError(f"p-values {p.tolist()}", expected="a list of numbers in 0 to 1")
    return p, np.argsort(p, kind="stable")


def _restored(adjusted: NDArray[np.float64], order: NDArray[np.intp]) -> NDArray[np.float64]:
    found = np.empty_like(adjusted)
    found[order] = np.minimum(adjusted, 1.0)
    return found
