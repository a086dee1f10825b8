"""A set of images as arrays, in splits: what the step `images` writes and training reads.

image_set.json       shape, classes, mean and deviation of the training pixels, rows per split, fingerprint
SPLIT.images.npy     uint8 [N, H, W, C]
SPLIT.labels.npy     int64 [N], numbers of classes; or
SPLIT.captions.json  N texts
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from whorl.data.images import ImageShape, Pixels
from whorl.errors import ConfigError, DataError

SET_FILE = "image_set.json"


class Preprocessing(BaseModel):
    """From pixels to a network's input: (pixel / 255 - mean) / std, for each channel."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    shape: ImageShape
    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class ImageSplit:
    """images: uint8 [N, H, W, C]. labels: int64 [N], or None. captions: N texts, or None."""

    images: Pixels
    labels: NDArray[np.int64] | None = None
    captions: Sequence[str] | None = None

    def __len__(self) -> int:
        return len(self.images)


class ImageSetInfo(BaseModel):
    """The content of `image_set.json`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    preprocessing: Preprocessing
    classes: tuple[str, ...]
    rows: dict[str, int]
    fingerprint: str


class ImageSet:
    """The set in a folder.

    Raises:
        DataError: a file is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.info = ImageSetInfo.model_validate_json((folder / SET_FILE).read_bytes())
        except (OSError, ValidationError) as error:
            raise DataError(
                f"cannot read a set of images from {folder}: {error}",
                expected=SET_FILE,
                do="use a result of the step `images`",
            ) from error

    @property
    def classes(self) -> tuple[str, ...]:
        return self.info.classes

    @property
    def splits(self) -> list[str]:
        return list(self.info.rows)

    def split(self, name: str) -> ImageSplit:
        """Return a split; its images are mapped, not read. Raises DataError: there is no such split."""
        if name not in self.info.rows:
            raise DataError(f"{self.folder} has no split {name!r}", expected=", ".join(self.splits))
        images = np.load(self.folder / f"{name}.images.npy", mmap_mode="r")
        labels, captions = self.folder / f"{name}.labels.npy", self.folder / f"{name}.captions.json"
        return ImageSplit(
            images,
            np.load(labels) if labels.exists() else None,
            json.loads(captions.read_text("utf-8")) if captions.exists() else None,
        )

    def need(self, what: str, role: str) -> None:
        """Check that the images have labels, or captions.

        Raises:
            ConfigError: they have not. `role`: the step that needs them.
        """
        split = self.split("train")
        if getattr(split, what) is None:
            other = "captions" if what == "labels" else "labels"
            given, instead = "no labels of two classes, and no captions", ""
            if getattr(split, other) is not None:
                given, instead = f"{other} only", f", or use a step for {other}"
            raise ConfigError(
                f"{role} needs {what}, and the images have {given}",
                expected="FOLDER/CLASS/*.png, or records with a field label"
                if what == "labels"
                else "records with a field caption",
                do=f"set path, label_field or caption_field of the step `images`{instead}",
            )


def write_image_set(
    folder: Path, splits: Mapping[str, ImageSplit], classes: Sequence[str], shape: ImageShape
) -> ImageSet:
    """Write the set, and return it. The mean and deviation are those of the split `train`.

    Raises:
        DataError: pixels are not uint8, or a label is no number of a class.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, split in splits.items():
        if split.images.dtype != np.uint8:
            raise DataError(
                f"pixels of the split {name} are {split.images.dtype}", expected="uint8, 0 to 255"
            )
        known = range(len(classes))
        if other := set() if split.labels is None else {*split.labels.tolist()} - {*known}:
            expected = f"0 to {len(classes) - 1}, for {', '.join(classes)}"
            raise DataError(f"the split {name} has the label {min(other)}", expected=expected)
        digest.update(name.encode() + np.ascontiguousarray(split.images).tobytes())
        np.save(folder / f"{name}.images.npy", split.images)
        if split.labels is not None:
            digest.update(split.labels.tobytes())
            np.save(folder / f"{name}.labels.npy", split.labels)
        if split.captions is not None:
            text = json.dumps(list(split.captions))
            digest.update(text.encode())
            (folder / f"{name}.captions.json").write_text(text, "utf-8")
    pixels = splits["train"].images
    mean = pixels.mean(axis=(0, 1, 2), dtype=np.float64) / 255
    std = pixels.std(axis=(0, 1, 2), dtype=np.float64) / 255
    preprocessing = Preprocessing(
        shape=shape,
        mean=tuple(round(float(x), 6) for x in mean),
        std=tuple(round(max(float(x), 1 / 255), 6) for x in std),  # one colour has the deviation 0
    )
    info = ImageSetInfo(
        preprocessing=preprocessing, classes=tuple(classes), fingerprint=digest.hexdigest(),
        rows={name: len(split) for name, split in splits.items()},
    )  # fmt: skip
    (folder / SET_FILE).write_text(info.model_dump_json(indent=1) + "\n")
    return ImageSet(folder)
