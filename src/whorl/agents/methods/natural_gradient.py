"""Steps of the natural gradient within a trust region: shared by TRPO and CPO.

    direction   d = - H^-1 g,   H the Fisher matrix of the policy over the batch, by conjugate gradients
    length      so that the quadratic model of the KL divergence, d H d / 2, equals its limit
    search      the length is halved until the measured KL is within its limit and the loss has fallen

The KL divergence from the policy itself has the Fisher matrix as its second derivative. So the product of the matrix with a
vector is the gradient of (gradient of the KL) . vector, and no matrix is stored (Schulman et al. 2015, arXiv:1502.05477).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]
BACKTRACKS = 12  # halvings of a step


def conjugate_gradients(
    product: Product, b: Tensor, iterations: int = 10, tolerance: float = 1e-10
) -> Tensor:
    """Return x with product(x) = b, for a symmetric positive definite product; b: [P]."""
    x, residual = torch.zeros_like(b), b.clone()
    direction, square = residual.clone(), residual @ residual
    for _ in range(iterations):
        if square <= tolerance * (b @ b):
            break
        image = product(direction)
        length = square / (direction @ image)
        x += length * direction
        residual -= length * image
        following = residual @ residual
        direction = residual + (following / square) * direction
        square = following
    return x


def fisher_product(kl: Callable[[], Tensor], parameters: Sequence[Tensor], damping: float) -> Product:
    """Return v -> (H + damping) v, for the second derivative H of `kl`, a mean that is 0 at the current weights."""
    gradient = _flat(torch.autograd.grad(kl(), list(parameters), create_graph=True))

    def product(vector: Tensor) -> Tensor:
        second = torch.autograd.grad(gradient @ vector, list(parameters), retain_graph=True)
        return _flat(second).detach() + damping * vector

    return product


@torch.no_grad()
def line_search(parameters: Sequence[Tensor], step: Tensor, accept: Callable[[], bool]) -> float:
    """Add the longest of step, step / 2, ... that `accept` allows at the new weights; return its share, 0 for none."""
    start, share = _flat(parameters), 1.0
    for _ in range(BACKTRACKS):
        _write(start + share * step, parameters)
        if accept():
            return share
        share /= 2
    _write(start, parameters)
    return 0.0


def _write(vector: Tensor, parameters: Sequence[Tensor]) -> None:
    """Write a vector [P] into the parameters, in place: their memory is shared."""
    for parameter, part in zip(parameters, torch.split(vector, [p.numel() for p in parameters]), strict=True):
        parameter.copy_(part.view_as(parameter))


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])
