"""Fit the surface E + A / N^alpha + B / D^beta to losses, for many starts and bootstrap samples at once.

The objective is that of Hoffmann et al. 2022 (arXiv:2203.15556, eq. 3): the Huber loss of log predicted - log measured, with
delta = 1e-3. With theta = (ln E, ln A, alpha, ln B, beta), ln predicted is logsumexp(ln A - alpha ln N, ln B - beta ln D,
ln E), whose gradient is a softmax. Damped Gauss-Newton steps with the weights min(1, delta / |residual|) minimise it for all
rows of a batch; a weight of a quadratic bounds Huber's loss from above, so an accepted step never raises it.

Starts: for each pair of exponents of a grid, E, A and B are the solution of a linear least-squares problem of relative
errors. The best few start the iterations.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from whorl.plan.laws.points import Points

DELTA = 1e-3  # of Huber's loss; Besiroglu et al. 2024 (arXiv:2404.10102) fit with the same
EXPONENTS = np.linspace(0.05, 1.2, 16)
STARTS, STEPS = 8, 400
TOLERANCE, SAMPLE_TOLERANCE = 1e-13, 1e-6  # of the objective, relative, at the end; of bootstrap samples
LEAST_EXPONENT = 0.01  # of alpha and beta: with noise, a sample of few runs may fall with less size or data
FLOOR = 1e-6  # of E, A / N^alpha and B / D^beta in a start, relative to the lowest loss


def fit_surface(points: Points, weights: Any = None, start: Any = None, prior: Any = None) -> Any:
    """Return E, A, alpha, B, beta of the runs; of each row of `weights` [m, n] an own fit, [m, 5].

    Args:
        weights: how often each run counts; default: once. start: constants to start from; default: a grid of exponents.
        prior: mean and deviation of alpha and beta, [2, 2]; one deviation costs as much as a residual of DELTA.
    """
    x, y = np.log(np.stack([points.parameters, points.data])), np.log(points.loss)
    centre = x.mean(1)
    x, rows = (
        x - centre[:, None],
        np.ones((1, len(points))) if weights is None else np.asarray(weights, float),
    )
    starts = _starts(x, points.loss) if start is None else _logs(start, centre)[None]
    repeated = np.repeat(rows, len(starts), axis=0)
    tolerance = TOLERANCE if weights is None else SAMPLE_TOLERANCE
    theta, values = _minimise(np.tile(starts, (len(rows), 1)), x, y, repeated, prior, tolerance)
    best = values.reshape(len(rows), -1).argmin(1)
    e, a, alpha, b, beta = theta.reshape(len(rows), -1, 5)[np.arange(len(rows)), best].T
    found = [np.exp(e), np.exp(a + alpha * centre[0]), alpha, np.exp(b + beta * centre[1]), beta]
    return np.stack(found, 1) if weights is not None else np.concatenate(found)


def _logs(constants: Any, centre: Any) -> Any:
    e, a, alpha, b, beta = constants
    return np.array([np.log(e), np.log(a) - alpha * centre[0], alpha, np.log(b) - beta * centre[1], beta])


def _objective(theta: Any, x: Any, y: Any, weights: Any, prior: Any) -> tuple[Any, Any, Any]:
    """Return the objective [m], residuals [m, n], and the shares of A, B and E in the loss [m, n, 3]."""
    e, a, alpha, b, beta = (theta[:, i, None] for i in range(5))
    terms = np.stack(np.broadcast_arrays(a - alpha * x[0], b - beta * x[1], e), axis=-1)
    top = terms.max(-1, keepdims=True)
    shares = np.exp(terms - top)
    total = shares.sum(-1, keepdims=True)
    residual = (top + np.log(total))[..., 0] - y
    size = abs(residual)
    huber = np.where(size <= DELTA, 0.5 * size**2, DELTA * (size - 0.5 * DELTA))
    value = (weights * huber).sum(1)
    if prior is not None:
        value = value + 0.5 * DELTA**2 * (((theta[:, 2::2] - prior[0]) / prior[1]) ** 2).sum(1)
    return value, residual, shares / total


def _minimise(theta: Any, x: Any, y: Any, weights: Any, prior: Any, tolerance: float) -> tuple[Any, Any]:
    """Return theta [m, 5] at a minimum, and the objective [m]."""
    value, residual, shares = _objective(theta, x, y, weights, prior)
    damping, active, own = np.full(len(theta), 1e-3), np.arange(len(theta)), np.arange(5)
    for _ in range(STEPS):
        p, r, w = shares[active], residual[active], weights[active]
        jacobian = np.stack([p[..., 2], p[..., 0], -p[..., 0] * x[0], p[..., 1], -p[..., 1] * x[1]], -1)
        u = w * np.minimum(1.0, DELTA / np.maximum(abs(r), 1e-300))
        hessian = np.einsum("mni,mn,mnj->mij", jacobian, u, jacobian, optimize=True)
        gradient = np.einsum("mni,mn->mi", jacobian, u * r)
        if prior is not None:
            strength = (DELTA / prior[1]) ** 2
            hessian[:, own[2::2], own[2::2]] += strength
            gradient[:, 2::2] += strength * (theta[active, 2::2] - prior[0])
        scale = hessian[:, own, own]
        hessian[:, own, own] += damping[active, None] * scale + 1e-12 * scale.max(1)[:, None] + 1e-300
        new = theta[active] - np.clip(np.linalg.solve(hessian, gradient[..., None])[..., 0], -2.0, 2.0)
        new[:, 2::2] = np.maximum(new[:, 2::2], LEAST_EXPONENT)
        found = _objective(new, x, y, w, prior)
        gain = value[active] - found[0]
        better = gain > 0
        taken = active[better]
        theta[taken], value[taken], residual[taken], shares[taken] = (
            each[better] for each in (new, *found)
        )  # fmt: skip
        damping[active] *= np.where(better, 0.2, 5.0)
        done = np.where(better, gain <= tolerance * (value[active] + 1e-28), damping[active] > 1e8)
        active = active[~done]
        if not len(active):
            break
    return theta, value


def _starts(x: Any, loss: Any) -> Any:
    """Return the best starts [STARTS, 5]: of each pair of exponents the least squares of relative errors."""
    alpha, beta = (grid.ravel() for grid in np.meshgrid(EXPONENTS, EXPONENTS))
    one = np.ones((len(alpha), x.shape[1]))
    scaled = (
        np.stack([np.exp(-alpha[:, None] * x[0]), np.exp(-beta[:, None] * x[1]), one], -1) / loss[:, None]
    )
    normal = np.einsum("mni,mnj->mij", scaled, scaled) + 1e-12 * np.eye(3)
    solved = np.linalg.solve(normal, scaled.sum(1)[..., None])[..., 0]
    a, b, e = np.log(np.maximum(solved, FLOOR * loss.min())).T
    theta = np.stack([e, a, alpha, b, beta], 1)
    value = _objective(theta, x, np.log(loss), one, None)[0]
    return theta[np.argsort(value)[:STARTS]]
