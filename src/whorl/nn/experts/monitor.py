"""Is the work shared out? A few numbers about a `Routing`, for the metrics log.

The Gini coefficient of the loads c (Gini 1912), sorted upwards: G = sum_i (2 i - E - 1) c_i / (E sum_i c_i), i from 1. It
is 0 when all experts have the same number of tokens and 1 - 1/E when one has them all. Entropies are divided by
log E, so 1 is "spread evenly" whatever E: `load_entropy` of who is used over the batch, `choice_entropy` of how
undecided the router is about a single token. Collapse looks like a low load entropy; a router that has learned nothing,
like a choice entropy that stays at 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from whorl.nn.experts.router import Routing


def gini(loads: Tensor) -> Tensor:
    """loads: [E], none negative -> []; 0 if all are 0."""
    c = loads.float().sort().values
    n = len(c)
    rank = torch.arange(1, n + 1, device=c.device, dtype=c.dtype)
    return ((2 * rank - n - 1) * c).sum() / (n * c.sum()).clamp(min=1e-20)


def entropy(p: Tensor) -> Tensor:
    """Of distributions [..., E], over log E -> [...]; 1 if E is 1; rows need not sum to 1."""
    p = p.float() / p.float().sum(dim=-1, keepdim=True).clamp(min=1e-20)
    if p.shape[-1] == 1:
        return torch.ones_like(p[..., 0])
    return -torch.xlogy(p, p).sum(dim=-1) / math.log(p.shape[-1])


def load_stats(counts: Tensor, requested: Tensor) -> dict[str, Tensor]:
    """How evenly a layer's experts were used; counts, wished: [E], of one batch or summed over many.

    Returns:
        share: [E] of all assignments; busiest: [] the largest load over the mean; gini; load_entropy; dropped: [] share of
        the wished-for assignments that found no place.
    """
    counts, requested = counts.double(), requested.double()
    total = counts.sum()
    return {
        "load_fraction": counts / total.clamp(min=1),
        "max_over_mean_load": counts.max() * len(counts) / total.clamp(min=1),
        "gini": gini(counts),
        "load_entropy": entropy(counts),
        "dropped_fraction": (1 - total / requested.sum().clamp(min=1)).clamp(min=0) if total else total,
    }


@torch.no_grad()
def routing_stats(routing: Routing) -> dict[str, Tensor]:
    """What one layer did with one batch.

    Returns:
        tokens: [E] assignments of each expert; busiest: [] the largest of them over the mean; gini; load_entropy;
        choice_entropy; dropped: [] share of the N top_k wished-for assignments that found no place; unserved: [] share
        of tokens without any expert.
    """
    n_tokens, n_experts = routing.scores.shape
    served = torch.zeros(n_tokens, device=routing.counts.device)
    served[routing.tokens] = 1.0
    wished = torch.full_like(routing.counts, n_tokens * routing.top_k, dtype=torch.double) / n_experts
    found = load_stats(routing.counts, wished)
    del found["load_fraction"]
    return {
        "tokens": routing.counts,
        **found,
        "router_entropy": entropy(routing.scores).sum() / max(1, n_tokens),
        "unrouted_fraction": 1 - served.mean() if n_tokens else served.sum(),
    }


def routing_metrics(routings: Sequence[Routing], prefix: str = "moe") -> dict[str, float]:
    """`usage` of every layer as plain numbers for a log: "experts/0/gini", and "experts/0/tokens/5" for expert 5."""
    out: dict[str, float] = {}
    for layer, routing in enumerate(routings):
        for name, value in routing_stats(routing).items():
            if name == "tokens":
                out |= {f"{prefix}/{layer}/tokens/{e}": float(c) for e, c in enumerate(value.tolist())}
            else:
                out[f"{prefix}/{layer}/{name}"] = float(value)
    return out
