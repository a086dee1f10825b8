"""From runs to a law: three approaches, Kaplan's form, bootstrap intervals and a backtest.

1. Envelope: the runs that no mixture of cheaper and dearer runs beats (the lower hull of ln loss over ln FLOPs); a line
   through their sizes gives a of N_opt ~ FLOPs^a.
2. IsoFLOP: a parabola of the loss in ln N for runs of equal FLOPs; its lowest point is N_opt.
3. Surface: E + A / N^alpha + B / D^beta (`surface.py`). This is the law. (Hoffmann et al. 2022, arXiv:2203.15556, section 3)

Kaplan et al. 2020 (arXiv:2001.08361, eq. 1.5): loss = ((Nc / N)^(aN / aD) + Dc / D)^aD, without an irreducible loss.
Their a, 0.73, is larger than Chinchilla's 0.5 mostly because they counted weights and FLOPs without embeddings, at small
sizes (Pearce and Song 2024, arXiv:2406.12907): `exponent_by_kaplans_count` counts a law's own optima that way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from whorl.errors import DataError
from whorl.plan.laws.law import ScalingLaw, ends
from whorl.plan.laws.points import NEAR, Points, check_points, groups
from whorl.plan.laws.surface import fit_surface

SAMPLES = 200  # of the bootstrap
OUTLIER = 12.0  # robust standard deviations from the surface, beyond which a run is shown and not fitted
MIN_OUTLIER_RUNS = (
    20  # among fewer there is no outlier: of 9 with 2 % of noise, five constants fit 5 nearly exactly
)
BACKTEST = (
    8.0,
    4.0,
    2.0,
)  # the dearest run over the dearest fitted one: the first whose cheap runs determine a law
MIN_ISOFLOP = 3  # sizes of a parabola
KAPLANS_SIZES = (768.0, 1.5e9)  # of their models, without embeddings
EMBEDDING_COEF = 32_000 * (39 / 12) ** (
    1 / 3
)  # weights of 32,000 embeddings over N^(1/3), at a width of 39 per layer

PLAIN = ScalingLaw(0.0, 1.0, 1.0, 1.0, 1.0)  # names and units of a law of a file


class Parabola(NamedTuple):
    """Runs of equal FLOPs, by size: loss = a x^2 + b x + c in x = ln N. best: the size at its lowest point."""

    flops: float
    members: Any
    coefs: Any
    best: float


class Backtest(NamedTuple):
    """The law of the `fitted` runs up to `limit` FLOPs on those beyond, predicted / measured - 1; also by Kaplan's form."""

    limit: float
    fitted: int
    errors: list[float]
    kaplan_errors: list[float]


@dataclass(frozen=True)
class LawFit:
    """A law with its evidence.

    used: mask [n] of the fitted runs; the others diverged, or are outliers. residuals: measured / predicted - 1, [n].
    envelope: indices of runs. exponents: approach -> a of N_opt ~ FLOPs^a. spread: standard deviation of residuals.
    """

    law: ScalingLaw
    points: Points
    used: Any
    residuals: Any
    envelope: list[int]
    parabolas: list[Parabola]
    exponents: Mapping[str, float]
    spread: Mapping[str, float]
    backtest: Backtest | None


def fit_law(
    points: Points, law: ScalingLaw | None = None, *, seed: int = 0, samples: int = SAMPLES, prior: Any = None
) -> LawFit:
    """Fit a law to runs.

    Args:
        law: names, units, FLOPs and vocabulary term of the result; the runs' losses lack that term. Default: 6 N D, no term.
        seed: of the bootstrap. prior: of `fit_surface`.

    Raises:
        DataError: the runs do not determine a law.
    """
    named, used, kept = law or PLAIN, None, points.finite
    while used is None or (kept != used).any():
        used = kept
        check_points(points.where(used))
        constants = fit_surface(points.where(used), prior=prior)
        law = _with(named, constants)
        logs = np.log(points.loss / law.loss(points.parameters, points.data))
        allowed = max(OUTLIER * 1.4826 * float(np.median(abs(logs[used]))), 1e-6)
        if used.sum() < MIN_OUTLIER_RUNS:
            break
        kept = used & (np.nan_to_num(abs(logs), nan=np.inf) <= allowed)
    assert law is not None
    runs = points.where(used)
    # Samples of as many runs overstate the variance of five constants by about n / (n - 5).
    size = len(runs) ** 2 // (len(runs) - 5)
    draws = np.random.default_rng(seed).multinomial(size, np.full(len(runs), 1 / len(runs)), samples)
    drawn = fit_surface(runs, draws, start=constants, prior=prior)
    law = replace(law, parameters=ends(runs.parameters), data=ends(runs.data), flops=ends(runs.flops))
    law = replace(law, samples=tuple(_with(law, row).constants for row in drawn))
    hull, parabolas, kaplan = envelope(points, used), isoflop(points, used), fit_kaplan(runs)
    exponents = {
        "envelope": _slope(points.flops[hull], points.parameters[hull]),
        "IsoFLOP": _slope(*(np.array([getattr(p, name) for p in parabolas]) for name in ("flops", "best"))),
        "surface": law.exponent,
        "Kaplan's form": 1 / (float(kaplan[0]) + law.flops_exponent),
        "surface, by Kaplan's count": exponent_by_kaplans_count(law)
        if law.size_name == PLAIN.size_name
        else None,
    }
    kaplan_logs = np.log(runs.loss / kaplan_loss(kaplan, runs.parameters, runs.data))
    return LawFit(
        law, points, used, np.expm1(logs), hull, parabolas,
        {name: value for name, value in exponents.items() if value is not None},
        {"surface": float(logs[used].std()), "Kaplan's form": float(kaplan_logs.std())}, backtest(runs, prior),
    )  # fmt: skip


