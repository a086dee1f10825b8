"""Learning-rate schedules: the factor on every peak learning rate, as a pure function of the step number.

    wsd        warmup-stable-decay (Hu et al. 2024, MiniCPM, arXiv:2404.06395, eq. 1): linear warm-up, plateau, linear decay.
               Most of the final loss reduction happens in the decay, so short runs use a long one: half of the steps by
               default, fitted in bench/plan/scaling_sweep.py
    cosine     half a cosine from the end of the warm-up to the minimum (Loshchilov and Hutter 2017, arXiv:1608.03983, eq. 5,
               without restarts)
    linear     linear from the end of the warm-up to the minimum: wsd without a plateau
    constant   warm-up, then the peak

Only wsd has a plateau that is independent of the run's length. So one stable run can serve several budgets, with a
decay branch for each (`lm/decay_branches.py`).

The factor of warm-up step s = 0, 1, ... is (s + 1) / warm-up steps: the first step already learns. With the definition
s / warm-up steps, as in Hugging Face's schedules, each of these values comes one step later. After the warm-up both agree.

The functions have no state, so a resumed run gets the factors of an undisturbed run. `step` counts from 0 to total - 1. In a
run behind its plan it is a fraction (`resilience/deadline.py`). The minimum is reached at `total`, so the last step is one
step above it.
"""

from __future__ import annotations

import math

from whorl.errors import ConfigError
from whorl.train.config import ScheduleConfig


def lr_scale(step: float, total: int, config: ScheduleConfig) -> float:
    """Return the factor, above 0 and at most 1, at `step` (from 0) of `total`."""
    warm = warmup_steps(total, config)
    falling = config.decay_ratio * total if config.kind == "wsd" else total - warm
    return _lr_scale(config.kind, step, total, warm, falling, config.min_lr_ratio)


def _lr_scale(
    kind: str, step: float, total: int, rise_steps: float, decay_steps: float, min_lr_ratio: float
) -> float:
    """Return the factor; `rise_steps` and `decay_steps` may be fractional."""
    rising = (step + 1) / max(1.0, rise_steps)
    if kind == "constant":
        return min(1.0, rising)
    left, length = max(0, total - step), max(1.0, decay_steps)
    if kind == "cosine":  # (1 + cos(pi (1 - x))) / 2 = sin(pi x / 2)^2, which stays positive for tiny x
        fallen = min_lr_ratio + (1 - min_lr_ratio) * math.sin(math.pi / 2 * min(1.0, left / length)) ** 2
    else:
        fallen = min_lr_ratio + (1 - min_lr_ratio) * left / length
    return min(1.0, rising, fallen)


def warmup_steps(total: int, config: ScheduleConfig) -> float:
    """Number of warm-up steps of a run of `total` steps."""
    return config.warmup_ratio * total if config.warmup_steps is None else config.warmup_steps


def check_warmup(total: int, config: ScheduleConfig) -> None:
    """Check that a warm-up given in steps fits into a run of `total` steps (ratios are checked with the recipe).

    Raises:
        ConfigError: it does not fit.
    """
    warm = warmup_steps(total, config)
    room = total * (1 - config.decay_ratio) if config.kind == "wsd" else total
    if warm > room + 1e-6 * total:
        falls = f" with decay_ratio {config.decay_ratio:g}" if config.kind == "wsd" else ""
        raise ConfigError(
            f"schedule.warmup_steps is {warm:g}, in a run of {total:,} steps{falls}",
            expected=f"at most {room:,.0f}",
            do="set schedule.warmup_ratio instead, or train longer",
        )
