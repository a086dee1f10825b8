"""Models of tiny pictures: labels decide the samples, whose distance to held-out pictures is near the floor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.images import write_half_dark
from torch import Tensor

from whorl.generative.data import Data, open_data
from whorl.generative.measures import draw_measured, measure
from whorl.generative.methods.method import DrawOptions
from whorl.generative.methods.registration import parse_config
from whorl.generative.task import GenerativeTask
from whorl.train.rows import train_rows

SIZES: dict[str, Any] = {"steps": 150, "batch_size": 32, "width": 32, "depth": 1, "lr": 5e-3}
SIZES |= {"train": {"ema": 0.98}}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Data:
    """Noisy grey pictures of which the top (0), the bottom (1) or the left side (2) is dark."""
    folder = tmp_path_factory.mktemp("pictures")
    write_half_dark(folder, channels=1, n=480)
    return open_data("half-dark", folder)


def trained(data: Data, method: str, **settings: Any) -> GenerativeTask:
    task = GenerativeTask(data, parse_config(method, {**SIZES, **settings}))
    train_rows(task)
    task.networks.eval()
    return task


def dark_side(rows: Tensor) -> Tensor:
    """The class [N] of pictures [N, 1, 8, 8]: the darkest of the three sides."""
    sides = (rows[..., :4, :], rows[..., 4:, :], rows[..., :4])
    return torch.stack([side.flatten(1).mean(1) for side in sides], 1).argmin(1)


def draw(task: GenerativeTask, labels: Tensor | None, n: int = 96) -> Tensor:
    return task.method.sample(task.networks, n, torch.Generator().manual_seed(0), DrawOptions(labels=labels))


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("vae", {"latent": 4, "steps": 600}),
        ("vqvae", {"codes": 8, "code_decay": 0.9, "width": 16, "steps": 500}),
    ],
)
def test_labels_decide_the_class_of_a_sample(method: str, settings: dict[str, Any], pictures: Data) -> None:
    task, labels = trained(pictures, method, **settings), torch.arange(96) % 3
    right = float((dark_side(draw(task, labels)) == labels).double().mean())
    shares = dark_side(draw(task, None)).bincount(minlength=3) / 96
    assert right > 0.85 and shares.min() > 0.1, (right, shares)  # by chance a third is right


@pytest.mark.parametrize("method", ["ddpm", "score"])
def test_classifier_leads_samples_to_a_class(method: str, pictures: Data) -> None:
    task, labels = trained(pictures, method, guidance="classifier"), torch.arange(96) % 3
    right = list[float]()
    for guidance in (0.0, 1.0, 2.0):
        options, rng = DrawOptions(labels=labels, guidance=guidance), torch.Generator().manual_seed(0)
        drawn = task.method.sample(task.networks, 96, rng, options)
        right.append(float((dark_side(drawn) == labels).double().mean()))
    assert right[0] < 0.5 and right[1] > 0.75 and right[2] > 0.9, right  # by chance a third is right
    assert task.method.diagnose(task.networks, pictures)["classifier_accuracy"] > 0.6  # at all times


def test_unet_reaches_the_floor_of_real_pictures(pictures: Data) -> None:
    assert pictures.test_labels is not None
    assert torch.equal(dark_side(pictures.test), pictures.test_labels)
    task = trained(pictures, "flow", network="unet", width=16, depth=2, steps=120)
    labels = torch.arange(96) % 3
    assert (dark_side(draw(task, labels)) == labels).double().mean() > 0.95
    drawn = draw_measured(task.method, task.networks, pictures, DrawOptions(steps=10), 0)
    found = {m.name: m for m in measure(drawn, pictures)}
    for name, most in (("sliced Wasserstein", 1.2), ("Frechet", 1.6)):  # an untrained model: 2 and 12 times
        assert found[name].value < most * (found[name].floor or 0), found[name]
