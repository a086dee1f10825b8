"""Samplers of a Gaussian path: from noise at t = 1 to data at t = 0, in steps t -> u.

    DDIM        x_u = a_u x_0 + s_u eps                              Song et al. 2021, arXiv:2010.02502, eq. 12, sigma = 0
    ancestral   x_u ~ q(x_u | x_t, x_0)                              Ho et al. 2020, arXiv:2006.11239, eq. 6 and 7
    Heun        x_u = x_t + (u - t) (d(x_t, t) + d(x', u)) / 2       Karras et al. 2022, arXiv:2206.00364, algorithm 1

x_0 and eps are the network's estimates at (x_t, t); d is the velocity a' x_0 + s' eps, and x' the end of the DDIM step. All
three hold for every Gaussian path. On a straight path DDIM is Euler's method for the flow. Heun costs two evaluations a
step; its last step is DDIM's, because s' is infinite at t = 0 of a diffusion.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Literal, get_args

import torch
from torch import Tensor

from whorl.errors import ConfigError, one_of
from whorl.objectives.generative.diffusion import GaussianPath

Estimate = Callable[[Tensor, float], tuple[Tensor, Tensor]]  # (x_t [N, ...], t) -> (x_0, eps)
Sampler = Literal["ancestral", "ddim", "heun"]


def ddim_step(path: GaussianPath, x: Tensor, u: float, data: Tensor, noise: Tensor) -> Tensor:
    """Return x_u of the estimates at x_t."""
    return path.at(u, x).noisy(data, noise)


def ancestral_step(path: GaussianPath, x: Tensor, t: float, u: float, data: Tensor, z: Tensor) -> Tensor:
    """Return a sample of q(x_u | x_t, x_0) for standard normal z."""
    here, there = path.at(t, x), path.at(u, x)
    ratio = here.a / there.a
    added = here.s.square() - (ratio * there.s).square()  # variance of x_t given x_u
    mean = (ratio * there.s.square() * x + there.a * added * data) / here.s.square()
    return mean + (added.clamp_min(0).sqrt() * there.s / here.s) * z


def heun_step(path: GaussianPath, x: Tensor, t: float, u: float, estimate: Estimate) -> Tensor:
    """Return x_u by the mean of two velocities; at u = 0 by the first."""
    data, noise = estimate(x, t)
    end = ddim_step(path, x, u, data, noise)
    if u == 0:
        return end
    first = path.at(t, x).value("velocity", data, noise)
    second = path.at(u, x).value("velocity", *estimate(end, u))
    return x + (u - t) * (first + second) / 2


@torch.no_grad()
def draw(
    path: GaussianPath,
    estimate: Estimate,
    x: Tensor,
    steps: int,
    sampler: Sampler,
    rng: torch.Generator,
    record: Callable[[float, Tensor], None] | None = None,
) -> Tensor:
    """Return samples [N, ...] from noise x [N, ...], in equal steps of time.

    Args:
        record: is called with each of the steps + 1 times and its x_t, from the noise to the samples.

    Raises:
        ConfigError: an unknown sampler.
    """
    if sampler not in get_args(Sampler):
        raise ConfigError(f"no sampler is called {sampler!r}", expected=one_of(sampler, get_args(Sampler)))
    times = [path.last * (1 - k / steps) for k in range(steps)] + [0.0]
    record = record or (lambda t, x: None)
    record(times[0], x)
    for t, u in pairwise(times):
        if sampler == "heun":
            x = heun_step(path, x, t, u, estimate)
        else:
            data, noise = estimate(x, t)
            if sampler == "ddim":
                x = ddim_step(path, x, u, data, noise)
            else:
                x = ancestral_step(path, x, t, u, data, torch.randn(x.shape, generator=rng).to(x))
        record(u, x)
    return x


def clamp_data(path: GaussianPath, estimate: Estimate, limit: float) -> Estimate:
    """Return an estimate whose x_0 lies within +-limit, and whose eps agrees with it at x_t."""

    def clamped(x: Tensor, t: float) -> tuple[Tensor, Tensor]:
        data = estimate(x, t)[0].clamp(-limit, limit)
        return path.at(t, x).split("x0", data, x)

    return clamped
