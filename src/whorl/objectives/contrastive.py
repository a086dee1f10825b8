"""Contrastive learning of pairs: select the partner of each item among all items of the batch, in both directions.

    z_ij  = scale * x_i . y_j                                      [N, N], x and y unit vectors
    total = sum_i  1/2 (lse_j z_ij - z_ii)  +  1/2 (lse_j z_ji - z_ii)

The symmetric loss of CLIP (Radford et al. 2021, arXiv:2103.00020, figure 3). Each half is InfoNCE (van den Oord et al.
2018, arXiv:1807.03748, eq. 4). The two sides may be images and captions, questions and answers, or two spans of a
document.

First subtle point: false negatives. If two images of a batch share a caption, the plain loss separates an image from a
text that describes it. Pairs with the same number in `groups` are not negatives of each other.

Second subtle point: micro-batches change this loss. The negatives of a pair are the other pairs of the call, so the
batch size of a call is a setting of the method.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from whorl.errors import ConfigError
from whorl.objectives.next_token import Loss


def info_nce(x: Tensor, y: Tensor, scale: Tensor | float, groups: Tensor | None = None) -> Loss:
    """Return the symmetric contrastive loss, summed over pairs, in nats, computed in fp32.

    Args:
        x, y: [N, d] unit vectors; row i of x and row i of y are a pair.
        scale: inverse temperature, a number or a learned [] tensor.
        groups: [N] integers; pairs of one group are not negatives of each other. None: all pairs differ.

    Returns:
        Loss: `total` [] fp32, `count` [] = N. Metric `correct`: rows whose best match is their partner or one of its
        group, averaged over both directions.

    Raises:
        ConfigError: shapes do not fit.
    """
    if x.ndim != 2 or x.shape != y.shape:
        raise ConfigError(f"x is {list(x.shape)} and y {list(y.shape)}", expected="[N, d] for both")
    if groups is not None and groups.shape != x.shape[:1]:
        raise ConfigError(f"groups is {list(groups.shape)}", expected=f"[{len(x)}], one per pair")
    n = len(x)
    rows = torch.arange(n, device=x.device)
    z = x.float() @ y.float().t() * scale  # [N, N]
    group_ids = rows if groups is None else groups
    same = group_ids[:, None] == group_ids[None, :]
    excluded = same & (rows[:, None] != rows[None, :])
    masked = z.masked_fill(excluded, float("-inf"))  # the diagonal stays, so no row is empty
    total = 0.5 * (
        F.cross_entropy(masked, rows, reduction="sum") + F.cross_entropy(masked.t(), rows, reduction="sum")
    )
    count = torch.tensor(float(n), device=x.device)
    if n == 0:
        return Loss(total, count, {"correct": count.clone()})
    best = (z.detach().argmax(dim=1), z.detach().argmax(dim=0))
    correct = sum((same[rows, b].float().sum() for b in best), torch.zeros((), device=x.device)) / 2
    return Loss(total, count, {"correct": correct})
