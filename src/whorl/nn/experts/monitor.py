"""Load-balance metrics of a `Routing`, for the metrics log.

The Gini coefficient of the loads is 0 when all experts have equal loads and 1 - 1/E when one expert has all tokens
(`tracking/inequality.py`). Entropies are divided by log E, so that 1 is uniform for any E. `load_entropy` is that of the
loads of a batch; `router_entropy` is the mean over tokens of the router's entropy. A low load entropy indicates collapse. A
router entropy that stays at 1 indicates an untrained router.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from whorl.nn.experts.router import Routing
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


@torch.no_grad()
def routing_stats(routing: Routing) -> dict[str, Tensor]:
    """Return statistics of one layer's routing of one batch.

    Returns:
        tokens: [E] assignments of each expert; max_over_mean_load: []; gini; load_entropy; router_entropy;
        dropped_fraction: [] of the N top_k requested assignments; unrouted_fraction: [] of tokens without any expert.
    """
    n_tokens, n_experts = routing.scores.shape
    served = torch.zeros(n_tokens, device=routing.counts.device)
    served[routing.tokens] = 1.0
    requested = torch.full_like(routing.counts, n_tokens * routing.top_k, dtype=torch.double) / n_experts
    stats = load_stats(routing.counts, requested)
    del stats["load_fraction"]
    return {
        "tokens": routing.counts,
        **stats,
        "router_entropy": entropy(routing.scores).sum() / max(1, n_tokens),
        "unrouted_fraction": 1 - served.mean() if n_tokens else served.sum(),
    }


def routing_metrics(routings: Sequence[Routing], prefix: str = "moe") -> dict[str, float]:
    """Return `routing_stats` of every layer as floats for a log: "moe/0/gini", and "moe/0/tokens/5" for expert 5."""
    out: dict[str, float] = {}
    for layer, routing in enumerate(routings):
        for name, value in routing_stats(routing).items():
            if name == "tokens":
                out |= {f"{prefix}/{layer}/tokens/{e}": float(c) for e, c in enumerate(value.tolist())}
            else:
                out[f"{prefix}/{layer}/{name}"] = float(value)
    return out
