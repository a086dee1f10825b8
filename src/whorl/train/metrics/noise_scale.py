"""Gradient noise scale: the batch size up to which larger batches save steps.

From McCandlish et al. 2018, An Empirical Model of Large-Batch Training, arXiv:1812.06162, section 2.2. With G the
gradient of the true loss and Sigma the covariance of one token's gradient, the gradient g of a batch of B tokens has

    E |g|^2 = |G|^2 + tr(Sigma) / B

The simple noise scale tr(Sigma) / |G|^2 (eq. 2.9) is the batch size in tokens at which noise and gradient are equal.
Two batch sizes determine both unknowns (appendix A.1). A step has them without extra cost: the whole batch of N tokens,
and its k micro-batches over all replicas, of n_1 .. n_k tokens:

    E sum_i n_i |g_i|^2  =  N |G|^2 + k tr(Sigma)
    E N |g|^2            =  N |G|^2 +   tr(Sigma)
    tr(Sigma) ~ (sum_i n_i |g_i|^2 - N |g|^2) / (k - 1)        |G|^2 ~ |g|^2 - tr(Sigma) / N

For equal parts these are the paper's estimators. Both are unbiased for any split. Each estimate is noisy and |G|^2 may
be negative, so both are averaged over measurements before the division. Tokens of a row are dependent, so micro-batches
must consist of whole rows. The scale is that of plain SGD over the dense parameters; Muon and AdamW rescale the
gradient, so it is an order of magnitude. A single micro-batch on one replica has no variance estimate (set
`pretrain.train.micro_batch_size`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

EMA_DECAY = 0.9  # of the running averages: about the last ten measurements


def unbiased_estimates(
    n_micro_batches: int, tokens: float, weighted_sq: float, batch_sq: float
) -> tuple[float, float]:
    """Return unbiased estimates of tr(Sigma) per token, and of |G|^2.

    Args:
        n_micro_batches: k, at least 2.
        tokens: N.
        weighted_sq: the sum of n_i |g_i|^2, with g_i the mean gradient of a micro-batch.
        batch_sq: |g|^2 of the mean gradient of the batch.
    """
    trace = (weighted_sq - tokens * batch_sq) / (n_micro_batches - 1)
    return trace, batch_sq - trace / tokens


class NoiseScale:
    """Collects the micro-batches of measured steps, and averages over measurements.

    Every measurement logs tr_sigma and grad_sq, so any interval can be averaged later.

    state: the running averages, kept in checkpoints. They start at zero: the bias cancels in their ratio.
    """

    def __init__(self) -> None:
        self.state = (0.0, 0.0)  # of tr_sigma and grad_sq
        self.reset()

    def reset(self) -> None:
        """Discard the collected sums: the step was skipped, or they were used."""
        self._parts, self._tokens, self._weighted = 0, 0.0, 0.0

    @torch.no_grad()
    def add(self, gradients: Sequence[Tensor], count: float, scale: float = 1.0) -> None:
        """Add a micro-batch: gradients of its *summed* loss times `scale` (fp16), and its number of target tokens."""
        if count > 0:
            wide = [g.float() for g in gradients]  # bf16 norms would be summed in bf16
            square = float(torch.stack(torch._foreach_norm(wide)).double().square().sum()) / scale**2
            self._parts += 1
            self._tokens += count
            self._weighted += square / count

    def local_sums(self) -> tuple[float, float, float]:
        """This replica's sums, for an all-reduce: number of micro-batches, tokens, n_i |g_i|^2."""
        return float(self._parts), self._tokens, self._weighted

    def finalize(
        self, n_micro_batches: float, tokens: float, weighted_sq: float, batch_sq: float, rows: int
    ) -> dict[str, float]:
        """Return the metrics of a step from its sums over all replicas; empty for a single micro-batch.

        Args:
            batch_sq: |g|^2.
            rows: of the batch.

        Returns:
            noise_scale/tr_sigma and /grad_sq of this measurement; noise_scale/tokens and /sequences from the averages,
            unless the averaged |G|^2 is not positive: then the noise is too large to estimate the scale.
        """
        if n_micro_batches < 2 or not math.isfinite(weighted_sq + batch_sq):
            return {}
        trace, square = unbiased_estimates(int(n_micro_batches), tokens, weighted_sq, batch_sq)
        tr_sigma, grad_sq = (
            a + (1 - EMA_DECAY) * (b - a) for a, b in zip(self.state, (trace, square), strict=True)
        )
        self.state = tr_sigma, grad_sq
        found = {"noise_scale/tr_sigma": trace, "noise_scale/grad_sq": square}
        if grad_sq > 0:
            scale = tr_sigma / grad_sq
            found |= {"noise_scale/tokens": scale, "noise_scale/sequences": scale * rows / tokens}
        return found
