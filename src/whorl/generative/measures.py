"""Measures of samples: distances to held-out data with their floor, modes, memorised rows, likelihood.

The floor of a distance is that of training data to the same held-out rows: what a perfect model would have. Both are means
over disjoint groups of one size, with an interval over the groups. The Fréchet distance of pictures is taken between
features of a classifier, where there is one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from whorl.errors import DataError
from whorl.evals.statistics.intervals import mean_interval
from whorl.generative.data import Data
from whorl.generative.densities import GaussianMixture
from whorl.generative.distances import frechet, mmd, sinkhorn, sliced_wasserstein, wasserstein
from whorl.generative.features import PictureClassifier
from whorl.generative.methods.method import DrawOptions, GenerativeMethod
from whorl.tracking.seeds import generator

GROUP, GROUPS = 1000, 5  # rows of a group, and groups, at most
MODE_RADIUS, MODE_SHARE = 4.0, 0.25  # in standard deviations; of an equal share of the samples
LIKELIHOOD_ROWS = 1000
DISTANCES: dict[str, Callable[[Tensor, Tensor], float]] = {
    "sliced Wasserstein": sliced_wasserstein,
    "Wasserstein": wasserstein,
    "Sinkhorn": sinkhorn,
    "MMD": mmd,
    "Frechet": frechet,
}


class SampleMeasure(BaseModel):
    """A value with its interval, and the same of real data, or None where there is no such comparison."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    value: float
    interval: tuple[float, float] | None = None
    floor: float | None = None
    floor_interval: tuple[float, float] | None = None
    note: str = ""


def draw_measured(
    method: GenerativeMethod, networks: Any, data: Data, options: DrawOptions, seed: int
) -> Tensor:
    """Return the samples [N, *shape] that `measure` takes: as many as its groups have rows.

    Raises:
        DataError: there are too few rows for two groups, or a sample is not finite.
    """
    size, n = group_sizes(data)
    drawn = method.sample(networks, size * n, generator(seed, "measured"), options).cpu()
    if not torch.isfinite(drawn).all():
        raise DataError(
            "the model draws samples that are not finite", expected="finite numbers",
            do="train it again with a lower lr",
        )  # fmt: skip
    return drawn


def measure(drawn: Tensor, data: Data, classifier: PictureClassifier | None = None) -> list[SampleMeasure]:
    """Return the distances of samples of `draw_measured` to held-out data, and what they miss or repeat.

    classifier: of the pictures.
    """
    size, n = group_sizes(data)
    real = data.train[torch.randperm(len(data.train), generator=generator(0, "floor"))[: size * n]]
    found = [*_distances(drawn, real, data.test[:size], size, classifier)]
    return [*found, _nearest(drawn, data, size), *_modes(drawn, real, data, classifier)]


