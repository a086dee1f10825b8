"""Measures of perfect, collapsed and memorised samples; pictures of samples; models in folders."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from whorl.errors import DataError
from whorl.generative.data import Data, DataInfo, open_data
from whorl.generative.densities import GaussianMixture
from whorl.generative.measures import SampleMeasure, draw_measured, likelihoods, measure
from whorl.generative.methods.method import DrawOptions, GenerativeMethod
from whorl.generative.pictures import SIDE, draw_rows, encode_png, grid
from whorl.objectives.next_token import Loss
from whorl.tracking.seeds import generator
from whorl.train.learner.update import MicroBatch


class Given(GenerativeMethod):
    """A "model" whose samples and densities are given."""

    likelihood = "exact"

    def __init__(self, data: Data, rows: Tensor, log_q: float = 0.0) -> None:
        self.info, self.rows, self.log_q = data.info, rows, log_q

    def make_networks(self, rng: torch.Generator) -> torch.nn.Module:
        return torch.nn.Linear(1, 1)

    def draws(self, data: Tensor, labels: Tensor | None, rng: torch.Generator) -> dict[str, Tensor]:
        return {}

    def loss(self, networks: object, batch: MicroBatch) -> Loss:
        raise NotImplementedError

    def from_noise(
        self, networks: object, noise: Tensor, rng: torch.Generator, options: DrawOptions
    ) -> Tensor:
        return self.rows[: len(noise)]

    def check_options(self, options: DrawOptions) -> None:
        pass

    def log_likelihood(self, networks: object, x: Tensor) -> Tensor:
        return torch.full((len(x),), self.log_q, dtype=torch.float64)


@pytest.fixture(scope="module")
def density() -> Data:
    data = open_data("8-gaussians")
    return Data(data.info, data.train[:2000], data.test[:400], density=data.density)


def found(data: Data, rows: Tensor) -> dict[str, SampleMeasure]:
    drawn = draw_measured(Given(data, rows), torch.nn.Linear(1, 1), data, DrawOptions(), 0)
    return {m.name: m for m in measure(drawn, data)}


def test_perfect_samples_reach_the_floor(density: Data) -> None:
    assert density.density is not None
    of = found(density, density.density.sample(2000, generator(7)))
    for name in ("sliced Wasserstein", "Wasserstein", "Sinkhorn", "MMD", "Frechet", "nearest"):
        m = of[name]
        assert m.interval and m.floor is not None and m.floor_interval
        assert m.interval[0] <= m.floor_interval[1] and m.floor_interval[0] <= m.interval[1], m
    assert of["modes held"].value == of["modes held"].floor == 8
    assert of["off the modes"].value < 0.01


def test_lost_modes_and_repeated_rows_are_found(density: Data) -> None:
    assert isinstance(density.density, GaussianMixture)
    half = GaussianMixture(density.density.means[:4], density.density.std).sample(2000, generator(7))
    of = found(density, half)
    assert of["modes held"].value == 4
    for name in ("sliced Wasserstein", "Wasserstein", "Sinkhorn", "MMD", "Frechet"):
        m = of[name]
        assert m.interval and m.floor_interval and m.interval[0] > m.floor_interval[1], m
    repeated = found(density, density.train)["nearest"]
    assert repeated.value < 1e-3 < (repeated.floor or 0)  # rounding
    assert found(density, torch.zeros(2000, 2))["off the modes"].value == 1


def test_likelihood_is_compared_with_the_truth(density: Data) -> None:
    network, log_q = torch.nn.Linear(1, 1), -2.0
    kl, bits = likelihoods(Given(density, density.train, log_q), network, density)
    assert density.density is not None
    truth = float(density.density.log_prob(density.test).mean())
    assert kl.value == pytest.approx(truth - log_q, abs=1e-5) and kl.floor == 0
    assert bits.value == pytest.approx(2 / (2 * math.log(2))) and bits.floor == pytest.approx(
        -truth / (2 * math.log(2)), rel=1e-5
    )


def test_uniform_pixels_cost_eight_bits() -> None:
    info = DataInfo(name="noise", shape=(1, 4, 4), fingerprint="")
    rows = torch.zeros(8, 1, 4, 4)
    data = Data(info, rows, rows)
    log_uniform = -16 * math.log(256 / 127.5)
    (bits,) = likelihoods(Given(data, rows, log_uniform), torch.nn.Linear(1, 1), data, rows=8)
    assert bits.value == pytest.approx(8) and bits.note == "upper bound"
    assert not [*likelihoods(Given(data, rows), torch.nn.Linear(1, 1), data)]


def test_impossible_measures_are_refused(density: Data) -> None:
    nan = density.train.clone()
    nan[3] = math.nan
    with pytest.raises(DataError, match="not finite"):
        found(density, nan)
    few = Data(density.info, density.train[:3], density.test)
    with pytest.raises(DataError, match="3 rows and 400 held-out ones"):
        found(few, density.train)


def test_samples_become_pictures(density: Data) -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 1), dtype=np.uint8)
    drawn = grid(pixels, columns=3)
    assert drawn.shape == (2 * 34, 3 * 34, 3)
    assert (drawn[:32:4, :32:4] == pixels[0]).all() and (drawn[34:66:4, 34:66:4] == pixels[4]).all()
    assert (np.asarray(image.open(io.BytesIO(encode_png(drawn)))) == drawn).all()
    at = torch.tensor([[density.info.limit * 0.9, density.info.limit * 0.9]])
    plane = draw_rows(at, density.info)
    dark = np.argwhere(plane[..., 0] < 100)
    assert plane.shape == (SIDE, SIDE, 3) and dark[:, 0].max() < SIDE / 8 and dark[:, 1].min() > 7 * SIDE / 8
