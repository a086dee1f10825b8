"""A network of noisy vectors, times and classes; and the embedding of time and class that image networks share.

    c = W_2 silu(W_1 waves(1000 t)) + class[label]                              [B, width]
    h = W [x, sin(f x), cos(f x)] + c;   h += down(silu(up(silu(h)) + c))   depth times;   out = W silu(h)

The time embedding is that of Ho et al. 2020 (arXiv:2006.11239, appendix B). Class number `n_classes` means "no class"; its
vector is trained on rows whose class was dropped (Ho & Salimans 2022, arXiv:2207.12598). The waves of x let a
small network resolve narrow modes (Tancik et al. 2020, arXiv:2006.10739). There is no layer norm: of a vector of the plane
it leaves the direction, and the distance from the origin is lost.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whorl.nn.absolute_positions import SinusoidalPositions
from whorl.nn.linear import Linear

TIME_SCALE = 1000.0
FREQUENCIES = (1.0, 2.0, 4.0, 8.0, 16.0)


class Condition(nn.Module):
    """Embed times [B] from 0 to 1, and classes [B] or None for none, as [B, width]. n_classes: 0 for no classes."""

    def __init__(self, width: int, n_classes: int, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.waves, self.n_classes = SinusoidalPositions(width), n_classes
        std = width**-0.5
        self.up = Linear(width, width, std=std, bias=True, generator=generator)
        self.out = Linear(width, width, std=std, bias=True, generator=generator)
        table = torch.randn(n_classes + 1, width, generator=generator) * 0.5
        self.classes = nn.Parameter(table) if n_classes else None

    def forward(self, time: Tensor, labels: Tensor | None = None) -> Tensor:
        found: Tensor = self.out(F.silu(self.up(self.waves(time * TIME_SCALE))))
        if self.classes is None:
            return found
        if labels is None:
            labels = time.new_full(time.shape, self.n_classes, dtype=torch.long)
        return found + F.embedding(labels, self.classes)


def wave_features(x: Tensor, frequencies: Sequence[float]) -> Tensor:
    """Return x, sin(f x) and cos(f x) of x [B, d] for all f of F frequencies: [B, (1 + 2 F) d]."""
    return torch.cat([x, *(wave(f * x) for f in frequencies for wave in (torch.sin, torch.cos))], dim=1)


class VectorDenoiser(nn.Module):
    """Map x [B, d], times [B] and classes [B] to [B, d] (see the top of this file). The first output is 0."""

    def __init__(
        self, d: int, width: int, depth: int, n_classes: int = 0, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        std = width**-0.5
        self.condition = Condition(width, n_classes, generator)
        inputs = d * (1 + 2 * len(FREQUENCIES))
        self.first = Linear(inputs, width, std=inputs**-0.5, bias=True, generator=generator)
        self.up = nn.ModuleList(
            [Linear(width, width, std=std, bias=True, generator=generator) for _ in range(depth)]
        )
        self.down = nn.ModuleList([Linear(width, width, std=0.0, bias=True) for _ in range(depth)])
        self.last = Linear(width, d, std=0.0, bias=True)

    def forward(self, x: Tensor, time: Tensor, labels: Tensor | None = None) -> Tensor:
        c = self.condition(time, labels)
        h = self.first(wave_features(x, FREQUENCIES)) + c
        for up, down in zip(self.up, self.down, strict=True):
            h = h + down(F.silu(up(F.silu(h)) + c))
        out: Tensor = self.last(F.silu(h))
        return out