def group_sizes(data: Data) -> tuple[int, int]:
    """Return rows per group, and the number of groups. Raises DataError: there are too few rows."""
    size = min(GROUP, len(data.test), len(data.train) // 2)
    if size < 2:
        raise DataError(
            f"{data.info.name} has {len(data.train):,} rows and {len(data.test):,} held-out ones",
            expected="at least 4 and 2, to compare samples with", do="add pictures, or raise test_fraction",
        )  # fmt: skip
    return size, min(GROUPS, len(data.train) // size)


def _distances(
    drawn: Tensor, real: Tensor, held_out: Tensor, size: int, classifier: PictureClassifier | None
) -> Iterator[SampleMeasure]:
    plain = [rows.flatten(1) for rows in (drawn, real, held_out)]
    seen = plain if classifier is None else [classifier.features(rows) for rows in (drawn, real, held_out)]
    for name, distance in DISTANCES.items():
        ours, others, target = seen if name == "Frechet" else plain
        note = "between features of the classifier" if name == "Frechet" and classifier else ""
        ours_values, floor = (
            [distance(part, target) for part in groups(rows, size)] for rows in (ours, others)
        )
        yield _measure(name, ours_values, floor, note)


def groups(rows: Tensor, size: int) -> list[Tensor]:
    """Return the rows in groups of one size."""
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def _measure(name: str, values: Sequence[float], floor: Sequence[float], note: str = "") -> SampleMeasure:
    one, other = mean_interval(values), mean_interval(floor)
    return SampleMeasure(
        name=name, value=one.mean, interval=(one.low, one.high), floor=other.mean,
        floor_interval=(other.low, other.high), note=note,
    )  # fmt: skip


def _nearest(drawn: Tensor, data: Data, size: int) -> SampleMeasure:
    """The distance to the nearest training row; a memorised sample has 0."""

    def nearest(rows: Tensor) -> list[float]:
        train = data.train.flatten(1)
        found: list[float] = torch.cdist(rows.flatten(1), train).amin(1).tolist()
        return found

    text = "to the nearest training row; below the floor, training rows are repeated"
    return _measure("nearest", nearest(drawn[:size]), nearest(data.test[:size]), text)


def _modes(
    drawn: Tensor, real: Tensor, data: Data, classifier: PictureClassifier | None
) -> Iterator[SampleMeasure]:
    density = data.density
    find: Callable[[Tensor], Tensor]
    if isinstance(density, GaussianMixture):
        find, n = partial(modes_of, density), len(density.means)
    elif classifier is not None:
        find, n = classifier.classes, len(data.info.classes)
    else:
        return
    counts = [torch.bincount(find(rows) + 1, minlength=n + 1) / len(rows) for rows in (drawn, real)]
    held = [float((c[1:] >= MODE_SHARE / n).sum()) for c in counts]
    what = "modes" if classifier is None else "classes"
    note = f"of {n} {what}, with at least a quarter of an equal share"
    yield SampleMeasure(name=f"{what} held", value=held[0], floor=held[1], note=note)
    if classifier is None:
        away = [float(c[0]) for c in counts]
        note = f"share of samples further than {MODE_RADIUS:g} standard deviations from every mode"
        yield SampleMeasure(name="off the modes", value=away[0], floor=away[1], note=note)


def modes_of(density: GaussianMixture, rows: Tensor) -> Tensor:
    """Return the nearest mode [N] of rows [N, d], or -1 beyond `MODE_RADIUS`."""
    distances, nearest = torch.cdist(rows, density.means).min(1)
    return torch.where(distances <= MODE_RADIUS * density.std, nearest, -1)


def likelihoods(
    method: GenerativeMethod, networks: Any, data: Data, rows: int | None = None
) -> Iterator[SampleMeasure]:
    """Yield the bits per dimension of held-out rows, and the KL to a known density; nothing without a likelihood.

    Pixels are integers: uniform noise of one step is added, so that the density bounds their probability (Theis et al.
    2016, arXiv:1511.01844, section 3.1).

    Args:
        rows: how many; by default `LIKELIHOOD_ROWS`, and none where it takes minutes: an exact likelihood of pictures.
    """
    if rows is None:
        rows = 0 if data.info.is_pictures and method.likelihood == "exact" else LIKELIHOOD_ROWS
    if not method.likelihood or not rows:
        return
    x, shift = data.test[:rows], 0.0
    if data.info.is_pictures:
        noise = torch.rand(x.shape, generator=generator(0, "dequantization"))
        x, shift = x + (noise - 0.5) / 127.5, math.log2(127.5)
    log_q = method.log_likelihood(networks, x.to(next(networks.parameters()).device)).double().cpu()
    bound = method.likelihood == "bound"
    bits = mean_interval((shift - log_q / (x[0].numel() * math.log(2))).numpy())
    note = "upper bound" if bound or data.info.is_pictures else ""
    density, exact = data.density, None
    if density is not None:
        log_p = density.log_prob(x).double()
        exact = float(-log_p.mean() / (x[0].numel() * math.log(2)))
        kl = mean_interval((log_p - log_q).numpy())
        text = "nats, from the truth to the model" + ("; upper bound" if bound else "")
        yield SampleMeasure(name="KL", value=kl.mean, interval=(kl.low, kl.high), floor=0.0, note=text)
    yield SampleMeasure(
        name="bits per dimension", value=bits.mean, interval=(bits.low, bits.high), floor=exact, note=note
    )
