"""Views of a trained model: its samples by step, interpolations of its noise, and what guidance does.

They show models whose samples are a function of noise (`GenerativeMethod.noise_shape`), and have labels where a model has
classes. Guidance is measured as class precision against diversity, which it trades for each other (Ho & Salimans 2022,
arXiv:2207.12598, section 4).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whorl.data.images import Pixels
from whorl.generative.data import Data, to_pixels
from whorl.generative.features import PictureClassifier
from whorl.generative.methods.denoising import Denoising
from whorl.generative.methods.method import DrawOptions, GenerativeMethod
from whorl.generative.pictures import draw_rows, grid, histogram
from whorl.tracking.seeds import generator

COLUMNS, TIMES, ENDS = 8, 6, 4  # pictures of a row, and samples of a class; states; interpolations
PARTICLES = 2000  # samples of the plane
GUIDANCE, CLASSES = (1.0, 2.0, 4.0), 10  # classes: at most


@dataclass(frozen=True)
class GuidanceFigure:
    """Share of rows that a classifier puts into their class; mean distance between its features of two rows of a class."""

    name: str
    recognised: float
    distance: float


@dataclass(frozen=True)
class View:
    """A picture uint8 [H, W, 3], and figures of its rows."""

    title: str
    note: str
    pixels: Pixels
    figures: tuple[GuidanceFigure, ...] = ()


@torch.no_grad()
def make_views(
    method: GenerativeMethod, networks: Any, data: Data, classifier: PictureClassifier | None
) -> Iterator[View]:
    """Yield the views that a method has for its data. classifier: of the pictures; without one, guidance is left out."""
    if not (method.has_samples and method.noise_shape):
        return
    rng, info = generator(0, "views"), data.info
    device, n_classes = next(networks.parameters()).device, min(CLASSES, method.n_classes)

    def noise(n: int) -> Tensor:
        return torch.randn(n, *method.noise_shape, generator=rng).to(device)

    if isinstance(method, Denoising):
        n = COLUMNS if info.is_pictures else PARTICLES
        labels = torch.arange(n) % n_classes if n_classes else None
        times, states = states_by_step(method, networks, noise(n), DrawOptions(labels=labels))
        note = f"at the times {', '.join(f'{t:.2g}' for t in times)}, from noise to data."
        if info.is_pictures:
            pixels = draw_rows(states.flatten(0, 1), info, COLUMNS)
            yield View("Samples by step", f"From top to bottom: {n} samples {note}", pixels)
        else:
            pixels = grid(np.stack([histogram(state, info.limit) for state in states]), TIMES)
            yield View("Particles along the flow", f"From left to right: {n:,} samples {note}", pixels)
    if not info.is_pictures:
        return
    arcs = interpolate(noise(ENDS), noise(ENDS), COLUMNS).transpose(0, 1).flatten(0, 1)
    classes = torch.arange(ENDS).repeat_interleave(COLUMNS) % n_classes if n_classes else None
    rows = method.from_noise(networks, arcs, rng, DrawOptions(labels=classes)).cpu()
    note = "Each row goes from one noise to another on an arc" + (", within one class." if n_classes else ".")
    yield View("Interpolations", note, draw_rows(rows, info, COLUMNS))
    if classifier is not None and n_classes and isinstance(method, Denoising):
        yield _guidance(method, networks, data, classifier, noise(n_classes * COLUMNS))


def states_by_step(
    method: Denoising, networks: Any, noise: Tensor, options: DrawOptions
) -> tuple[list[float], Tensor]:
    """Return times and states [TIMES, N, *shape] from noise [N, *shape] to samples; a state with s > 1 is x_t / s."""
    found = list[tuple[float, Tensor]]()

    def record(t: float, x: Tensor) -> None:
        found.append((t, (x / method.path.at(t, x).s.clamp_min(1)).cpu()))

    method.from_noise(networks, noise, torch.Generator(), replace(options, record=record))
    kept = [found[round(k * (len(found) - 1) / (TIMES - 1))] for k in range(TIMES)]
    return [t for t, _ in kept], torch.stack([x for _, x in kept])


def interpolate(first: Tensor, last: Tensor, n: int) -> Tensor:
    """Return n points [n, ...] of the arc cos(w) first + sin(w) last: standard normal, as both ends are."""
    angles = torch.linspace(0, math.pi / 2, n, dtype=torch.float64).to(first).view(-1, *[1] * first.ndim)
    return angles.cos() * first + angles.sin() * last


def _guidance(
    method: Denoising, networks: Any, data: Data, classifier: PictureClassifier, noise: Tensor
) -> View:
    """Draw each class with each guidance from the same noise; held-out rows of the classes follow."""
    assert data.test_labels is not None
    labels, n = torch.arange(len(noise)) // COLUMNS, len(noise) // COLUMNS
    held_out = torch.cat([(data.test_labels == c).nonzero()[:COLUMNS, 0] for c in range(n)])
    drawn = {}
    for strength in GUIDANCE:
        options = DrawOptions(labels=labels, guidance=strength)
        rows = method.from_noise(networks, noise, torch.Generator(), options)
        drawn[f"guidance {strength:g}"] = rows.cpu(), labels
    drawn["real data"] = data.test[held_out], data.test_labels[held_out]
    figures = tuple(guidance_figure(name, *found, classifier) for name, found in drawn.items())
    pixels = np.concatenate([to_pixels(rows[own == n // 2]) for rows, own in drawn.values()])
    note = f"From top to bottom: class {data.info.classes[n // 2]} with {', '.join(drawn)}."
    return View("Guidance against diversity", note, grid(pixels, COLUMNS), figures)


def guidance_figure(name: str, rows: Tensor, labels: Tensor, classifier: PictureClassifier) -> GuidanceFigure:
    """Return the figures of rows [N, *shape] of the classes [N]."""
    features = classifier.features(rows).double()
    pairs = (labels[:, None] == labels).triu(1)
    recognised = float((classifier.classes(rows) == labels).double().mean())
    return GuidanceFigure(name, recognised, float(torch.cdist(features, features)[pairs].mean()))
