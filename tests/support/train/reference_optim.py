"""AdamW and Muon told plainly, one parameter at a time: what `optim.py` does in few operations over many tensors.

    AdamW  Loshchilov & Hutter 2019, arXiv:1711.05101, algorithm 2, with Kingma & Ba's bias corrections:
           m <- b1 m + (1 - b1) g;   v <- b2 v + (1 - b2) g^2;   w <- (1 - r l) w - r (m / c1) / (sqrt(v / c2) + eps)
           with c1 = 1 - b1^t, c2 = 1 - b2^t, rate r, decay l
    Muon   Jordan et al. 2024: m <- b m + (1 - b) g;   n = b m + (1 - b) g;   w <- (1 - r l) w - r s U V^T
           where n = U S V^T, and s = sqrt(max(1, rows / columns))

Two subtle parts. (1) The decay acts on the weight before the step, and is not divided by sqrt(v): that is what makes it
another thing than a penalty in the loss. (2) Where eps stands: in the house's AdamW it is added to the uncorrected sqrt(v)
(the "epsilon hat" of Kingma & Ba, section 2), one multiplication less; both are given here.
"""

from __future__ import annotations

import torch
from torch import Tensor


def adamw(
    weight: Tensor,
    mean: Tensor,
    square: Tensor,
    gradient: Tensor,
    step: int,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float = 0.0,
    eps_hat: bool = True,
) -> None:
    """One step, in place.  All tensors have one shape; step: 1, 2, ...; eps_hat: eps beside the uncorrected sqrt(v)."""
    first, second = betas
    mean.copy_(first * mean + (1 - first) * gradient)
    square.copy_(second * square + (1 - second) * gradient**2)
    correction1, correction2 = 1 - first**step, 1 - second**step
    eps = eps / correction2**0.5 if eps_hat else eps
    weight.copy_(
        (1 - lr * weight_decay) * weight - lr * (mean / correction1) / ((square / correction2).sqrt() + eps)
    )


def muon(
    weight: Tensor, mean: Tensor, gradient: Tensor, *, lr: float, momentum: float, weight_decay: float = 0.0
) -> None:
    """One step for a matrix [rows, columns], in place, its direction by the singular value decomposition itself: what the
    Polar Express comes near to (singular values of 0.7 to 1.3 in place of 1)."""
    mean.copy_(momentum * mean + (1 - momentum) * gradient)
    u, _, vt = torch.linalg.svd(momentum * mean + (1 - momentum) * gradient, full_matrices=False)
    rows, columns = weight.shape
    weight.copy_((1 - lr * weight_decay) * weight - lr * max(1.0, rows / columns) ** 0.5 * (u @ vt))
