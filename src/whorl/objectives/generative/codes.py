"""Vector quantisation: latents are replaced by the nearest of K codes.

    k = argmin over j of |z - e_j|^2,     q = z + stopgradient(e_k - z)         straight-through: dq / dz = I
    loss = - log p(x | q) + beta |z - stopgradient(e_k)|^2

Source: van den Oord et al. 2017, arXiv:1711.00937, eq. 1 to 3. Moving averages take the place of the second
term of eq. 3 (appendix A.1):

    N_k <- g N_k + (1 - g) n_k,    m_k <- g m_k + (1 - g) s_k,    e_k = m_k / N_k

n_k is the share of latents at code k, s_k their sum over the number of all latents. The rows (N_k, m_k) are a parameter, the
moments. A step of length 1 - g along the gradient of |moments - statistics|^2 / 2 is this average. `follow` returns a loss
with this gradient. So the learner sums statistics over micro-batches and replicas, and checkpoints hold them.

A code that few latents use is dead. `restarts` moves it to a latent of the batch, with the mean share 1 / K.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from whorl.objectives.next_token import Loss

DEAD = 0.1  # times the mean share: below it a code is dead


def codes_of(moments: Tensor) -> Tensor:
    """Return the codes e [K, d] of moments [K, 1 + d], without gradient."""
    return moments.detach()[:, 1:] / moments.detach()[:, :1]


def nearest(latents: Tensor, codes: Tensor) -> Tensor:
    """Return the numbers [...] of the codes [K, d] nearest to latents [..., d]."""
    squares = (
        codes.square().sum(1) - 2 * latents.detach() @ codes.t()
    )  # + |z|^2, which is the same for all codes
    return squares.argmin(-1)


def straight_through(latents: Tensor, found: Tensor) -> Tensor:
    """Return the codes found, with the gradient of the latents; all [..., d]."""
    return latents + (found - latents).detach()


def commitment(latents: Tensor, found: Tensor) -> Tensor:
    """Return |z - e|^2, summed over a row, [N]. Its gradient moves the latents [N, ...] to the codes."""
    return (latents - found.detach()).square().flatten(1).sum(1)


def statistics(latents: Tensor, numbers: Tensor, n_codes: int) -> Tensor:
    """Return (count, sum of latents) of each code, [K, 1 + d], of latents [M, d] at codes [M]."""
    rows = torch.cat([torch.ones_like(latents[:, :1]), latents], 1)
    return F.one_hot(numbers, n_codes).to(rows).t() @ rows


def restarts(moments: Tensor, latents: Tensor, candidates: Tensor, decay: float, total: int) -> Tensor:
    """Return what `follow` adds so that dead codes are at their candidates after the step, [K, 1 + d].

    Args:
        latents: [M, d]. candidates: [M], the code that each may become, or -1; a code occurs once in a batch.
        total: number of latents in the whole batch, over all micro-batches and replicas.
    """
    n_codes, old = len(moments), moments.detach()
    offered = candidates >= 0
    numbers = candidates[offered]
    new = torch.cat([torch.ones_like(latents[offered, :1]), latents[offered]], 1) / n_codes
    dead = old[numbers, :1] < DEAD / n_codes
    change = (new - decay * old[numbers]) * dead * (total / (1 - decay))
    return torch.zeros_like(old).index_add(0, numbers, change)


def follow(moments: Tensor, added: Tensor, count: int) -> Loss:
    """Return a loss of value 0 whose gradient by the moments [K, 1 + d] is `added`, negated. count: latents."""
    change = moments - moments.detach()
    return Loss(-(change * added).sum(), torch.tensor(float(count), device=moments.device))


def usage(numbers: Tensor, n_codes: int) -> tuple[float, float]:
    """Return the perplexity of the codes at latents [...], from 1 to K, and the share of the K codes that occur."""
    counts = numbers.flatten().bincount(minlength=n_codes).double()
    shares = counts / counts.sum()
    return float((-torch.special.xlogy(shares, shares).sum()).exp()), float((counts > 0).double().mean())
