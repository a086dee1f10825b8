"""Findings of a trained model: samples or reconstructions, measures, a diagnosis and views."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from whorl.generative.features import PictureClassifier
from whorl.generative.measures import SampleMeasure, draw_measured, group_sizes, likelihoods, measure
from whorl.generative.methods.method import DrawOptions
from whorl.generative.saved_model import SavedMeasures
from whorl.generative.task import GenerativeTask
from whorl.generative.views import View, make_views
from whorl.tracking.progress import Progress

SHOWN = 64  # pictures on the page, and reconstructions


@dataclass(frozen=True)
class Findings:
    """drawn: samples [N, *shape], or reconstructed held-out rows of a method without samples."""

    saved: SavedMeasures
    drawn: Tensor
    views: tuple[View, ...]


def check_measurable(task: GenerativeTask) -> None:
    """Raise DataError, before training, where there are too few rows to measure samples with."""
    if task.method.has_samples:
        group_sizes(task.data)


@torch.no_grad()
def examine(
    task: GenerativeTask, classifier: PictureClassifier | None, seconds: float, progress: Progress
) -> Findings:
    """Draw from a trained model and measure it. seconds: of its training.

    Raises:
        DataError: see `draw_measured`.
    """
    method, networks, data = task.method, task.networks.eval(), task.data
    found, took = list[SampleMeasure](), 0.0
    if method.has_samples:
        began = time.monotonic()
        with progress.task("Drawing samples"):
            drawn = draw_measured(method, networks, data, DrawOptions(), task.config.seed)
        took = (time.monotonic() - began) / len(drawn) * 1000
        with progress.task("Measuring samples"):
            found += [*measure(drawn, data, classifier), *likelihoods(method, networks, data)]
    else:
        drawn = method.show(networks, data.test[:SHOWN].to(task.device)).cpu()
    with progress.task("Drawing views"):
        views = (*make_views(method, networks, data, classifier),)
    saved = SavedMeasures(
        method=method.config.method, data=data.info.name, fingerprint=data.info.fingerprint, shape=data.info.shape,
        steps=task.steps, parameters=sum(p.numel() for p in networks.parameters()), seconds=seconds,
        sample_seconds=took, measures=tuple(found), diagnosis=method.diagnose(networks, data),
    )  # fmt: skip
    return Findings(saved, drawn, views)
