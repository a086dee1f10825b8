"""pix2pix: conditions by hand, patches of the critic, hidden halves of shapes, bad input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from whorl.data.images import ImageShape
from whorl.data.quarantine import Quarantine
from whorl.errors import ConfigError
from whorl.generative.data import Data, DataInfo, open_data
from whorl.generative.methods.method import DrawOptions
from whorl.generative.methods.pix2pix import Pix2Pix, Pix2PixConfig
from whorl.generative.methods.registration import METHODS, parse_config
from whorl.generative.task import GenerativeTask
from whorl.models.critic import Critic
from whorl.train.rows import train_rows
from whorl.vision.config import ImagesConfig
from whorl.vision.image_set import write_image_set
from whorl.vision.sources import make_splits

SMALL: dict[str, Any] = {"width": 16, "depth": 2, "batch_size": 16, "n_heads": 2}


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Data:
    folder: Path = tmp_path_factory.mktemp("shapes")
    config = ImagesConfig(source="shapes", train_scenes=800, test_scenes=100)
    write_image_set(folder, *make_splits(config, Quarantine()), ImageShape(size=16, channels=1))
    return open_data("shapes", folder)


def method_of(condition: str, size: int = 8) -> Pix2Pix:
    config = Pix2PixConfig.model_validate({"condition": condition, **SMALL})
    return Pix2Pix(config, DataInfo(name="x", shape=(3, size, size), fingerprint="x"))


def test_conditions_have_the_left_half_means_or_edges() -> None:
    x = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    half = method_of("half").condition(x)
    assert torch.equal(half[..., :4], x[..., :4]) and not half[..., 4:].any()
    coarse = method_of("coarse").condition(x)
    torch.testing.assert_close(coarse[1, 2, 4:, :4], x[1, 2, 4:, :4].mean().expand(4, 4))
    step = torch.full((1, 3, 8, 8), -0.5)
    step[..., 3:] = 0.25
    edges = method_of("edges").condition(step)
    assert torch.equal(edges[..., 2], torch.full((1, 3, 8), -0.25)) and (edges.sum(-1) == -7.25).all()


def test_critic_of_patches_sees_one_patch_at_each_place() -> None:
    critic = Critic((2, 16, 16), 8, 3, patches=True, generator=torch.Generator().manual_seed(0))
    x = torch.randn(2, 2, 16, 16, generator=torch.Generator().manual_seed(1))
    changed = x.clone()
    changed[:, :, 15, 15] += 1
    moved = (critic(x) != critic(changed)).view(2, 4, 4)
    assert moved[:, 3, 3].all() and not moved[:, :2].any() and not moved[:, :, :2].any()


def test_critic_compares_a_picture_with_its_condition(shapes: Data) -> None:
    task = GenerativeTask(shapes, parse_config("pix2pix", SMALL))
    batch, networks = task.batch(0), task.networks
    assert task.method.n_classes == 0 and "labels" not in batch
    other = {**batch, "noise": batch["noise"].flip(0)}
    assert not torch.equal(task.method.loss(networks, batch).total, task.method.loss(networks, other).total)
    loss = task.updates()[1].objective(batch)
    assert float(loss.metrics["l1"] / loss.count) == pytest.approx(
        float(batch["data"].abs().mean()), rel=1e-5
    )


def test_hidden_halves_of_shapes_are_learned(shapes: Data) -> None:
    task = GenerativeTask(
        shapes, parse_config("pix2pix", {**SMALL, "steps": 90, "lr": 3e-3, "train": {"ema": 0.95}})
    )
    train_rows(task)
    task.networks.eval()
    found = task.method.diagnose(task.networks, shapes)
    assert found["mean_absolute_error"] < 0.8 * found["other_error"], found
    assert 0.4 < found["critic_accuracy"] <= 1
    x = shapes.test[:5]
    shown = task.method.show(task.networks, x)
    assert shown.shape == (5, 1, 16, 32) and torch.equal(shown[..., :16], task.method.condition(x))


def test_vectors_and_samples_are_refused(shapes: Data) -> None:
    with pytest.raises(ConfigError, match=r"(?s)ring has rows of 2 numbers.*a folder of pictures"):
        METHODS["pix2pix"](parse_config("pix2pix", {}), open_data("ring").info)
    method = method_of("half")
    networks = method.make_networks(torch.Generator())
    with pytest.raises(ConfigError, match=r"(?s)pix2pix has no distribution.*give one with --picture"):
        method.sample(networks, 1, torch.Generator(), DrawOptions())
