"""The gradient-noise scale: up to how large a batch more rows a step save steps.

From (McCandlish et al. 2018, An Empirical Model of Large-Batch Training, arXiv:1812.06162, section 2.2): with G the gradient
of the true loss and Sigma the covariance of the gradient of a single token, the gradient g of a batch of B tokens has

    E |g|^2 = |G|^2 + tr(Sigma) / B

and the simple noise scale, tr(Sigma) / |G|^2 (eq. 2.9), is the batch size, in tokens, at which noise and gradient are equal.
Well below it twice the batch halves the steps; well above it twice the batch only costs twice as much.

Two batch sizes give two such equations, so |G|^2 and tr(Sigma) (appendix A.1). A step has them for nothing: the whole batch
of N tokens, and the k parts it is computed in (the micro-batches of all replicas), of n_1 .. n_k tokens, rarely all equal:

    E sum_i n_i |g_i|^2  =  N |G|^2 + k tr(Sigma)
    E N |g|^2            =  N |G|^2 +   tr(Sigma)

    tr(Sigma) ~ (sum_i n_i |g_i|^2 - N |g|^2) / (k - 1)        |G|^2 ~ |g|^2 - tr(Sigma) / N

which for equal parts are the paper's own two estimators. Both are unbiased whatever the cut; only their spread depends on k.

The subtle parts. Each estimate is noisy, |G|^2 may come out below zero, and a ratio of noisy numbers is biased: both are
averaged over looks first, and the averages divided. Tokens of a row are not independent, rows are: a part must be of whole
rows, and then tr(Sigma) counts the tokens' dependence in (in rows the scale is that over the mean tokens of a row). And the
scale is that of plain gradient descent over the dense parameters (not look-up tables, of which a part touches other rows):
Muon and AdamW rescale the gradient, so take it for an order of magnitude, and for how it grows during a run.

One replica with one micro-batch has a single part, of which no variance can be had. It would take another backward over half
of the rows, in a shape that was not compiled, so there the scale is left out (`pretrain.micro_rows` brings it).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

EMA_DECAY = 0.9  # of the running averages, a look: about the last ten count


def unbiased_estimates(
    n_micro_batches: int, tokens: float, weighted_sq: float, batch_sq: float
) -> tuple[float, float]:
    """Unbiased estimates of tr(Sigma), of a token, and of |G|^2.

    Args:
        parts: k, at least 2.
        tokens: N.
        weighted: the sum of n_i |g_i|^2 over the parts, g_i the mean gradient of a part.
        whole: |g|^2, of the mean gradient of the batch.
    """
    trace = (weighted_sq - tokens * batch_sq) / (n_micro_batches - 1)
    return trace, batch_sq - trace / tokens


class NoiseScale:
    """Gathers the parts of the steps that are looked at, and averages over looks.

    A resumed run begins its averages anew; `trace` and `square` of every look are among the figures, so any stretch can be
    averaged afterwards.
    """

    def __init__(self) -> None:
        self.tr_sigma = self.grad_sq = 0.0  # running averages, begun at zero: in their ratio that cancels
        self.reset()

    def reset(self) -> None:
        """What was gathered is of a step that was not taken, or was used."""
        self._parts, self._tokens, self._weighted = 0, 0.0, 0.0

    @torch.no_grad()
    def add(self, gradients: Sequence[Tensor], count: float, scale: float = 1.0) -> None:
        """Gradients of the *summed* loss of a part, times `scale` (fp16), and its number of target tokens."""
        if count > 0:
            wide = [g.float() for g in gradients]  # bf16 would sum its squares in bf16
            square = float(torch.stack(torch._foreach_norm(wide)).double().square().sum()) / scale**2
            self._parts += 1
            self._tokens += count
            self._weighted += square / count

    def local_sums(self) -> tuple[float, float, float]:
        """Of this replica, to be added up over all: how many parts, tokens, n_i |g_i|^2."""
        return float(self._parts), self._tokens, self._weighted

    def finalize(
        self, n_micro_batches: float, tokens: float, weighted_sq: float, batch_sq: float, rows: int
    ) -> dict[str, float]:
        """The figures of a step from its sums over all replicas; none if there was a single part.

        Args:
            whole: |g|^2; rows: of the batch.

        Returns:
            noise_scale/trace and /square of this look; noise_scale/tokens and /rows from the averages, unless the averaged
            |G|^2 is not above zero: then the noise is so much larger that the looks do not tell how much.
        """
        if n_micro_batches < 2 or not math.isfinite(weighted_sq + batch_sq):
            return {}
        trace, square = unbiased_estimates(int(n_micro_batches), tokens, weighted_sq, batch_sq)
        self.tr_sigma += (1 - EMA_DECAY) * (trace - self.tr_sigma)
        self.grad_sq += (1 - EMA_DECAY) * (square - self.grad_sq)
        found = {"noise_scale/tr_sigma": trace, "noise_scale/grad_sq": square}
        if self.grad_sq > 0:
            scale = self.tr_sigma / self.grad_sq
            found |= {"noise_scale/tokens": scale, "noise_scale/sequences": scale * rows / tokens}
        return found
