"""Difference between the log-probabilities of the sampler and of the trainer, a check of every on-policy method.

The engine and the trainer compute the log-probability of a sampled token by different code paths. With the same weights
both must agree up to rounding: about 1e-4 in fp32. A larger difference means that one of them is wrong, or that a token
is compared with weights that did not sample it.
"""

from __future__ import annotations

import math

from torch import Tensor

from whorl.parallel.process_group import ProcessGroup


class LogProbDiff:
    """Accumulates absolute differences over tokens until `pop_metrics`."""

    def __init__(self) -> None:
        self.max, self.sum, self.tokens = 0.0, 0.0, 0

    def update(self, difference: Tensor) -> None:
        """Add tokens. difference: [n] log-probability of the trainer minus that of the sampler."""
        if not difference.numel():
            return
        apart = difference.detach().abs()
        self.max = max(self.max, _finite_or_inf(float(apart.max())))
        self.sum += _finite_or_inf(float(apart.double().sum()))
        self.tokens += difference.numel()

    def pop_metrics(self, process_group: ProcessGroup | None = None) -> dict[str, float]:
        """Return `logprob_diff_max` and `logprob_diff_mean` over all ranks, and reset; empty without tokens.

        process_group: all its ranks must call this together.
        """
        ranks = [(self.max, self.sum, float(self.tokens))]
        if process_group is not None and process_group.size > 1:
            ranks = [
                (largest, total, tokens)
                for largest, total, tokens in process_group.all_gather_scalars(*ranks[0])
            ]
        self.max, self.sum, self.tokens = 0.0, 0.0, 0
        tokens = sum(n for _, _, n in ranks)
        if not tokens:
            return {}
        return {
            "logprob_diff_max": max(largest for largest, _, _ in ranks),
            "logprob_diff_mean": sum(total for _, total, _ in ranks) / tokens,
        }


def _finite_or_inf(value: float) -> float:
    return value if math.isfinite(value) else math.inf
