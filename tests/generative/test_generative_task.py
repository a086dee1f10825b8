"""Training of generative models: draws as data, resume, learning of a known density, bad input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.images import write_half_dark

from whorl.errors import ConfigError, DataError
from whorl.generative.data import Data, open_data, to_pixels, to_rows
from whorl.generative.densities import DENSITIES, make_density
from whorl.generative.measures import DISTANCES
from whorl.generative.methods.method import DrawOptions
from whorl.generative.methods.registration import METHODS, parse_config
from whorl.generative.task import GenerativeTask
from whorl.objectives.catalog import CATALOG
from whorl.train.rows import train_rows
from whorl.vision.image_set import ImageSplit, write_image_set

SMALL: dict[str, Any] = {"steps": 12, "batch_size": 12, "width": 16, "depth": 1, "n_heads": 2, "patch": 4}
SMALL |= {"run": {"checkpoint_seconds": 1e-9}}


def task_of(data: Data, method: str = "ddpm", **settings: Any) -> GenerativeTask:
    return GenerativeTask(data, parse_config(method, {**SMALL, **settings}))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Data:
    folder = tmp_path_factory.mktemp("pictures")
    write_half_dark(folder)
    return open_data("half-dark", folder)


@pytest.mark.parametrize("method", METHODS)
def test_draws_follow_from_seed_and_step(method: str, pictures: Data) -> None:
    task, again = task_of(pictures, method), task_of(pictures, method)
    whole = task.batch(5)
    again.batch(4)
    assert whole.keys() >= {"data"} and ("labels" in whole) == task.method.has_classes
    assert all(torch.equal(t, again.batch(5)[name]) for name, t in whole.items())
    other, elsewhere = task.batch(6), task_of(pictures, method, seed=1).batch(5)
    assert not any(torch.equal(t, whole[name]) for found in (other, elsewhere) for name, t in found.items())


@pytest.mark.parametrize("settings", [{}, {"coupling": "optimal"}])
def test_ranks_split_the_draws_of_one_batch(settings: dict[str, Any], pictures: Data) -> None:
    """Rows, noise, times and labels of two ranks are those of one, also where noise is paired over the batch."""
    whole = task_of(pictures, "flow", **settings).batch(3)
    for rank in (0, 1):
        task = task_of(pictures, "flow", **settings)
        task.rank, task.replicas = rank, 2
        assert all(torch.equal(t, whole[name][rank::2]) for name, t in task.batch(3).items())


def test_labels_are_dropped_at_the_given_rate(pictures: Data) -> None:
    task = task_of(pictures, label_dropout=0.25, batch_size=24)
    labels = torch.cat([task.batch(step)["labels"] for step in range(100)])
    assert 0.2 < float((labels == 3).double().mean()) < 0.3 and set(labels.tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("method", METHODS)
def test_resumed_run_has_the_same_bits(method: str, pictures: Data, tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(step: int, metrics: dict[str, float]) -> None:
        if step == 5:
            raise Stop

    kinds = {"score": {"network": "unet", "depth": 2}, "ddpm": {"guidance": "classifier"}}
    settings: dict[str, Any] = kinds.get(method, {})
    whole, parts = task_of(pictures, method, **settings), task_of(pictures, method, **settings)
    initial = {n: p.detach().clone() for n, p in whole.networks.named_parameters()}
    train_rows(whole)
    with pytest.raises(Stop):
        train_rows(parts, checkpoint_dir=tmp_path, callback=stop)
    messages = list[str]()
    parts = task_of(pictures, method, **settings)
    train_rows(parts, checkpoint_dir=tmp_path, log=messages.append)
    assert any("continues at step" in text for text in messages)
    found = dict(parts.networks.named_parameters())
    assert all(torch.equal(p, found[n]) for n, p in whole.networks.named_parameters())
    assert [n for n, p in found.items() if torch.equal(p, initial[n])] == []  # every parameter is trained


@pytest.mark.parametrize(
    ("method", "settings", "most"),
    [("ddpm", {}, 0.4), ("flow", {}, 0.3), ("score", {"steps": 2200}, 0.7)],
)
def test_samples_and_likelihood_approach_the_density(
    method: str, settings: dict[str, Any], most: float
) -> None:
    data = open_data("8-gaussians")
    sizes = {"steps": 1500, "batch_size": 128, "width": 128, "depth": 2, "lr": 3e-3}
    task = task_of(data, method, **{**sizes, **settings})
    rng = torch.Generator().manual_seed(0)
    before = task.held_out_loss()
    train_rows(task)
    assert task.held_out_loss() < before
    assert data.density is not None
    x = task.method.sample(task.networks, 1000, rng, DrawOptions(steps=40))
    near = data.density.log_prob(x) > -5  # the densities between the modes lie far below
    angles = torch.atan2(x[near, 1], x[near, 0]) / (2 * torch.pi) * 8
    counts = (angles.round().long() % 8).bincount(minlength=8)
    assert float(near.double().mean()) > 0.8 and counts.min() > 70, counts
    rows = data.test[:100]
    divergence = data.density.log_prob(rows) - task.method.log_likelihood(task.networks, rows)
    assert -0.05 < float(divergence.mean()) < most  # nats; 4,000 steps of flow reach 0.04


@pytest.mark.parametrize("name", DENSITIES)
def test_densities_integrate_to_one_and_fit_their_samples(name: str) -> None:
    density = make_density(name)
    side = torch.arange(-2.5, 2.5, 0.02, dtype=torch.float64) + 0.01
    grid = torch.cartesian_prod(side, side)
    p = density.log_prob(grid).exp()
    assert float(p.sum()) * 0.02**2 == pytest.approx(1, abs=1e-3)
    entropy = -float(torch.special.xlogy(p, p).sum()) * 0.02**2
    samples = density.sample(20_000, torch.Generator().manual_seed(0))
    assert float(-density.log_prob(samples).mean()) == pytest.approx(entropy, abs=0.03)


def test_pixels_survive_the_round_trip(pictures: Data) -> None:
    assert pictures.images is not None
    pixels = pictures.images.split("test").images
    assert (to_pixels(to_rows(pixels)) == pixels).all()
    assert float(pictures.train.min()) >= -1 and float(pictures.train.max()) <= 1


def test_bad_input_is_refused(pictures: Data, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="48 rows to train on, and a batch has 64"):
        task_of(pictures, batch_size=64)
    with pytest.raises(ConfigError, match="no density has the name '8-gausians'"):
        open_data("8-gausians")
    with pytest.raises(ConfigError, match="ddpm: widht is no setting"):
        parse_config("ddpm", {"widht": 3})
    with pytest.raises(ConfigError, match="unknown method 'dppm'"):
        parse_config("dppm", {})
    with pytest.raises(ConfigError, match="8-gaussians has no pictures with classes"):
        task_of(open_data("8-gaussians"), guidance="classifier")
    with pytest.raises(ConfigError, match="label_dropout has no effect with guidance=classifier"):
        parse_config("flow", {"guidance": "classifier", "label_dropout": 0.2})
    task, rng = task_of(pictures), torch.Generator()
    with pytest.raises(ConfigError, match="no class 3"):
        task.method.sample(
            task.networks, 1, rng, DrawOptions(steps=1, sampler="ddim", labels=torch.tensor([3]))
        )
    with pytest.raises(ConfigError, match="without a label"):
        task.method.sample(task.networks, 1, rng, DrawOptions(steps=1, guidance=2.0))
    assert pictures.images is not None
    shape = pictures.images.info.preprocessing.shape
    flat = {name: ImageSplit(pictures.images.split(name).images * 0) for name in ("train", "test")}
    write_image_set(tmp_path, flat, (), shape)
    with pytest.raises(DataError, match="all pixels of"):
        open_data("flat", tmp_path)


def test_bad_options_are_refused(pictures: Data) -> None:
    task, plane = task_of(pictures), task_of(open_data("ring"), "flow")
    with pytest.raises(ConfigError, match=r"(?s)3 labels for 5 samples.*a label per sample"):
        task.method.sample(task.networks, 5, torch.Generator(), DrawOptions(labels=torch.tensor([0, 1, 2])))
    with pytest.raises(ConfigError, match=r"(?s)this model of flow has none.*do: leave out guidance"):
        plane.method.check_options(DrawOptions(guidance=2.0))
    gan = task_of(pictures, "gan")
    with pytest.raises(ConfigError, match="gan has no likelihood") as raised:
        gan.method.log_likelihood(gan.networks, pictures.test)
    assert all(name in str(raised.value) for name in DISTANCES)


def test_every_method_is_in_the_catalog() -> None:
    assert METHODS.keys() <= CATALOG.keys()
