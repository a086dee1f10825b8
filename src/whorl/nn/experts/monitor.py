"""Load-balance metrics of a layer with experts, for the metrics log.

The Gini coefficient of the loads is 0 when all experts have equal loads and 1 - 1/E when one expert has all tokens
(`tracking/inequality.py`). The entropy is divided by log E, so that 1 is uniform for any E. A low load entropy indicates
collapse.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from whorl.tracking.inequality import gini


def entropy(p: Tensor) -> Tensor:
    """Return the entropy of distributions [..., E], divided by log E -> [...]; 1 if E is 1. Rows need not sum to 1."""
    p = p.float() / p.float().sum(dim=-1, keepdim=True).clamp(min=1e-20)
    if p.shape[-1] == 1:
        return torch.ones_like(p[..., 0])
    return -torch.xlogy(p, p).sum(dim=-1) / math.log(p.shape[-1])


def load_stats(counts: Tensor, requested: Tensor) -> dict[str, Tensor]:
    """Return how evenly a layer's experts were used. counts, requested: [E], of one batch or summed over several.

    Returns:
        load_fraction: [E] of all assignments; max_over_mean_load: []; gini; load_entropy; dropped_fraction: [] of the
        requested assignments.
    """
    counts, requested = counts.double(), requested.double()
    total = counts.sum()
    return {
        "load_fraction": counts / total.clamp(min=1),
        "max_over_mean_load": counts.max() * len(counts) / total.clamp(min=1),
        "gini": gini(counts.float()),
        "load_entropy": entropy(counts),
        "dropped_fraction": (1 - total / requested.sum().clamp(min=1)).clamp(min=0) if total else total,
    }
