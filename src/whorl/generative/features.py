"""Features and classes of pictures by a classifier of the step `image_classifier`, for measures of samples."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from whorl.errors import ConfigError
from whorl.generative.data import DataInfo, to_pixels
from whorl.vision.load import load_vision


class PictureClassifier:
    """A classifier of rows [N, *shape] of the same pictures.

    Raises:
        ConfigError: it has other pictures or classes.
    """

    def __init__(self, folder: Path, info: DataInfo, device: str = "cpu") -> None:
        self.model = load_vision(folder, device)
        shape = self.model.preprocessing.shape
        if (shape.channels, shape.size, shape.size) != info.shape or self.model.classes != info.classes:
            raise ConfigError(
                f"the classifier has other pictures or classes than {info.name}",
                expected="a classifier of the same images",
                do="train one with the step `image_classifier` and the same parent `images`",
            )

    def features(self, rows: Tensor) -> Tensor:
        """Return unit vectors [N, d]."""
        return torch.from_numpy(self.model.embed(to_pixels(rows)))

    def classes(self, rows: Tensor) -> Tensor:
        """Return the likeliest classes [N]."""
        return self.model.classify(to_pixels(rows))[1].argmax(1)
