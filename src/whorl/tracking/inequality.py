"""Gini coefficient and Lorenz curve: how unequal shares are, of experts in a batch or of sources in a corpus.

With the values c in ascending order (Gini 1912), G = sum_i (2 i - n - 1) c_i / (n sum_i c_i), i from 1. It is 0 for equal
values and 1 - 1/n if one has all. The Lorenz curve (Lorenz 1905) is the share that the smallest i values have together;
G is twice the area between it and the diagonal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

    Values = TypeVar("Values", Tensor, NDArray[np.float64])


def gini(values: Values) -> Values:
    """Return the Gini coefficient [] of floats [n], none negative; 0 if all are 0. Takes a tensor or an array."""
    ascending = values[values.argsort()]
    rank, n, total = (ascending >= 0).cumsum(0), len(values), ascending.sum()
    found: Values = ((2 * rank - n - 1) * ascending).sum() / (n * total + (total == 0))
    return found


def lorenz_curve(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return the share of members and their share of the total, smallest first; both from 0 to 1, [n + 1].

    Args:
        values: [n], none negative, not all 0.
    """
    ascending = np.sort(np.asarray(values, np.float64))
    shares = np.concatenate([[0.0], np.cumsum(ascending) / ascending.sum()])
    return np.linspace(0, 1, len(shares)).tolist(), shares.tolist()
