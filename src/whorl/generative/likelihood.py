"""Log-densities of a model by its probability-flow ODE (Song et al. 2021, arXiv:2011.13456, section 4.3 and appendix D.2).

    dx/dt = d(x, t),        log p_0(x_0) = log p_1(x_1) + integral from 0 to 1 of div d(x_t, t) dt

The divergence is exact: one backward pass per dimension. A diffusion begins shortly after t = 0, where its velocity is
finite; the density there is that of the data with a little noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whorl.errors import WhorlError
from whorl.generative.samplers import Estimate
from whorl.objectives.generative.diffusion import GaussianPath

FIRST = 1e-3  # time at which the ODE begins
EVALUATIONS = 20_000  # of the velocity, at most
Velocity = Callable[[Tensor, float], Tensor]


def with_divergence(velocity: Velocity, x: Tensor, t: float) -> tuple[Tensor, Tensor]:
    """Return the velocity [N, ...] and its divergence [N] at x [N, ...]."""
    with torch.enable_grad():
        flat = x.detach().flatten(1).requires_grad_()
        found = velocity(flat.view(x.shape), t).flatten(1)
        total = torch.zeros_like(flat[:, 0])
        for i in range(flat.shape[1]):
            total = total + torch.autograd.grad(found[:, i].sum(), flat, retain_graph=True)[0][:, i]
    return found.detach().view(x.shape), total.detach()


def log_likelihood(path: GaussianPath, estimate: Estimate, x: Tensor, tolerance: float = 1e-4) -> Tensor:
    """Return log p(x) in nats, fp64 [N], of x [N, ...].

    Args:
        tolerance: relative and absolute, per step of the solver.

    Raises:
        WhorlError: the solver misses the tolerance.
    """
    from scipy.integrate import solve_ivp

    n, size, evaluations = len(x), x[0].numel(), count()

    def velocity(y: Tensor, t: float) -> Tensor:
        return path.at(t, y).value("velocity", *estimate(y, t))

    def slope(t: float, state: NDArray[np.float64]) -> NDArray[np.float64]:
        y = torch.from_numpy(state[: n * size]).to(x).view(x.shape)
        found, divergence = with_divergence(velocity, y, t)
        slopes = np.concatenate([found.double().flatten().numpy(), divergence.double().numpy()])
        if not np.isfinite(slopes).all():
            raise missed(f"the velocity is not finite at t = {t:.3g}")
        if next(evaluations) == EVALUATIONS:
            raise missed(f"{EVALUATIONS:,} evaluations end at t = {t:.3g}")
        return slopes

    def missed(why: str) -> WhorlError:
        return WhorlError(
            f"the probability-flow ODE misses its tolerance, {tolerance:g}: {why}",
            expected="a velocity without poles, such as that of a trained model",
            do="raise the tolerance, or train longer",
        )

    start = np.concatenate([x.double().flatten().numpy(), np.zeros(n)])
    result: Any = solve_ivp(slope, (FIRST, path.last), start, rtol=tolerance, atol=tolerance)
    if not result.success:
        raise missed(result.message)
    end = torch.from_numpy(result.y[:, -1])
    squares = (end[: n * size].view(n, size) / path.start_std).square().sum(1)
    return end[n * size :] - squares / 2 - size * math.log(path.start_std * math.sqrt(2 * math.pi))
