"""Contrastive learning of pairs: of all texts of a batch, which one belongs to this image? And the other way round.

    z_ij  = scale * x_i . y_j                                      [N, N], x and y unit vectors
    total = sum_i  1/2 (lse_j z_ij - z_ii)  +  1/2 (lse_j z_ji - z_ii)

The symmetric loss of CLIP (Radford et al. 2021, arXiv:2103.00020, figure 3), each half InfoNCE (van den Oord et al. 2018,
arXiv:1807.03748, eq. 4). The two sides may as well be questions and answers, or two readings of one text.

Subtle, first: false negatives. If two images of a batch have the same caption, the loss as written pushes an image away from
words that describe it. `groups` names what each pair is about, and pairs of one group are no negatives of each other: they
are left out of the sums.

Subtle, second: unlike everywhere else in this house, micro-batches change the loss. The negatives of a pair are the other
pairs in the call, so a batch cut into two has half as many of them. The count of negatives is a setting, not a detail.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from whorl.errors import ConfigError
from whorl.objectives.next_token import Loss


def info_nce(x: Tensor, y: Tensor, scale: Tensor | float, groups: Tensor | None = None) -> Loss:
    """The symmetric contrastive loss, summed over pairs, in nats, taken in fp32.

    Args:
        x, y: [N, d] unit vectors; row i of one belongs to row i of the other.
        scale: the inverse temperature, a number or [] tensor (learned).
        groups: [N] integers; pairs i and j of one group are not told apart. None: all pairs differ.

    Returns:
        Loss: `total` [] fp32, `count` [] = N, metrics `correct` (rows of x whose best y is their own or of their group,
        and the other way round, averaged over both ways).

    Raises:
        ConfigError: shapes that do not fit.
    """
    if x.ndim != 2 or x.shape != y.shape:
        raise ConfigError(f"x is {list(x.shape)} and y {list(y.shape)}", expected="[N, d], both alike")
    if groups is not None and groups.shape != x.shape[:1]:
        raise ConfigError(f"groups is {list(groups.shape)}", expected=f"[{len(x)}], one a pair")
    n = len(x)
    own = torch.arange(n, device=x.device)
    z = x.float() @ y.float().t() * scale  # [N, N]
    names = own if groups is None else groups
    same = names[:, None] == names[None, :]
    left_out = same & (own[:, None] != own[None, :])
    seen = z.masked_fill(left_out, float("-inf"))  # the diagonal stays, so no row is empty
    total = 0.5 * (
        F.cross_entropy(seen, own, reduction="sum") + F.cross_entropy(seen.t(), own, reduction="sum")
    )
    count = torch.tensor(float(n), device=x.device)
    if n == 0:
        return Loss(total, count, {"correct": count.clone()})
    best = (z.detach().argmax(dim=1), z.detach().argmax(dim=0))
    correct = sum((same[own, b].float().sum() for b in best), torch.zeros((), device=x.device)) / 2
    return Loss(total, count, {"correct": correct})
