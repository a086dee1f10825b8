"""Warm-up, stable, decay (Hu et al. 2024, MiniCPM, arXiv:2404.06395, eq. 1).

A linear warm-up, a plateau, and a linear decay to nearly zero over the last part. Most of the final drop in loss
comes in the decay, so a short run decays long: half of it by default, fitted in bench/plan_sweep.py.
"""

from __future__ import annotations

FLOOR = 0.02  # share of the peak that is left at the very end


def warmup_stable_decay(step: int, total: int, warmup: float = 0.02, decay: float = 0.5) -> float:
    """The factor on every peak learning rate at `step` (from 0) of `total`.

    Args:
        warmup: share of the steps that warm up.
        decay: share of the steps that decay.
    """
    rising = (step + 1) / max(1.0, warmup * total)
    falling = FLOOR + (1 - FLOOR) * (total - step) / max(1.0, decay * total)
    return min(1.0, rising, falling)
