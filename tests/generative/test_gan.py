"""GANs: what each update moves, bounds on the critic, classes, what is learned, bad input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.optimize import linear_sum_assignment
from tests.support.images import write_half_dark

from whorl.errors import ConfigError
from whorl.generative.data import Data, open_data
from whorl.generative.methods.method import DrawOptions
from whorl.generative.methods.registration import parse_config
from whorl.generative.task import GenerativeTask
from whorl.models.critic import Critic, largest_singular_value
from whorl.train.learner.learner import Learner
from whorl.train.rows import train_rows

SMALL: dict[str, Any] = {"steps": 4, "batch_size": 16, "width": 16, "depth": 2, "train": {}}


def task_of(data: Data, **settings: Any) -> GenerativeTask:
    return GenerativeTask(data, parse_config("gan", {**SMALL, **settings}))


@pytest.fixture(scope="module")
def plane() -> Data:
    return open_data("8-gaussians")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Data:
    folder: Path = tmp_path_factory.mktemp("pictures")
    write_half_dark(folder)
    return open_data("half-dark", folder)


def test_each_update_moves_its_own_network(plane: Data) -> None:
    task = task_of(plane)
    learner = Learner(task.networks, task.updates())
    batch = task.batch(0)
    for update, moved in zip(learner.updates, ("critic.", "generator."), strict=True):
        before = {n: p.detach().clone() for n, p in task.networks.named_parameters()}
        update.accumulate(update.objective(batch))
        update.step(1.0)
        changed = {n for n, p in task.networks.named_parameters() if not torch.equal(p, before[n])}
        assert changed and all(n.startswith(moved) for n in changed)
    assert [update.every for update in learner.updates] == [1, 2]


def test_clipping_bounds_the_weights_of_the_critic_alone(plane: Data) -> None:
    task = task_of(plane, lipschitz="clip", clip=0.02)
    train_rows(task)
    largest = {n: float(p.detach().abs().max()) for n, p in task.networks.named_parameters()}
    assert max(v for n, v in largest.items() if n.startswith("critic.")) <= 0.02 + 1e-6
    assert max(v for n, v in largest.items() if n.startswith("generator.")) > 0.1
    assert task.method.diagnose(task.networks, plane).keys() == {"critic_accuracy"}


@pytest.mark.parametrize("shape", [(7, 5), (5, 7), (6, 6)])
def test_spectral_norm_and_its_gradient(shape: tuple[int, int]) -> None:
    w = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    u, s, v = torch.linalg.svd(w.detach())
    found = largest_singular_value(w)
    assert float(found) == pytest.approx(float(s[0]), rel=1e-6)
    (gradient,) = torch.autograd.grad(found, w)
    torch.testing.assert_close(gradient, torch.outer(u[:, 0], v[0]), atol=1e-4, rtol=1e-4)


def test_spectral_critic_has_lipschitz_constant_one() -> None:
    rng = torch.Generator().manual_seed(0)
    critic = Critic((2,), 32, 3, spectral=True, generator=rng)
    with torch.no_grad():
        for p in critic.parameters():
            p.mul_(50)
        x = torch.randn(300, 2, generator=rng)
        y = x + 0.01 * torch.randn(300, 2, generator=rng)
        slopes = (critic(x) - critic(y)).abs() / (x - y).norm(dim=1)
    assert 0.01 < float(slopes.max()) <= 1.001


@pytest.mark.parametrize("settings", [{"loss": "hinge", "lipschitz": "spectral"}, {"network": "unet"}])
def test_pictures_have_classes(settings: dict[str, Any], pictures: Data) -> None:
    task = task_of(pictures, n_heads=2, **settings)
    train_rows(task)
    rng = torch.Generator().manual_seed(0)
    one, two = (
        task.method.sample(task.networks, 4, rng.manual_seed(0), DrawOptions(labels=torch.full((4,), label)))
        for label in (0, 1)
    )
    assert one.shape == (4, 3, 8, 8) and not torch.equal(one, two)
    assert task.method.sample(task.networks, 5, rng, DrawOptions()).shape == (5, 3, 8, 8)
    found = task.method.diagnose(task.networks, pictures)
    assert 0 <= found["critic_accuracy"] <= 1 and ("wasserstein" in found) == ("loss" not in settings)
    x, labels = pictures.test[:2], torch.tensor([0, 1])
    assert not torch.equal(task.networks.critic(x, labels), task.networks.critic(x, labels.flip(0)))


def test_generator_approaches_the_density(plane: Data) -> None:
    task = task_of(plane, steps=1000, batch_size=128, width=64, train={"ema": 0.999})
    train_rows(task)
    x = task.method.sample(task.networks, 500, torch.Generator().manual_seed(0), DrawOptions())
    cost = torch.cdist(x, plane.test[:500])
    assert float(cost[linear_sum_assignment(cost.numpy())].mean()) < 0.4  # two sets of data: 0.15
    angles = torch.atan2(x[:, 1], x[:, 0]) / (2 * torch.pi) * 8
    counts = (angles.round().long() % 8).bincount(minlength=8)
    assert counts.min() > 15, counts


def test_bad_settings_are_refused(plane: Data) -> None:
    with pytest.raises(ConfigError, match="needs lipschitz=clip, penalty or spectral"):
        parse_config("gan", {"lipschitz": "none"})
    task = task_of(plane)
    with pytest.raises(ConfigError, match="gan has no likelihood"):
        task.method.log_likelihood(task.networks, plane.test[:2])
    with pytest.raises(ConfigError, match="draws in one pass"):
        task.method.sample(task.networks, 1, torch.Generator(), DrawOptions(steps=3))