def envelope(points: Points, used: Any) -> list[int]:
    """Return the runs on the lower convex hull of ln loss over ln FLOPs, from the cheapest to the lowest loss."""
    x, y, hull = np.log(points.flops), np.log(points.loss), list[int]()
    for k in sorted(np.flatnonzero(used).tolist(), key=lambda k: (x[k], y[k])):
        if hull and y[k] >= y[hull[-1]]:
            continue
        while len(hull) > 1:
            i, j = hull[-2:]
            if (y[j] - y[i]) * (x[k] - x[i]) < (y[k] - y[i]) * (x[j] - x[i]):
                break
            hull.pop()
        hull.append(k)
    return hull


def isoflop(points: Points, used: Any) -> list[Parabola]:
    """Return a parabola for each group of runs of equal FLOPs that has a lowest point among its sizes."""
    found, indices = list[Parabola](), np.flatnonzero(used)
    for group in groups(points.flops[indices]):
        members = indices[group]
        members = members[np.argsort(points.parameters[members])]
        n = np.log(points.parameters[members])
        if len(groups(points.parameters[members])) >= MIN_ISOFLOP:
            coefs = np.polyfit(n, points.loss[members], 2)
            best = -coefs[1] / (2 * coefs[0])
            if coefs[0] > 0 and n[0] <= best <= n[-1]:
                flops = float(np.exp(np.log(points.flops[members]).mean()))
                found.append(Parabola(flops, members, coefs, float(np.exp(best))))
    return found


def fit_kaplan(points: Points) -> Any:
    """Return aN / aD, aD, ln Nc, ln Dc of Kaplan's form, by least squares of ln loss, from two equal terms."""
    from scipy.optimize import least_squares

    n, d, y = np.log(points.parameters), np.log(points.data), np.log(points.loss)
    term = float(y.mean()) / 0.1 - math.log(2)
    start = [math.log(0.75), math.log(0.1), n.mean() + term / 0.75, d.mean() + term]

    def residuals(x: Any) -> Any:
        return np.log(kaplan_loss([*np.exp(x[:2]), *x[2:]], points.parameters, points.data)) - y

    found = least_squares(residuals, start, x_scale="jac", max_nfev=400).x
    return np.array([*np.exp(found[:2]), *found[2:]])


def kaplan_loss(constants: Any, n: Any, d: Any) -> Any:
    """Return the loss by Kaplan's form."""
    ratio, power, log_n, log_d = constants
    return np.exp(power * np.logaddexp(ratio * (log_n - np.log(n)), log_d - np.log(d)))


def exponent_by_kaplans_count(law: ScalingLaw) -> float:
    """Return a of a law's optima, counted as Kaplan et al. did: N without embeddings, FLOPs 6 N D, models of their sizes.

    All weights are N + EMBEDDING_COEF N^(1/3) (Pearce and Song 2024, arXiv:2406.12907, section 3).
    """
    n = np.geomspace(*KAPLANS_SIZES, 60)
    _, a, alpha, b, beta = law.constants
    embedding = EMBEDDING_COEF * n ** (1 / 3)
    total, growth = n + embedding, (n + embedding / 3) / (n + embedding)  # d ln total / d ln N
    # At equal 6 N D the loss is lowest where alpha A / total^alpha growth = beta B / D^beta.
    data = (beta * b / (alpha * a * growth) * (total / law.size_unit) ** alpha) ** (1 / beta)
    return float(np.polyfit(np.log(n * data), np.log(n), 1)[0])


def backtest(points: Points, prior: Any = None) -> Backtest | None:
    """Return how well the cheap runs predict the dear ones; None if no limit leaves runs that determine a law."""
    for factor in BACKTEST:
        cheap = points.flops <= points.flops.max() / factor * NEAR**0.5
        fitted, dear = points.where(cheap), points.where(~cheap)
        with suppress(DataError):
            check_points(fitted)
            law, kaplan = _with(PLAIN, fit_surface(fitted, prior=prior)), fit_kaplan(fitted)
            found = law.loss(dear.parameters, dear.data), kaplan_loss(kaplan, dear.parameters, dear.data)
            errors, others = ((each / dear.loss - 1).tolist() for each in found)
            return Backtest(float(fitted.flops.max()), len(fitted), errors, others)
    return None


def _with(law: ScalingLaw, constants: Any) -> ScalingLaw:
    """Return the law with these constants, which are for N and D in ones."""
    e, a, alpha, b, beta = map(float, constants)
    a, b = a / law.size_unit**alpha, b / law.data_unit**beta
    law = replace(law, irreducible=e, size_coef=a, size_exponent=alpha, samples=())
    return replace(law, data_coef=b, data_exponent=beta)


def _slope(flops: Any, sizes: Any) -> float | None:
    return float(np.polyfit(np.log(flops), np.log(sizes), 1)[0]) if len(sizes) > 2 else None
