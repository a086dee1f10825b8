"""Schedules: the factor on every peak learning rate, as a pure function of the step's number.

    wsd        warm-up, stable, decay (Hu et al. 2024, MiniCPM, arXiv:2404.06395, eq. 1): a linear warm-up, a plateau, a
               linear decay over the last part. Most of the final drop in loss comes in the decay, so a short run decays
               long: half of it by default, fitted in bench/plan/scaling_sweep.py
    cosine     half a cosine from the end of the warm-up to the floor (Loshchilov and Hutter 2017, arXiv:1608.03983, eq. 5,
               without restarts)
    linear     a straight line from the end of the warm-up to the floor: wsd without a plateau
    constant   the warm-up, then the peak

Only wsd has a plateau that does not know how long the run will be. So one stable run can serve several budgets: from a
point of its plateau a decay is run for each (`branches.py`). With the other falling schedules every budget is a run of its
own.

The subtle part: nothing here remembers. A run that was killed asks for the factor of the step it continues at, and gets what
the undisturbed one got. `step` counts from 0 to total - 1; the floor is reached at `total`, so the last step, which still
moves weights, is one step's worth above it.
"""

from __future__ import annotations

import math

from whorl.errors import ConfigError
from whorl.train.config import ScheduleConfig

MIN_LR_RATIO = 0.02  # share of the peak that is left at the very end


def lr_scale(step: int, total: int, config: ScheduleConfig) -> float:
    """The factor, above 0 and at most 1, at `step` (from 0) of `total`."""
    warm = warmup_steps(total, config)
    falling = config.decay_ratio * total if config.kind == "wsd" else total - warm
    return _lr_scale(config.kind, step, total, warm, falling, config.min_lr_ratio)


def warmup_stable_decay(step: int, total: int, warmup_ratio: float = 0.02, decay_ratio: float = 0.5) -> float:
    """wsd by itself: of the steps the share `warmup` warms up, the share `decay` decays, to `FLOOR`."""
    return _lr_scale("wsd", step, total, warmup_ratio * total, decay_ratio * total, MIN_LR_RATIO)


def _lr_scale(
    kind: str, step: int, total: int, rise_steps: float, decay_steps: float, min_lr_ratio: float
) -> float:
    """warm, falling: steps of the two slopes, not whole ones in general."""
    rising = (step + 1) / max(1.0, rise_steps)
    if kind == "constant":
        return min(1.0, rising)
    left, length = max(0, total - step), max(1.0, decay_steps)
    if (
        kind == "cosine"
    ):  # (1 + cos(pi (1 - x))) / 2 = sin(pi x / 2)^2, which stays above 0 however small x is
        fallen = min_lr_ratio + (1 - min_lr_ratio) * math.sin(math.pi / 2 * min(1.0, left / length)) ** 2
    else:
        fallen = min_lr_ratio + (1 - min_lr_ratio) * left / length
    return min(1.0, rising, fallen)


def warmup_steps(total: int, config: ScheduleConfig) -> float:
    """How many steps of `total` warm up."""
    return config.warmup_ratio * total if config.warmup_steps is None else config.warmup_steps


def check_warmup(total: int, config: ScheduleConfig) -> None:
    """That a warm-up given in steps leaves room in a run of `total` (shares were checked with the recipe).

    Raises:
        ConfigError: it does not.
    """
    warm = warmup_steps(total, config)
    room = total * (1 - config.decay_ratio) if config.kind == "wsd" else total
    if warm > room + 1e-6 * total:
        falls = f", of which the last {config.decay_ratio:g} decays" if config.kind == "wsd" else ""
        raise ConfigError(
            f"schedule.warmup_steps is {warm:g}, in a run of {total:,} steps{falls}",
            expected=f"at most {room:,.0f}",
            do="give the warm-up as a share (schedule.warmup), or train longer",
        )
