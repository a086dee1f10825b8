"""Reference AdamW and Muon, one parameter at a time, for the batched `optim/optimizers.py`.

    AdamW  Loshchilov & Hutter 2019, arXiv:1711.05101, algorithm 2, with Kingma & Ba's bias corrections:
           m <- b1 m + (1 - b1) g;   v <- b2 v + (1 - b2) g^2;   w <- (1 - r l) w - r (m / c1) / (sqrt(v / c2) + eps)
           with c1 = 1 - b1^t, c2 = 1 - b2^t, learning rate r, decay l
    Muon   Jordan et al. 2024: m <- b m + (1 - b) g;   n = b m + (1 - b) g;   w <- (1 - r l) w - r s U V^T
           where n = U S V^T, and s = sqrt(max(1, rows / columns))

The subtle point: decay acts on the weight before the step and is not divided by sqrt(v), unlike a penalty in the loss.
"""

from __future__ import annotations

import torch
from torch import Tensor

BETAS, EPS = (0.8, 0.95), 1e-8  # of AdamW


def adamw(w: Tensor, mean: Tensor, square: Tensor, grad: Tensor, step: int, lr: float, decay: float) -> None:
    """Apply step 1, 2, ... in place."""
    first, second = BETAS
    mean.copy_(first * mean + (1 - first) * grad)
    square.copy_(second * square + (1 - second) * grad**2)
    correction1, correction2 = 1 - first**step, 1 - second**step
    way = (mean / correction1) / ((square / correction2).sqrt() + EPS)
    w.copy_((1 - lr * decay) * w - lr * way)


def muon(weight: Tensor, mean: Tensor, gradient: Tensor, lr: float, momentum: float, decay: float) -> None:
    """Apply one step to a matrix [rows, columns] in place, with an exact singular value decomposition.

    Polar Express approximates it (singular values of 0.7 to 1.3 instead of 1).
    """
    mean.copy_(momentum * mean + (1 - momentum) * gradient)
    u, _, vt = torch.linalg.svd(momentum * mean + (1 - momentum) * gradient, full_matrices=False)
    rows, columns = weight.shape
    weight.copy_((1 - lr * decay) * weight - lr * max(1.0, rows / columns) ** 0.5 * (u @ vt))
