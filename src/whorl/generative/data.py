"""The data of a generative model: pictures of the step `images`, or samples of a known density.

Pictures become fp32 [N, C, H, W] from -1 to 1. A density gives a fixed number of samples [N, 2], drawn once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from whorl.data.images import Fit, ImageShape, Pixels
from whorl.errors import ConfigError, DataError
from whorl.generative.densities import Density, make_density
from whorl.tracking.seeds import generator
from whorl.vision.image_set import ImageSet

TRAIN_SAMPLES, TEST_SAMPLES = 50_000, 10_000  # of a density


class DataInfo(BaseModel):
    """The data of a model: shape of a row, names of the classes, largest absolute value. Part of the model's folder."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    shape: tuple[int, ...]
    classes: tuple[str, ...] = ()
    limit: float = 1.0
    fingerprint: str
    fit: Fit = "crop"

    @property
    def is_pictures(self) -> bool:
        return len(self.shape) == 3

    @property
    def image_shape(self) -> ImageShape:
        """Return how image files become rows. Raises ConfigError: rows are no pictures."""
        if not self.is_pictures:
            raise ConfigError(f"rows of {self.name} are no pictures", do="leave out --picture")
        return ImageShape(size=self.shape[1], channels=self.shape[0], fit=self.fit)


@dataclass(frozen=True)
class Data:
    """Rows to train on and held-out rows, fp32 [N, *shape]; labels [N] of both, or None."""

    info: DataInfo
    train: Tensor
    test: Tensor
    labels: Tensor | None = None
    test_labels: Tensor | None = None
    density: Density | None = None
    images: ImageSet | None = None


def open_data(name: str, folder: Path | None = None) -> Data:
    """Return the data: the set of images in `folder`, or the density of this name.

    Raises:
        ConfigError: there is no such density.
        DataError: the images cannot be used.
    """
    if folder is not None:
        return _open_pictures(name, ImageSet(folder))
    density = make_density(name)
    train, test = (
        density.sample(n, generator(0, "density", name, split))
        for split, n in (("train", TRAIN_SAMPLES), ("test", TEST_SAMPLES))
    )
    info = DataInfo(name=name, shape=(2,), limit=float(train.abs().max()), fingerprint=f"{name} 1")
    return Data(info, train, test, density=density)


def _open_pictures(name: str, images: ImageSet) -> Data:
    train, test = (images.split(split) for split in ("train", "test"))
    if train.images.min() == train.images.max():
        raise DataError(
            f"all pixels of {images.folder} have the value {int(train.images.max())}",
            expected="pictures that differ",
        )
    shape = images.info.preprocessing.shape
    info = DataInfo(
        name=name, shape=(shape.channels, shape.size, shape.size), classes=images.classes,
        fingerprint=images.info.fingerprint, fit=shape.fit,
    )  # fmt: skip
    labels, test_labels = (
        None if split.labels is None else torch.from_numpy(split.labels) for split in (train, test)
    )
    return Data(info, to_rows(train.images), to_rows(test.images), labels, test_labels, images=images)


def to_rows(pixels: Pixels) -> Tensor:
    """Return fp32 [N, C, H, W] from -1 to 1 of pixels uint8 [N, H, W, C]."""
    return torch.from_numpy(np.array(pixels)).float().permute(0, 3, 1, 2).contiguous() / 127.5 - 1


def to_pixels(rows: Tensor) -> Pixels:
    """Return pixels uint8 [N, H, W, C] of rows [N, C, H, W]; values beyond -1 and 1 are cut."""
    scaled = ((rows.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return np.asarray(scaled.permute(0, 2, 3, 1).cpu().numpy())
