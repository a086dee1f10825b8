"""Onset of induction: the step at which the loss drops because attention learns to copy.

The loss of a small model is smooth and nearly straight over the logarithm of the step, until induction heads form. They
copy the token that followed an earlier occurrence of the current one (Olsson et al. 2022, "In-context Learning and
Induction Heads", arXiv:2209.11895). The loss then drops within a few per cent of the run.

`find_induction_onset` uses the induction loss (rows that repeat shuffled tokens) if training measured it. The onset is the
step at which this loss crosses the middle between its lowest value and the highest value before that, if it falls by more
than a quarter. A curve that rises has no onset.

`find_loss_drop` uses the training loss alone: it looks for the steepest slope over the logarithm of the step. The start
(token frequencies) and the decay of the learning rate are steep in every run, so both are excluded. A drop is reported only
if its slope is clearly above the median slope and above the slope at the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_GRID = 120  # points in the logarithm of the step
_WINDOW = 10  # grid points per slope
_SKIPPED_FRACTION = 0.02  # share of the steps at the start that is excluded
_MIN_SLOPE_RATIO = 1.6  # minimum slope, as a multiple of the median slope
_MAX_COPY_LOSS_RATIO = 0.75  # the lowest induction loss must be below this share of the highest


@dataclass(frozen=True)
class CurvePoint:
    """One training step: `loss` in nats per token, `seconds` since the start of training."""

    step: int
    loss: float
    learning_rate: float | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class InductionPoint:
    """Loss on the second half of rows that repeat shuffled tokens, in nats per token; low once induction heads exist."""

    step: int
    nll: float


@dataclass(frozen=True)
class LossDrop:
    """The marked drop: the step in the middle of the steepest stretch, and the losses at its ends.

    from_copy_loss: found on the induction loss; `before` and `after` are then its highest value before the lowest one, and
    the lowest one, which is reached at `end_step`.
    """

    step: int
    before: float
    after: float
    seconds: float | None
    from_copy_loss: bool = False
    end_step: int = 0


def find_induction_onset(
    induction: Sequence[InductionPoint], points: Sequence[CurvePoint]
) -> LossDrop | None:
    """Return the onset found on the induction loss, or None without one; `points` give the time."""
    if not induction:
        return None
    end = min(range(len(induction)), key=lambda i: induction[i].nll)
    begin = max(range(end + 1), key=lambda i: induction[i].nll)
    high, low = induction[begin].nll, induction[end].nll
    if low > _MAX_COPY_LOSS_RATIO * high:
        return None
    step = next(point.step for point in induction[begin:] if point.nll < (high + low) / 2)
    nearest = min(points, key=lambda point: abs(point.step - step))
    return LossDrop(step, high, low, nearest.seconds, from_copy_loss=True, end_step=induction[end].step)


def smooth(values: Sequence[float], half_life: float) -> npt.NDArray[np.float64]:
    """Return the exponential average from both sides, which shifts nothing; `half_life` in samples."""
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
    """Return the drop of the training loss, or None without one; `points` in the order of their steps."""
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
    # The steepest stretch at the very start is the common start, not a drop.
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
    # A schedule that decays from the start (cosine, linear) has no plateau: nothing is excluded.
    return points[: last + 1] if last > 0.3 * len(points) else points
