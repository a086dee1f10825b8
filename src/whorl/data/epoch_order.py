"""The order of items over epochs: one permutation per epoch, drawn from (seed, stream, epoch).

    order = EpochOrder(seed, "sft", "order", n=len(rows))
    order[place]      the item at a place of the run; place // n is the epoch

    steps = StepOrder(order, epochs=2, batch_size=16)
    steps[k]          the items of step k

A run resumes at any place, since an epoch's order depends on nothing that was drawn before. The last epoch is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from whorl.errors import DataError
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


class StepOrder:
    """The items of each step: a fixed number of them, or as many as a token budget holds.

    With a budget, a step takes the next items while their sizes sum to at most `batch_tokens`. So every item comes once
    per epoch, and the last step may be short. A step depends on the order, the sizes and the limits only, so a run resumes
    at any step.

    Args:
        order: of the items.
        epochs: passes over the items, above 0.
        batch_size: items per step; with it the last step continues into another epoch.
        batch_tokens: in place of `batch_size`. sizes: [n] tokens of each item, needed with it.

    steps: of all epochs. largest: items of a step, at most.

    Raises:
        DataError: an item is larger than the budget.
    """

    def __init__(
        self, order: EpochOrder, *, epochs: float, batch_size: int = 1,
        batch_tokens: int | None = None, sizes: NDArray[np.int64] | None = None,
    ) -> None:  # fmt: skip
        self.order = order
        if batch_tokens is None or sizes is None:
            self.steps, self.largest = max(1, math.ceil(epochs * order.n / batch_size)), batch_size
            self._starts = None
            return
        if (above := np.flatnonzero(sizes > batch_tokens)).size:
            number = int(above[0])
            raise DataError(
                f"example {number} of {order.n:,} has {int(sizes[number]):,} tokens, and batch_tokens is {batch_tokens:,} "
                f"({above.size:,} are longer than a batch)",
                expected="a batch that holds the longest example",
                do=f"raise batch_tokens to {int(sizes.max()):,}, or lower seq_len, which leaves longer examples out",
            )
        self._starts = self._fill_budget(epochs, batch_tokens, sizes)
        self.steps, self.largest = len(self._starts) - 1, int(np.diff(self._starts).max())

    def _fill_budget(self, epochs: float, budget: int, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the first place of each step, and the number of places of the run: [steps + 1]."""
        places = max(1, math.ceil(epochs * self.order.n))
        starts, room, done = [0], budget, 0  # tokens left in the current step, places of earlier epochs
        for epoch in range(-(-places // self.order.n)):
            ends = np.cumsum(sizes[self.order.epoch(epoch)][: places - done])
            used = 0  # tokens of this epoch in earlier steps
            while (stop := int(np.searchsorted(ends, used + room, "right"))) < len(ends):
                starts.append(done + stop)
                used, room = int(ends[stop - 1]) if stop else 0, budget
            room -= int(ends[-1]) - used
            done += len(ends)
        return np.array([*starts, places], np.int64)

    def __getitem__(self, step: int) -> list[int]:
        """Return the items of a step."""
        first, last = step * self.largest, (step + 1) * self.largest
        if self._starts is not None:
            first, last = int(self._starts[step]), int(self._starts[step + 1])
        return [self.order[place] for place in range(first, last)]
