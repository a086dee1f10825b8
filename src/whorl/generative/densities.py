"""Densities in the plane that are known exactly: samples and log-densities.

    8-gaussians     equal Gaussians on a circle
    25-gaussians    narrow Gaussians on a grid: whether a model holds all modes
    ring            many Gaussians on a circle: mass near a curve
    checkerboard    uniform on every second square: edges, and no mass between

The scales are those of standardised data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from whorl.errors import ConfigError, one_of


@dataclass(frozen=True)
class GaussianMixture:
    """Equal Gaussians of the standard deviation `std` around means [K, d]."""

    means: Tensor
    std: float

    def sample(self, n: int, rng: torch.Generator) -> Tensor:
        """Return samples [n, d]."""
        which = torch.randint(len(self.means), (n,), generator=rng)
        return self.means[which] + self.std * torch.randn(n, self.means.shape[1], generator=rng)

    def log_prob(self, x: Tensor) -> Tensor:
        """Return log-densities [N] in nats of x [N, d], in its type."""
        squares = (x[:, None] - self.means.to(x)).square().sum(-1) / self.std**2
        normalizer = math.log(len(self.means)) + x.shape[1] * math.log(self.std * math.sqrt(2 * math.pi))
        return (-squares / 2).logsumexp(1) - normalizer


@dataclass(frozen=True)
class Checkerboard:
    """Uniform on the 8 dark of 4 x 4 unit squares around the origin."""

    def sample(self, n: int, rng: torch.Generator) -> Tensor:
        """Return samples [n, 2]."""
        row = torch.randint(4, (n,), generator=rng)
        column = 2 * torch.randint(2, (n,), generator=rng) + row % 2
        return torch.stack([column, row], 1) - 2 + torch.rand(n, 2, generator=rng)

    def log_prob(self, x: Tensor) -> Tensor:
        """Return log-densities [N] in nats of x [N, 2]: -log 8, or -inf."""
        squares = (x + 2).floor()
        dark = (squares.sum(1) % 2 == 0) & (squares >= 0).all(1) & (squares < 4).all(1)
        return torch.where(dark, -math.log(8.0), -math.inf).to(x)


Density = GaussianMixture | Checkerboard


def _circle(n: int) -> Tensor:
    angles = torch.arange(n) * (2 * math.pi / n)
    return 1.5 * torch.stack([angles.cos(), angles.sin()], dim=1)


DENSITIES: dict[str, Callable[[], Density]] = {
    "8-gaussians": lambda: GaussianMixture(_circle(8), 0.15),
    "25-gaussians": lambda: GaussianMixture(
        0.75 * torch.cartesian_prod(torch.arange(-2.0, 3), torch.arange(-2.0, 3)), 0.06
    ),
    "ring": lambda: GaussianMixture(_circle(64), 0.1),
    "checkerboard": Checkerboard,
}


def make_density(name: str) -> Density:
    """Return a density. Raises ConfigError: the name is unknown."""
    if name not in DENSITIES:
        raise ConfigError(f"no density has the name {name!r}", expected=one_of(name, list(DENSITIES)))
    return DENSITIES[name]()
