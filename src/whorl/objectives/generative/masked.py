"""Masked diffusion: tokens are replaced by a mask, and a network predicts each of them from those that are left.

    loss = E_t [ 1/t  sum over masked positions of  - log p(x0[i] | x_t) ]   >=   - log p(x0)

Each token of x_t is masked with probability t, uniform in (0, 1] (Sahoo et al. 2024, arXiv:2406.07524, eq. 11; Shi et al.
2024, arXiv:2406.04329; LLaDA, arXiv:2502.09992, eq. 3). Of n tokens k are masked, and the integral over t of a mask with k
ones is (k-1)! (n-k)! / n!. So the loss is the mean of n/k times the sum over k masked tokens, k uniform in 1 .. n and the
mask uniform of this size: the mean loss of all orders of the tokens (Ou et al. 2024, arXiv:2406.03736). This form is used,
with t = k/n, because its weights are at most n.

Blocks (Arriola et al. 2025, arXiv:2503.09573): each block of a document has its own t, and is predicted from its unmasked
tokens and from all earlier blocks without masks. One forward computes all blocks of a row, over [x_t ; x0] with a mask of
pairs. The loss is the sum over blocks, between next-token prediction (blocks of 1) and the loss of a whole row.

Times and masks are data: `draws` are made for a whole batch and belong to its rows. The times of a batch are spread evenly
(Kingma et al. 2021, arXiv:2107.00630, appendix I.1). As in next-token prediction, the first position of a row is given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def draws(rows: int, length: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return (time, order) of a batch, each [rows, length] fp64 in [0, 1). The times of a column are spread evenly."""
    strata = torch.rand(rows, length, generator=rng).argsort(0)
    shift = torch.rand(1, length, generator=rng, dtype=torch.float64)
    return (strata + shift) / rows, torch.rand(rows, length, generator=rng, dtype=torch.float64)


def targets(loss_mask: Tensor) -> Tensor:
    """Return [B, T] bool, the ids that are predicted, from the mask [B, T] of their predecessors' next-token targets."""
    return torch.cat([torch.zeros_like(loss_mask[:, :1]), loss_mask[:, :-1]], 1)


def weights(
    predicted: Tensor, drawn: tuple[Tensor, Tensor], block: int | None,
    segments: Tensor | None = None, positions: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return 1/t where an id is masked and 0 elsewhere, [B, T] fp32.

    Args:
        predicted: [B, T] bool, ids that may be masked.
        drawn: time and order [B, T] of `draws`. A block takes the time at its first position; order is that of its masks.
        block: positions of a block; None: a document is one.
        segments, positions: [B, T] of packed rows.
    """
    (time, order), (rows, length) = drawn, predicted.shape
    at = (
        torch.arange(length, device=predicted.device).expand(rows, length) if positions is None else positions
    )
    starts = at % (block or length) == 0 if block else torch.zeros_like(predicted)
    starts[:, 0] = True
    if segments is not None:
        starts[:, 1:] |= segments[:, 1:] != segments[:, :-1]
    group = starts.flatten().cumsum(0) - 1  # of each position
    count = torch.bincount(group, predicted.flatten().double())
    masked = torch.minimum((time[starts] * count).floor() + 1, count)  # k of each group
    key = group + torch.where(predicted, order, 1.0).flatten() / 2  # ids that are not predicted come last
    rank = torch.empty_like(key).scatter_(
        0, key.argsort(), torch.arange(len(key), device=key.device).double()
    )
    rank -= starts.flatten().nonzero()[group, 0]
    chosen = predicted.flatten() & (rank < masked[group])
    return torch.where(chosen, (count / masked)[group], 0.0).view(rows, length).float()


def inputs(
    ids: Tensor,
    weight: Tensor,
    settings: Any,
    segments: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return ids, positions and segments for the network: x_t, or with blocks [x_t ; x0], [B, 2T], and its pairs.

    The first T hidden states predict `ids`, with the weights `weight` of `weights`. settings: `mask_id` and `block`.
    """
    noisy, block = torch.where(weight > 0, settings.mask_id, ids), settings.block
    if block is None:
        return noisy, positions, segments
    rows, length = ids.shape
    at = torch.arange(length, device=ids.device).expand(rows, length) if positions is None else positions
    number = at // block
    query, key = number[:, :, None], number[:, None, :]
    same = torch.ones_like(query == key)
    if segments is not None:
        same = segments[:, :, None] == segments[:, None, :]
    of_noisy = torch.cat([same & (query == key), same & (query > key)], 2)
    of_clean = torch.cat([torch.zeros_like(same), same & (query >= key)], 2)
    pairs = torch.cat([of_noisy, of_clean], 1)
    return torch.cat([noisy, ids], 1), torch.cat([at, at], 1), pairs
