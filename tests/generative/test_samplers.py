"""Samplers and likelihood: closed formulas of single steps, exact scores of a mixture, the density's integral."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from whorl.errors import ConfigError, WhorlError
from whorl.generative import likelihood
from whorl.generative.data import DataInfo
from whorl.generative.densities import GaussianMixture
from whorl.generative.likelihood import log_likelihood
from whorl.generative.methods.registration import METHODS, parse_config
from whorl.generative.samplers import Estimate, ancestral_step, clamp_data, ddim_step, draw, heun_step
from whorl.objectives.generative.diffusion import CosineSchedule, GaussianPath, LinearBetas
from whorl.objectives.generative.flow import StraightPath
from whorl.objectives.generative.score import VarianceExploding

EXPLODING = VarianceExploding(0.01, 80.0)
PATHS: list[GaussianPath] = [LinearBetas(), CosineSchedule(), StraightPath(), EXPLODING]
MIXTURE = GaussianMixture(torch.tensor([[-1.0, 0.0], [1.0, 0.5]]), 0.3)


def exact(path: GaussianPath, mixture: GaussianMixture) -> Estimate:
    """The optimal estimates of a mixture, from the score of its noisy density."""

    def estimate(x: Tensor, t: float) -> tuple[Tensor, Tensor]:
        point = path.at(t, x)
        variance = point.a**2 * mixture.std**2 + point.s**2
        differences = point.a * mixture.means.to(x) - x[:, None]
        weights = (-differences.square().sum(-1) / (2 * variance)).softmax(1)
        return point.split("score", (weights[..., None] * differences).sum(1) / variance, x)

    return estimate


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_ancestral_step_is_the_posterior_of_ddpm() -> None:
    """Equations 6 and 7 of the paper, in its notation."""
    betas = torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)
    alphas, bars = 1 - betas, torch.cumprod(1 - betas, 0)
    x, data, z, n = normal(4, 2), normal(4, 2, seed=1), normal(4, 2, seed=2), 600  # step n + 1 of the paper
    mean = bars[n - 1].sqrt() * betas[n] / (1 - bars[n]) * data
    mean = mean + alphas[n].sqrt() * (1 - bars[n - 1]) / (1 - bars[n]) * x
    deviation = ((1 - bars[n - 1]) / (1 - bars[n]) * betas[n]).sqrt()
    found = ancestral_step(LinearBetas(), x, (n + 1) / 1000, n / 1000, data, z)
    torch.testing.assert_close(found, mean + deviation * z, atol=1e-9, rtol=1e-9)
    last = ancestral_step(LinearBetas(), x, 1 / 1000, 0.0, data, z)
    torch.testing.assert_close(last, data)


def test_ddim_and_heun_steps_are_the_published_ones() -> None:
    x, noise, path = normal(4, 2), normal(4, 2, seed=1), LinearBetas()
    here, there = path.at(0.7, x), path.at(0.5, x)
    data = (x - here.s * noise) / here.a
    by_paper = there.a * (x - here.s * noise) / here.a + there.s * noise
    torch.testing.assert_close(ddim_step(path, x, 0.5, data, noise), by_paper)
    straight, mixture = StraightPath(), exact(StraightPath(), MIXTURE)

    def velocity(y: Tensor, t: float) -> Tensor:
        first, second = mixture(y, t)
        return second - first

    euler = x - 0.2 * velocity(x, 0.7)
    torch.testing.assert_close(ddim_step(straight, x, 0.5, *mixture(x, 0.7)), euler)
    wanted = x - 0.1 * (velocity(x, 0.7) + velocity(euler, 0.5))
    torch.testing.assert_close(heun_step(straight, x, 0.7, 0.5, mixture), wanted)


@pytest.mark.parametrize("sampler", ["ancestral", "ddim", "heun"])
@pytest.mark.parametrize("path", PATHS)
def test_exact_scores_give_samples_of_the_mixture(path: GaussianPath, sampler: str) -> None:
    rng = torch.Generator().manual_seed(0)
    x = path.start_std * torch.randn(3000, 2, generator=rng)
    estimate = clamp_data(path, exact(path, MIXTURE), 3.0)
    if isinstance(path, StraightPath):  # eps gives no x_0 where a is 0: begin where it is defined
        path = type("Shorter", (StraightPath,), {"last": 0.999})()
    # The posterior of a single x_0 is narrower than that of a mixture; the deficit falls with the number of steps.
    steps = 50 if sampler == "heun" else 200
    states = list[tuple[float, Tensor]]()
    found = draw(path, estimate, x, steps, sampler, rng, lambda *state: states.append(state))  # type: ignore[arg-type]
    assert states[0] == (path.last, x) and states[-1] == (0.0, found) and len(states) == steps + 1
    right = found[:, 0] > 0
    assert abs(float(right.double().mean()) - 0.5) < 0.03
    centres = torch.stack([found[~right].mean(0), found[right].mean(0)])
    torch.testing.assert_close(centres, MIXTURE.means, atol=0.03, rtol=0)
    assert abs(float(found[right].std(0).mean()) - MIXTURE.std) < 0.03


@pytest.mark.parametrize("name", ["ddpm", "flow", "score"])
def test_guidance_by_an_exact_classifier_is_bayes_rule(name: str) -> None:
    """Classes are the components: guidance 1 gives the estimates of one component, 0 those of the mixture."""

    class Exact(METHODS[name]):  # type: ignore[misc]
        def predict(self, networks: Any, x: Tensor, time: Tensor, labels: Tensor | None) -> Tensor:
            found: Tensor = self.path.at(time, x).value(
                self.prediction, *exact(self.path, MIXTURE)(x, time[0])
            )
            return found

        def class_logits(self, networks: Any, x: Tensor, time: Tensor) -> Tensor:
            point = self.path.at(time, x)
            squares = (x[:, None] - point.a[:, None] * MIXTURE.means).square().sum(-1)
            logits: Tensor = -squares / (2 * (point.a**2 * MIXTURE.std**2 + point.s**2))
            return logits

    info = DataInfo(name="two", shape=(2,), classes=("left", "right"), fingerprint="two")
    method = Exact(parse_config(name, {"guidance": "classifier"}), info)
    x, label = 2 * normal(64, 2), torch.ones(64, dtype=torch.long)
    for t in (0.05, 0.3, 0.8):
        of_all, of_class = (
            exact(method.path, mixture)(x, t)
            for mixture in (MIXTURE, GaussianMixture(MIXTURE.means[1:], 0.3))
        )
        for guidance in (0.0, 1.0, 2.5):
            with torch.no_grad():
                found = method.estimate(None, label, guidance)(x, t)
            for one, a, b in zip(found, of_all, of_class, strict=True):
                torch.testing.assert_close(one, a + guidance * (b - a), atol=1e-9, rtol=1e-7)


def test_unknown_sampler_is_refused() -> None:
    rng = torch.Generator()
    with pytest.raises(ConfigError, match="no sampler is called 'dimm'"):
        draw(StraightPath(), exact(StraightPath(), MIXTURE), torch.zeros(1, 2), 2, "dimm", rng)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", [LinearBetas(), CosineSchedule(), EXPLODING])
def test_density_of_the_exact_score_integrates_to_one(path: GaussianPath) -> None:
    side = torch.linspace(-2.6, 2.6, 40, dtype=torch.float64)
    grid = torch.cartesian_prod(side, side)
    found = log_likelihood(path, exact(path, MIXTURE), grid)
    assert abs(float(found.exp().sum() * (side[1] - side[0]) ** 2) - 1) < 0.005
    inside = MIXTURE.log_prob(grid) > -5
    torch.testing.assert_close(found[inside], MIXTURE.log_prob(grid)[inside], atol=0.02, rtol=0)


def test_likelihood_refuses_a_pole(monkeypatch: pytest.MonkeyPatch) -> None:
    def pole(x: Tensor, t: float) -> tuple[Tensor, Tensor]:
        return x, x / (0.5 - t) ** 2

    with pytest.raises(WhorlError, match="misses its tolerance"):
        log_likelihood(StraightPath(), pole, normal(2, 2))
    with pytest.raises(WhorlError, match=r"(?s)not finite at t = 0\.001.*train longer"):  # a network of NaN
        log_likelihood(StraightPath(), lambda x, t: (x, x * math.nan), normal(2, 2))
    monkeypatch.setattr(likelihood, "EVALUATIONS", 30)
    with pytest.raises(WhorlError, match=r"30 evaluations end at t = 0\.\d"):
        log_likelihood(StraightPath(), pole, normal(2, 2))
