"""Image files and small sets of images for tests."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from whorl.data.images import ImageShape, Pixels
from whorl.vision.image_set import ImageSet, ImageSplit, write_image_set

CAPTIONS = ("a dark top", "a dark bottom", "a dark left side")


def encoded(pixels: Any, suffix: str = "PNG", **options: Any) -> bytes:
    """The bytes of an image file; pixels: an array, or an image of Pillow."""
    image = (
        pixels if isinstance(pixels, Image.Image) else Image.fromarray(np.asarray(pixels, np.uint8).squeeze())
    )
    out = io.BytesIO()
    image.save(out, suffix, **options)
    return out.getvalue()


def half_dark(kind: int, rng: np.random.Generator, size: int = 8, channels: int = 3) -> Pixels:
    """A bright noisy image whose top (0), bottom (1) or left side (2) is dark."""
    image = rng.integers(140, 256, (size, size, channels))
    half = size // 2
    area = (slice(0, half), slice(None)), (slice(half, None), slice(None)), (slice(None), slice(0, half))
    image[area[kind]] //= 4
    return image.astype(np.uint8)


def half_dark_split(n: int, seed: int, captions: bool, channels: int = 3) -> ImageSplit:
    rng, kinds = np.random.default_rng(seed), np.arange(n) % 3
    images = np.stack([half_dark(int(kind), rng, channels=channels) for kind in kinds])
    texts = [CAPTIONS[kind] for kind in kinds] if captions else None
    return ImageSplit(images, labels=None if captions else kinds.astype(np.int64), captions=texts)


def write_half_dark(folder: Path, *, captions: bool = False, channels: int = 3, n: int = 48) -> ImageSet:
    """Write a set of three kinds of 8 x 8 images with labels or captions; 24 are held out."""
    folder.mkdir(parents=True, exist_ok=True)
    splits = {
        name: half_dark_split(k, seed, captions, channels)
        for seed, (name, k) in enumerate((("train", n), ("test", 24)))
    }
    classes = () if captions else ("top", "bottom", "left")
    return write_image_set(folder, splits, classes, ImageShape(size=8, channels=channels))


def write_class_folders(folder: Path, n: int = 6) -> Path:
    """Write FOLDER/CLASS/*.png of three classes."""
    rng = np.random.default_rng(0)
    for kind, name in enumerate(("top", "bottom", "left")):
        (folder / name).mkdir(parents=True)
        for i in range(n):
            (folder / name / f"{i}.png").write_bytes(encoded(half_dark(kind, rng)))
    return folder
