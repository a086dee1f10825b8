"""Views: states from noise to samples, ends of interpolations, figures of guidance, and which methods have which."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from tests.support.images import write_half_dark
from torch import Tensor

from whorl.generative import views
from whorl.generative.data import Data, open_data, to_pixels
from whorl.generative.methods.denoising import Denoising
from whorl.generative.methods.method import DrawOptions
from whorl.generative.methods.registration import METHODS, parse_config
from whorl.generative.task import GenerativeTask
from whorl.tracking.seeds import generator

SMALL: dict[str, Any] = {"batch_size": 12, "width": 16, "depth": 1, "n_heads": 2, "patch": 4}
STEPS, ARCS, GUIDED = "Samples by step", "Interpolations", "Guidance against diversity"


class DarkSide:
    """A classifier that is exact on the pictures of `write_half_dark`."""

    def classes(self, rows: Tensor) -> Tensor:
        sides = (rows[..., :4, :], rows[..., 4:, :], rows[..., :4])
        return torch.stack([side.flatten(1).mean(1) for side in sides], 1).argmin(1)

    def features(self, rows: Tensor) -> Tensor:
        return rows.flatten(1)[:, :2]


CLASSIFIER: Any = DarkSide()


def task_of(data: Data, method: str) -> GenerativeTask:
    task = GenerativeTask(data, parse_config(method, SMALL))
    with torch.no_grad():  # the last layer of a new denoiser is 0: every noise would be its own sample
        for p in task.networks.parameters():
            p += 0.1 * torch.randn(p.shape, generator=generator(0, "weights of the test"))
    return task


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Data:
    folder: Path = tmp_path_factory.mktemp("pictures")
    write_half_dark(folder, channels=1, n=96)
    return open_data("half-dark", folder)


@pytest.mark.parametrize("method", ["ddpm", "score", "flow"])
def test_states_go_from_the_noise_to_the_samples(method: str, pictures: Data) -> None:
    task = task_of(pictures, method)
    denoising, noise = cast(Denoising, task.method), torch.randn(5, 1, 8, 8, generator=generator(1))
    options = DrawOptions(steps=10, labels=torch.arange(5) % 3)
    with torch.no_grad():
        times, states = views.states_by_step(denoising, task.networks, noise, options)
        drawn = denoising.from_noise(task.networks, noise, generator(0), options)
    assert times == pytest.approx([denoising.path.last * share for share in (1, 0.8, 0.6, 0.4, 0.2, 0)])
    torch.testing.assert_close(states[0], noise)
    assert torch.equal(states[-1], drawn) and not torch.equal(states[-2], drawn)


@pytest.mark.parametrize("method", ["flow", "gan", "vae"])
def test_ends_of_interpolations_are_samples_of_the_ends(method: str, pictures: Data) -> None:
    task = task_of(pictures, method)
    found = {v.title: v.pixels for v in views.make_views(task.method, task.networks, pictures, None)}[ARCS]
    rng, shape = generator(0, "views"), task.method.noise_shape
    if method == "flow":
        torch.randn(views.COLUMNS, *shape, generator=rng)  # of the samples by step
    options = DrawOptions(labels=torch.arange(views.ENDS) % 3)
    assert found.shape == (views.ENDS * 34, views.COLUMNS * 34, 3)
    cells = (
        found.reshape(views.ENDS, 34, views.COLUMNS, 34, 3)[:, :32:4, :, :32:4, :1].swapaxes(1, 2).astype(int)
    )
    for column in (0, -1):
        noise = torch.randn(views.ENDS, *shape, generator=rng)
        with torch.no_grad():
            ends = to_pixels(task.method.from_noise(task.networks, noise, rng, options)).astype(int)
        assert np.abs(cells[:, column] - ends).max() <= 1, column  # rounding
    assert np.abs(cells[:, 0] - cells[:, -1]).max() > 1


def test_arcs_keep_the_length_of_noise() -> None:
    first, last = torch.eye(2)
    torch.testing.assert_close(views.interpolate(first, last, 5).norm(dim=1), torch.ones(5))


def test_figures_of_guidance_follow_the_classifier() -> None:
    dark = [torch.ones(1, 8, 8) for _ in range(4)]
    for row, top in zip(dark, (True, True, False, False), strict=True):
        row[:, :4] *= -1 if top else 1
        row[:, 4:] *= 1 if top else -1
    rows = torch.stack(dark)
    rows[1, 0, 0, :2] = torch.tensor([2.0, 3.0])  # 3 and 4 beyond the other row of its class
    found = views.guidance_figure("1", rows, torch.tensor([0, 0, 1, 0]), CLASSIFIER)
    pairs = [5.0, 8**0.5, 5**0.5]  # of the rows 0, 1 and 3
    assert found.recognised == 0.75 and found.distance == pytest.approx(sum(pairs) / 3)


def test_guidance_has_all_strengths_and_held_out_rows(pictures: Data) -> None:
    task = task_of(pictures, "flow")
    *_, view = views.make_views(task.method, task.networks, pictures, CLASSIFIER)
    assert [f.name for f in view.figures] == ["guidance 1", "guidance 2", "guidance 4", "real data"]
    assert view.figures[-1].recognised == 1 and view.figures[0].distance != view.figures[2].distance
    assert pictures.test_labels is not None
    real = to_pixels(pictures.test[pictures.test_labels == 1][: views.COLUMNS])
    assert (view.pixels[3 * 34 : -2 : 4, :32:4, :1] == real[0]).all() and "class bottom" in view.note


@pytest.mark.parametrize("method", METHODS)
def test_each_method_has_its_views(method: str, pictures: Data) -> None:
    one_pass = [ARCS] if method in ("vae", "gan") else []
    wanted = [STEPS, ARCS, GUIDED] if method in ("ddpm", "score", "flow") else one_pass
    task, plane = task_of(pictures, method), open_data("ring")
    assert [v.title for v in views.make_views(task.method, task.networks, pictures, CLASSIFIER)] == wanted
    if method == "pix2pix":  # of pictures alone
        return
    task = task_of(plane, method)
    found = [*views.make_views(task.method, task.networks, plane, None)]
    assert [v.title for v in found] == (["Particles along the flow"] if GUIDED in wanted else [])
    assert all(v.pixels.shape == (258, views.TIMES * 258, 3) for v in found)
