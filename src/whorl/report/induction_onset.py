"""Where the loss fell: the step at which copying heads formed, found from the curve alone.

A small model's loss follows a smooth curve, nearly straight in the logarithm of the step, until its
attention learns to copy what followed an earlier occurrence of the same token ("induction heads", Olsson
et al. 2022, In-context Learning and Induction Heads). Then the loss drops within a few per cent of the
run. On a small budget this one event decides the outcome, so the report marks it.

The subtle part is not to mark something else. The very beginning is steep in any run (the model learns
which tokens are frequent), and the end is steep when the learning rate decays. So the search looks at the
slope against the logarithm of the step, leaves out the first part and the decay, and reports a fall only
if the steepest stretch is clearly steeper than the run's usual one and steeper than the stretches before
it; otherwise there is nothing to mark.

Where training also measured copying itself (the loss on rows that repeat shuffled tokens), that curve is the better
witness: the fall is where it crosses the middle of its way down, if it goes down by more than a quarter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from whorl.report.data import CurvePoint, InductionPoint

_GRID = 120  # points in the logarithm of the step
_WINDOW = 10  # grid points a slope is taken over
_SKIPPED_FRACTION = 0.02  # share of the steps in which everything is steep
_MIN_SLOPE_RATIO = 1.6  # times the median slope
_MAX_COPY_LOSS_RATIO = 0.75  # the copying loss must go below this share of its highest


@dataclass(frozen=True)
class LossDrop:
    """The mark: in the middle of the steepest stretch; `before` and `after` are losses at its ends."""

    step: int
    before: float
    after: float
    seconds: float | None
    from_copy_loss: bool = (
        False  # found on the copying curve: `before` and `after` are its highest and lowest
    )


def find_induction_onset(copying: Sequence[InductionPoint], points: Sequence[CurvePoint]) -> LossDrop | None:
    """The step at which copying was learnt, or None while it was not. `points` give the time."""
    if not copying:
        return None
    high = max(point.nll for point in copying)
    low = min(point.nll for point in copying)
    if low > _MAX_COPY_LOSS_RATIO * high:
        return None
    step = next(point.step for point in copying if point.nll < (high + low) / 2)
    nearest = min(points, key=lambda point: abs(point.step - step))
    return LossDrop(step, high, low, nearest.seconds, from_copy_loss=True)


def smooth(values: Sequence[float], half_life: float) -> npt.NDArray[np.float64]:
    """Exponential average over both sides, so that nothing is shifted; `half_life` in samples."""
    keep = 0.5 ** (1 / max(half_life, 1e-9))
    forward = _ema(np.asarray(values, float), keep)
    return _ema(forward[::-1], keep)[::-1]


def _ema(values: npt.NDArray[np.float64], keep: float) -> npt.NDArray[np.float64]:
    out = np.empty_like(values)
    total = weight = 0.0
    for i, value in enumerate(values):
        total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        out[i] = total / weight
    return out


def find_loss_drop(points: Sequence[CurvePoint]) -> LossDrop | None:
    """The fall, or None when the curve has none. `points` in the order of their steps."""
    points = _before_decay(points)
    if len(points) < 40:
        return None
    steps = np.array([max(point.step, 1) for point in points], float)
    losses = smooth([point.loss for point in points], len(points) / 200)
    first = max(steps[0], _SKIPPED_FRACTION * steps[-1])
    grid = np.linspace(np.log(first), np.log(steps[-1]), _GRID)
    loss = np.interp(grid, np.log(steps), losses)
    slope = (loss[:-_WINDOW] - loss[_WINDOW:]) / (grid[_WINDOW] - grid[0])
    at = int(np.argmax(slope))
    # A steepest stretch at the very beginning is the common start, not a fall.
    if (
        at < _WINDOW // 2
        or slope[at] < _MIN_SLOPE_RATIO * max(float(np.median(slope)), 1e-9)
        or slope[at] < 1.2 * slope[0]
    ):
        return None
    step = float(np.exp(grid[at + _WINDOW // 2]))
    nearest = points[int(np.argmin(np.abs(steps - step)))]
    return LossDrop(nearest.step, float(loss[at]), float(loss[at + _WINDOW]), nearest.seconds)


def _before_decay(points: Sequence[CurvePoint]) -> Sequence[CurvePoint]:
    rates = [point.learning_rate for point in points]
    if any(rate is None for rate in rates) or not rates:
        return points
    known = [rate for rate in rates if rate is not None]
    last = max(i for i, rate in enumerate(known) if rate >= 0.95 * max(known))
    # A schedule that decays from the start (cosine, linear) leaves no plateau: then nothing is left out.
    return points[: last + 1] if last > 0.3 * len(points) else points
