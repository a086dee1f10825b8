"""Which divergence does what, on a picture small enough to see: two hills, and one hill to fit them with.

    p(x) = w N(x; -a, s^2) + (1 - w) N(x; a, s^2)          the teacher, of two minds
    q(x) = N(x; mean, deviation^2)                         the student, which has room for one

    forward    KL(p || q)     q must be somewhere wherever p is: it lies across both hills, its mean between them, where p
                              itself has next to nothing. Its optimum has p's mean and variance (moment matching)
    reverse    KL(q || p)     q must be nowhere where p is not: it sits on one hill and says nothing of the other
    jensen                    in between, by beta: towards 0 as the forward one, towards 1 as the reverse

(Bishop 2006, "Pattern Recognition and Machine Learning", section 10.1.2; for students of language, arXiv:2306.13649, section
2.) A student that is too small for its teacher has to choose, and samples from the valley are words that nobody would say.

Densities stand on a grid [K], where they are distributions over K outcomes, so that the objective is the very function that
language models are trained with (`objectives/distil.py`). The student's two numbers are fitted by Adam.

The subtle part is that the reverse divergence has an optimum on each hill and a poor one between, and where a fit ends is
decided by where it began. So every student begins on the left, in the middle and on the right, all at once, and the best
of the three counts.
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
    """One student. density: [K] on `Modes.x`; value: of its divergence, nats; path: [steps, 2], mean and deviation."""

    name: str
    mean: float
    std: float
    value: float
    density: Tensor
    path: Tensor


@dataclass(frozen=True)
class ModeSeekingResult:
    """x: [K]; density: [K] of the teacher; fits: by name."""

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
    """The teacher and what each divergence makes of it.

    Args:
        apart: a above; spread: s; weight: w, of the hill on the left.
        betas: of the Jensen-Shannon divergences, each a student.
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
        optimiser = torch.optim.Adam([mean, log_deviation], lr=rate)
        path = []
        for step in range(steps):
            for group in optimiser.param_groups:
                group["lr"] = rate * (1 - step / steps)
            loss = divergence(
                teacher, _normal_log_density(x, mean, log_deviation.exp()).log_softmax(-1), kind, beta
            )
            optimiser.zero_grad()
            loss.sum().backward()  # type: ignore[no-untyped-call]
            optimiser.step()
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
    """Up to a constant that all of one deviation share."""
    return -0.5 * ((x - mean) / deviation) ** 2
