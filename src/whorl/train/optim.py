"""Three optimisers, each for the parameters it suits; every one keeps its state by parameter name.

- `Muon` for the matrices of the blocks (Jordan et al. 2024, "Muon: An optimizer for hidden layers"): momentum, then
  the nearest orthogonal matrix, so that every direction of the update has the same size. The iteration is the
  Polar Express (Amsel et al. 2025, arXiv:2505.16932), whose coefficients are the best quintic of each round.
  Matrices of one shape go through it as a batch.
- `AdamW` (Loshchilov & Hutter 2019, arXiv:1711.05101) for embeddings, head, gains and scalars.
- `RowAdagrad` for n-gram memories: only the rows that a batch touched, each with its own step size (Duchi et al.
  2011, with one accumulator a row as in recommendation models). Dense Adam over such a table would move
  hundreds of megabytes a step to change a few thousand rows.

All take gradients of the *mean* loss and change weights in place. `state` holds tensors by "name/moment", which
is what a checkpoint stores.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

Named = list[tuple[str, Tensor]]
Allocate = Callable[[str, tuple[int, ...]], Tensor]

# Polar Express, rounds 1 to 5, for singular values from 1e-3 to 1 (arXiv:2505.16932, algorithm 1, with its margin).
POLAR_EXPRESS = (
    (8.2051, -22.9019, 16.4607),
    (4.0664, -2.8612, 0.5184),
    (3.9096, -2.8234, 0.5250),
    (3.2856, -2.4153, 0.4853),
    (2.2779, -1.6198, 0.3985),
)


def zeros(_name: str, shape: tuple[int, ...]) -> Tensor:
    """The default allocator of optimiser state."""
    return torch.zeros(shape)


def orthogonalise(matrices: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The nearest semi-orthogonal matrix (U V^T of the singular value decomposition), approximately.

    matrices: [n, rows, columns] -> the same shape, fp32; singular values come out between about 0.7 and 1.2.
    """
    x = matrices.to(dtype)
    wide = x.shape[-2] <= x.shape[-1]
    if not wide:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.01 + 1e-7)
    for a, b, c in POLAR_EXPRESS:
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a, alpha=1.0)
    return (x if wide else x.mT).float()


class Muon:
    """Momentum and orthogonalisation for matrices [rows, columns].

    Args:
        learning_rate: peak; an update has spectral norm learning_rate * sqrt(max(1, rows / columns)).
        dtype: the type of the orthogonalisation's products.
    """

    def __init__(
        self,
        params: Named,
        learning_rate: float,
        *,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        dtype: torch.dtype = torch.float32,
        allocate: Allocate = zeros,
    ) -> None:
        self.learning_rate, self.momentum, self.weight_decay = learning_rate, momentum, weight_decay
        self.dtype = dtype
        self.params = params
        self.state = {f"{name}/momentum": allocate(f"{name}/momentum", tuple(p.shape)) for name, p in params}
        by_shape: dict[tuple[int, ...], Named] = defaultdict(list)
        for name, p in params:
            by_shape[tuple(p.shape)].append((name, p))
        self.groups = list(by_shape.values())

    def step(self, gradients: dict[str, Tensor], factor: float) -> None:
        """One update; `factor` scales the peak learning rate."""
        rate = self.learning_rate * factor
        for group in self.groups:
            directions = []
            for name, _ in group:
                moment, gradient = self.state[f"{name}/momentum"], gradients[name]
                moment.lerp_(gradient, 1 - self.momentum)
                directions.append(gradient.lerp(moment, self.momentum))  # Nesterov
            rows, columns = group[0][1].shape
            scale = rate * max(1.0, rows / columns) ** 0.5
            for (_, p), update in zip(group, orthogonalise(torch.stack(directions), self.dtype), strict=True):
                p.mul_(1 - rate * self.weight_decay)
                p.add_(update, alpha=-scale)


class AdamW:
    """Adam with decoupled weight decay, fp32.  Bias-corrected as in Kingma & Ba 2015, algorithm 1."""

    def __init__(
        self,
        params: Named,
        learning_rate: dict[str, float],
        *,
        betas: tuple[float, float] = (0.8, 0.95),
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        allocate: Allocate = zeros,
    ) -> None:
        self.params, self.learning_rate = params, learning_rate
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay
        self.state = {
            f"{name}/{moment}": allocate(f"{name}/{moment}", tuple(p.shape))
            for name, p in params
            for moment in ("mean", "square")
        }
        self.steps = 0

    def step(self, gradients: dict[str, Tensor], factor: float) -> None:
        """One update; `factor` scales each parameter's peak learning rate."""
        self.steps += 1
        first, second = self.betas
        correction = (1 - second**self.steps) ** 0.5 / (1 - first**self.steps)
        for name, p in self.params:
            rate = self.learning_rate[name] * factor
            mean, square = self.state[f"{name}/mean"], self.state[f"{name}/square"]
            gradient = gradients[name]
            mean.lerp_(gradient, 1 - first)
            square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
            if self.weight_decay:
                p.mul_(1 - rate * self.weight_decay)
            p.addcdiv_(mean, square.sqrt().add_(self.eps), value=-rate * correction)


class RowAdagrad:
    """Adagrad with one accumulator a row, for look-up tables [rows, d] with sparse gradients."""

    def __init__(
        self, params: Named, learning_rate: float, *, eps: float = 1e-8, allocate: Allocate = zeros
    ) -> None:
        self.params, self.learning_rate, self.eps = params, learning_rate, eps
        self.state = {f"{name}/square": allocate(f"{name}/square", (p.shape[0],)) for name, p in params}

    def step(self, name: str, table: Tensor, rows: Tensor, gradients: Tensor, factor: float) -> None:
        """rows: [n] row numbers, repeats allowed; gradients: [n, d], summed over repeats here."""
        touched, inverse = torch.unique(rows, return_inverse=True)
        total = gradients.new_zeros(len(touched), gradients.shape[1]).index_add_(0, inverse, gradients)
        squares = self.state[f"{name}/square"]
        square = squares[touched] + total.square().mean(dim=1)
        squares[touched] = square
        step = -self.learning_rate * factor / (square.sqrt() + self.eps)
        table.index_add_(0, touched, total * step[:, None])
