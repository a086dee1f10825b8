"""Gradient clipping by the global norm (Pascanu et al. 2013, arXiv:1211.5063, algorithm 1).

g <- g min(1, max_norm / |g|),   |g| the Euclidean norm over all gradients together
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from whorl.nn.cpu.update import sum_parts


def squared_norm(tensors: Sequence[Tensor]) -> float:
    """Return the sum of squares over all tensors; 0 for none."""
    if not tensors:
        return 0.0
    norms = torch.stack(torch._foreach_norm(list(tensors)))  # read at once: each reading waits for a GPU
    squares: list[float] = (norms.double() ** 2).tolist()
    return sum(squares)


def sum_replicas(gradients: Mapping[str, Tensor], sums: Mapping[str, Tensor], native: bool) -> float | None:
    """Sum the gradients [replicas, ...] of the names in `sums` into them, in rank order.

    Returns:
        the squared norm over all sums, which costs nothing in C++ (`native`); None in torch.
    """
    parts = [gradients[name] for name in sums]
    if native:
        return sum(sum_parts(parts, list(sums.values())))
    for part, into in zip(parts, sums.values(), strict=True):
        torch.sum(part, dim=0, out=into)
    return None


def clip_scale(norm: float, max_norm: float) -> float:
    """Return the factor on gradients of this norm, at most 1."""
    return min(1.0, max_norm / max(norm, 1e-30))


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[Tensor], max_norm: float) -> float:
    """Scale the gradients of `parameters` in place to a global norm of at most `max_norm`; return the norm before.

    Parameters without a gradient are skipped. Unlike torch's function of this name, no 1e-6 is added to the norm.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = float(squared_norm(gradients) ** 0.5)
    scale = clip_scale(norm, max_norm)
    if gradients and scale != 1.0:
        torch._foreach_mul_(gradients, scale)
    return norm
