"""Exact duplicates: which of the documents with equal text stays.

A copy is superfluous only if another one stays. So the query decides first what it would keep if no document were a copy,
and of the copies that it keeps the most preferred one stays. Were the first row to stay always, a text would be lost when
another rule drops that row, for its licence perhaps.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def surviving_copies(
    first: NDArray[np.int64], kept: NDArray[np.bool_], ranks: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """Return for each document the row of the equal one that stays: [n_documents].

    Args:
        first: [n_documents] the first row with the same text.
        kept: [n_documents] documents that all other rules keep. Where they keep no copy, any may stay.
        ranks: [n_documents] the smallest of several kept copies stays; default: the order of rows.
    """
    rank = np.arange(len(first)) if ranks is None else ranks
    order = np.lexsort((rank, ~kept, first))
    group = first[order]
    begins = np.ones(len(order), bool)
    begins[1:] = group[1:] != group[:-1]
    stays = np.empty(len(order), np.int64)
    stays[order] = order[np.flatnonzero(begins)][np.cumsum(begins) - 1]
    return stays
