"""The order of items over epochs: one permutation per epoch, drawn from (seed, stream, epoch).

    order = EpochOrder(seed, "sft", "order", n=len(rows))
    order[place]      the item at a place of the run; place // n is the epoch

A run resumes at any place, since an epoch's order depends on nothing that was drawn before. The last epoch is kept.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from whorl.tracking.seeds import numpy_rng


class EpochOrder:
    """See the top of this file.

    Args:
        stream: names of the random stream (`tracking/seeds.py`); the epoch is appended.
        n: items per epoch.
        draw: an epoch's order from its generator; by default a permutation of range(n).
    """

    def __init__(
        self, seed: int, *stream: str | int, n: int,
        draw: Callable[[np.random.Generator], NDArray[np.int64]] | None = None,
    ) -> None:  # fmt: skip
        self.seed, self.stream, self.n = seed, stream, n
        self._draw = draw
        self._last: tuple[int, NDArray[np.int64]] | None = None

    def epoch(self, number: int) -> NDArray[np.int64]:
        """Return an epoch's order, [n] or what `draw` returns."""
        if self._last is None or self._last[0] != number:
            rng = numpy_rng(self.seed, *self.stream, number)
            self._last = number, rng.permutation(self.n) if self._draw is None else self._draw(rng)
        return self._last[1]

    def __getitem__(self, place: int) -> int:
        """Return the item at a place of the run, counted over all epochs."""
        epoch, within = divmod(int(place), self.n)
        return int(self.epoch(epoch)[within])
