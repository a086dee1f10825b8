"""`SparseAdagrad` for n-gram tables: updates only the rows of the batch, each with its step size (Duchi et al. 2011).

There is one accumulator per row, as in recommendation models. Dense Adam would move hundreds of megabytes per step to
change a few thousand rows. Every replica updates the rows r with r mod replicas = rank, from the lists of all replicas.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from whorl.nn.native import update
from whorl.train.optim.optimizer import Allocator
from whorl.train.optim.optimizers import NamedTensors, zeros_like_named


class SparseAdagrad:
    """Adagrad with one accumulator per row, for lookup tables [rows, d] with sparse gradients."""

    def __init__(
        self,
        params: NamedTensors,
        learning_rate: float,
        *,
        eps: float = 1e-8,
        allocate: Allocator = zeros_like_named,
    ) -> None:
        self.params, self.learning_rate, self.eps = params, learning_rate, eps
        self.state = {f"{name}/square": allocate(f"{name}/square", (p.shape[0],)) for name, p in params}

    def step(self, name: str, table: Tensor, rows: Tensor, gradients: Tensor, lr_scale: float) -> None:
        """Update the given rows. rows: [n] row numbers, with repeats; gradients: [n, d], summed over repeats here."""
        touched, inverse = torch.unique(rows, return_inverse=True)
        total = gradients.new_zeros(len(touched), gradients.shape[1]).index_add_(0, inverse, gradients)
        squares = self.state[f"{name}/square"]
        square = squares[touched] + total.square().mean(dim=1)
        squares[touched] = square
        step = -self.learning_rate * lr_scale / (square.sqrt() + self.eps)
        table.index_add_(0, touched, total.mul_(step[:, None]))

    def step_native(
        self,
        name: str,
        table: Tensor,
        rows: Sequence[Tensor],
        gradients: Sequence[Tensor],
        rank: int,
        divisor: float,
        lr_scale: float,
    ) -> None:
        """Update a rank's rows in C++, with gradients over `divisor`. rows, gradients: a list of each replica."""
        squares = self.state[f"{name}/square"]
        rate = self.learning_rate * lr_scale
        update.row_adagrad_(table, squares, rows, gradients, rank, divisor, rate, self.eps)


def own_rows(rows: Sequence[Tensor], gradients: Sequence[Tensor], rank: int) -> tuple[Tensor, Tensor]:
    """Return a rank's rows and their gradients out of the lists of all replicas; the tensors themselves for one replica."""
    if len(rows) == 1:
        return rows[0], gradients[0]
    own = [each % len(rows) == rank for each in rows]
    kept = ([t[mask] for t, mask in zip(lists, own, strict=True)] for lists in (rows, gradients))
    ids, values = (torch.cat(parts) for parts in kept)
    return ids, values
