"""Evidence lower bound: reconstruction and KL divergence of the posterior from the prior, in nats per row.

    loss = - log p(x | z) + beta sum over j of max(KL_j, free_bits),      z = mean + std eps,   eps ~ N(0, I)
    KL_j = (mean_j^2 + std_j^2 - 1) / 2 - log std_j                       of N(mean_j, std_j^2) from N(0, 1)

With beta 1 and no free bits it is an upper bound of - log p(x). Sources: Kingma & Welling 2014, arXiv:1312.6114, eq. 10
and appendix B; beta: Higgins et al. 2017 (beta-VAE); free bits: Kingma et al. 2016, arXiv:1606.04934, eq. 15. That
equation takes the maximum of a batch's mean. Here it is the maximum of each row, so that the split of a batch does not
change the step.

p(x | z) is a Gaussian with one learned deviation. Its optimum is the root mean square error, so the weight of the
reconstruction is no setting (sigma-VAE, Rybkin et al. 2021, arXiv:2006.13202).

    log p(x) >= E log mean over k of p(x, z_k) / q(z_k | x)               Burda et al. 2016, arXiv:1509.00519, eq. 8
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from whorl.objectives.next_token import Loss


def gaussian_log_prob(x: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Return log N(x; mean, std^2) in nats, summed over the dimensions of a row: [N] of x [N, ...]."""
    squares = ((x - mean) * (-log_std).exp()).square() / 2 + log_std + math.log(2 * math.pi) / 2
    return -squares.flatten(1).sum(1)


def kl_from_prior(mean: Tensor, log_std: Tensor) -> Tensor:
    """Return the KL divergence of N(mean, std^2) from N(0, 1) in nats, per dimension; all [N, d]."""
    return (mean.square() + (2 * log_std).exp() - 1) / 2 - log_std


def elbo(log_prob: Tensor, kl: Tensor, beta: float = 1.0, free_bits: float = 0.0) -> Loss:
    """Return the negative bound, summed over rows.

    Args:
        log_prob: [N], of the data given a sample of the posterior. kl: [N, d], from the prior.
        beta: weight of the divergence. free_bits: divergence of a dimension, in nats, that costs nothing more than itself.

    Returns:
        Loss: metrics `reconstruction` and `kl`, without beta and free bits.
    """
    total = beta * kl.clamp_min(free_bits).sum() - log_prob.sum()
    metrics = {"reconstruction": -log_prob.sum().detach(), "kl": kl.sum().detach()}
    return Loss(total, torch.tensor(float(len(kl)), device=kl.device), metrics)


def importance_bound(log_weights: Tensor) -> Tensor:
    """Return a lower bound of log p(x), [N], of log p(x, z_k) - log q(z_k | x), [K, N]. It rises with K."""
    return log_weights.logsumexp(0) - math.log(len(log_weights))
