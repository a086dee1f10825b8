"""How unequal visits are: the Lorenz curve and the Gini coefficient (Gini 1912; Lorenz 1905, doi:10.2307/2276207)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def lorenz(counts: ArrayLike) -> list[float]:
    """Return the shares of all visits that the k least visited of S states have together, k = 0 to S."""
    ordered = np.sort(np.asarray(counts, np.float64))
    return [0.0, *(ordered.cumsum() / ordered.sum()).tolist()]


def gini(counts: ArrayLike) -> float:
    """Return 0 if all of S states are visited equally, up to 1 - 1 / S if one has all visits: twice the area between the
    diagonal and the Lorenz curve."""
    shares = np.array(lorenz(counts))
    return float(1 - (shares[1:] + shares[:-1]).mean())
