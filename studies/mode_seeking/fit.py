"""Effect of each divergence on a student that is too small: one Gaussian fitted to a mixture of two.

    p(x) = w N(x; -a, s^2) + (1 - w) N(x; a, s^2)          the teacher, bimodal
    q(x) = N(x; mean, deviation^2)                         the student, unimodal

    forward    KL(p || q)     q must cover p: its mean lies between the modes, where p is almost 0. Its optimum has the
                              mean and variance of p (moment matching)
    reverse    KL(q || p)     q must avoid regions without p: it fits one mode and ignores the other
    jensen                    in between: forward in the limit beta = 0, reverse in the limit beta = 1

Sources: Bishop 2006, "Pattern Recognition and Machine Learning", section 10.1.2; for language models arXiv:2306.13649,
section 2. A language model fitted by forward KL between two modes samples text that the teacher would never produce.

Densities are evaluated on a grid [K], as distributions over K outcomes, so the objective is the function that trains
language models (`objectives/distil.py`). Adam fits the student's two parameters.

The subtle point: the reverse divergence has an optimum at each mode and a poor one between, and the start decides. So
every student starts at the left, in the middle and at the right, and the best of the three counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from whorl.align.config import Divergence
from whorl.objectives.distil import divergence

REACH, POINTS = 6.0, 401


@dataclass(frozen=True)
class GaussianFit:
    """One student.

    density: [K] on `ModeSeekingResult.x`. value: its divergence in nats. path: [steps, 2], mean and deviation.
    """

    name: str
    mean: float
    std: float
    value: float
    density: Tensor
    path: Tensor


@dataclass(frozen=True)
class ModeSeekingResult:
    """x: [K]. density: [K] of the teacher. fits: by name."""

    x: Tensor
    density: Tensor
    fits: dict[str, GaussianFit]


def mode_curves(
    *,
    separation: float = 2.0,
    std: float = 0.6,
    weight: float = 0.6,
    betas: tuple[float, ...] = (0.1, 0.5, 0.9),
    steps: int = 300,
    rate: float = 0.05,
) -> ModeSeekingResult:
    """Return the teacher and the fit of each divergence.

    Args:
        separation: a above. std: s. weight: w, of the left mode.
        betas: of the Jensen-Shannon divergences, one student each.
    """
    x = torch.linspace(-REACH, REACH, POINTS, dtype=torch.float64)
    width = 2 * REACH / (POINTS - 1)
    hills = torch.stack([_normal_log_density(x, -separation, std), _normal_log_density(x, separation, std)])
    share = torch.tensor([weight, 1 - weight], dtype=torch.float64).log()
    teacher = (hills + share[:, None]).logsumexp(0).log_softmax(0)
    kinds: list[tuple[str, Divergence, float]] = [("forward", "forward", 0.5), ("reverse", "reverse", 0.5)]
    kinds += [(f"jensen {beta:g}", "jensen", beta) for beta in betas]
    fits = {}
    for name, kind, beta in kinds:
        mean = torch.tensor([[-separation], [0.0], [separation]], dtype=torch.float64, requires_grad=True)
        log_deviation = torch.zeros(3, 1, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.Adam([mean, log_deviation], lr=rate)
        path = []
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = rate * (1 - step / steps)
            loss = divergence(
                teacher, _normal_log_density(x, mean, log_deviation.exp()).log_softmax(-1), kind, beta
            )
            optimizer.zero_grad()
            loss.sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            path.append(torch.cat([mean, log_deviation.exp()], 1).detach().clone())
        with torch.no_grad():
            q = _normal_log_density(x, mean, log_deviation.exp()).log_softmax(-1)
            values = divergence(teacher, q, kind, beta)
        best = int(values.argmin())
        way = torch.stack(path)[:, best]
        fits[name] = GaussianFit(
            name, float(way[-1, 0]), float(way[-1, 1]), float(values[best]), q[best].exp() / width, way
        )
    return ModeSeekingResult(x, teacher.exp() / width, fits)


def _normal_log_density(x: Tensor, mean: Tensor | float, deviation: Tensor | float) -> Tensor:
    """Return the log-density up to a constant of `deviation`."""
    return -0.5 * ((x - mean) / deviation) ** 2
