"""Diffusion: a Gaussian path from data to noise, the quantities that a network predicts along it, and its loss.

    x_t = a(t) x_0 + s(t) eps,        t from 0 (data) to 1 (noise),  eps ~ N(0, I)

    x0          data
    eps         noise                                Ho et al. 2020, arXiv:2006.11239, eq. 14
    v           a eps - s x_0                        Salimans & Ho 2022, arXiv:2202.00512, appendix D
    score       - eps / s                            Song et al. 2021, arXiv:2011.13456: gradient of log p(x_t | x_0)
    velocity    a' x_0 + s' eps                      Lipman et al. 2023, arXiv:2210.02747: d x_t / d t

Each is c_d x_0 + c_n eps with known factors. With x_t these are two equations in x_0 and eps, so one prediction and x_t
give all five (`Point.split`, `Point.value`). The same holds for expectations given x_t. A network of the least squared
error is such an expectation, and its score is that of the noisy density (Vincent 2011, doi:10.1162/NECO_a_00142).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from whorl.objectives.next_token import Loss

Prediction = Literal["eps", "x0", "v", "score", "velocity"]
DIFFUSION_STEPS = 1000  # T of Ho et al.: t is n / T


@dataclass(frozen=True)
class Point:
    """The path at one time, or one per row: a, s and their derivatives by t, in shapes that multiply x."""

    a: Tensor
    s: Tensor
    a_rate: Tensor
    s_rate: Tensor

    def noisy(self, data: Tensor, noise: Tensor) -> Tensor:
        """Return x_t."""
        return self.a * data + self.s * noise

    def _factors(self, kind: Prediction) -> tuple[Tensor | float, Tensor | float]:
        """Return (c_d, c_n): the quantity is c_d x_0 + c_n eps."""
        factors: dict[Prediction, tuple[Tensor | float, Tensor | float]] = {
            "x0": (1.0, 0.0),
            "eps": (0.0, 1.0),
            "v": (-self.s, self.a),
            "score": (0.0, -1 / self.s),
            "velocity": (self.a_rate, self.s_rate),
        }
        return factors[kind]

    def value(self, kind: Prediction, data: Tensor, noise: Tensor) -> Tensor:
        """Return the quantity `kind` of x_0 and eps."""
        of_data, of_noise = self._factors(kind)
        return of_data * data + of_noise * noise

    def split(self, kind: Prediction, value: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return (x_0, eps) of the quantity `kind` at x_t. Not at t = 0 for x0, nor where a is 0 for eps and score."""
        of_data, of_noise = self._factors(kind)
        determinant = self.a * of_noise - self.s * of_data
        return (of_noise * x - self.s * value) / determinant, (self.a * value - of_data * x) / determinant


class GaussianPath(ABC):
    """The functions a(t) and s(t).

    last: the time at which sampling begins with pure noise; start_std: the standard deviation of that noise.
    """

    last: ClassVar[float] = 1.0
    start_std: float = 1.0

    @abstractmethod
    def coefficients(self, t: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return a, s and their derivatives at times [N] fp64."""

    def at(self, t: Tensor | float, x: Tensor) -> Point:
        """Return the point of the path at a time, or at times [N], for x [N, ...]."""
        times = torch.as_tensor(t, dtype=torch.float64).reshape(-1)
        shape = (-1, *[1] * (x.ndim - 1))
        return Point(*(c.to(x).view(shape) for c in self.coefficients(times)))


class VariancePreserving(GaussianPath):
    """a^2 + s^2 = 1; a subclass gives log a^2."""

    @abstractmethod
    def log_a2(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return log a^2 and its derivative at times [N] fp64."""

    def coefficients(self, t: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        log, slope = self.log_a2(t)
        a, s = (log / 2).exp(), (-torch.expm1(log)).clamp_min(0).sqrt()  # at t = 0 rounding may pass 0
        a_rate = a * slope / 2
        return a, s, a_rate, -a * a_rate / s


class LinearBetas(VariancePreserving):
    """beta_n from 1e-4 to 0.02 over 1,000 steps (Ho et al. 2020, section 4); log a^2 is linear between the steps."""

    def __init__(self) -> None:
        betas = torch.linspace(1e-4, 0.02, DIFFUSION_STEPS, dtype=torch.float64)
        self._table = torch.cat([torch.zeros(1, dtype=torch.float64), torch.log1p(-betas).cumsum(0)])

    def log_a2(self, t: Tensor) -> tuple[Tensor, Tensor]:
        place = t * DIFFUSION_STEPS
        below = place.long().clamp(0, DIFFUSION_STEPS - 1)
        rise = self._table[below + 1] - self._table[below]
        return self._table[below] + (place - below) * rise, rise * DIFFUSION_STEPS


class CosineSchedule(VariancePreserving):
    """a = cos(pi / 2 (t + 0.008) / 1.008), scaled to 1 at t = 0 (Nichol & Dhariwal 2021, arXiv:2102.09672, eq. 17).

    a is 0 at t = 1, where x_0 does not follow from eps. Sampling begins one step before.
    """

    last = 1 - 1 / DIFFUSION_STEPS

    def log_a2(self, t: Tensor) -> tuple[Tensor, Tensor]:
        scale = math.pi / 2 / 1.008
        angle = ((t + 0.008) * scale).clamp(max=math.pi / 2 - 1e-7)
        log = 2 * (angle.cos().log() - math.log(math.cos(0.008 * scale)))
        return log, -2 * scale * angle.tan()


SCHEDULES: dict[str, type[VariancePreserving]] = {"linear": LinearBetas, "cosine": CosineSchedule}


def denoising(predicted: Tensor, target: Tensor) -> Loss:
    """Return the mean square over the dimensions of a row, summed over rows.  predicted, target: [N, ...]."""
    squares = (predicted.float() - target.float()).square().flatten(1).mean(1)
    return Loss(squares.sum(), torch.tensor(float(len(target)), device=target.device))
