"""Image models and image files of the verbs `classify`, `caption`, `embed` and `gen sample`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from whorl.data.images import ImageShape, Pixels
    from whorl.store import Artifact
    from whorl.vision.model import VisionModel


def open_vision(found: Artifact) -> VisionModel:
    """Return the image model of an artifact, on the machine's device.

    Raises:
        ConfigError: the artifact is of another kind, or the model takes other images than grey or RGB ones.
    """
    from whorl.errors import ConfigError

    if found.kind != "vision":
        raise ConfigError(
            f"{found.name} is of the kind {found.kind}", expected="an image model",
            do="train one with `whorl run classify-digits`, or list the artifacts with `whorl ls`",
        )  # fmt: skip
    from whorl.machine.device_probe import probe
    from whorl.vision.load import load_vision

    found.check()
    machine = probe()
    machine.apply()
    model = load_vision(found.path, machine.device)
    model.preprocessing.shape.check_channels(found.name)
    return model


def read_files(files: Sequence[Path], shape: ImageShape) -> tuple[list[Path], Pixels]:
    """Return the readable files and their pixels uint8 [N, H, W, C]; the others are listed on standard error.

    Raises:
        DataError: no file is an image.
    """
    import numpy as np

    from whorl.data.images import decode_image
    from whorl.data.quarantine import BadRecordError
    from whorl.errors import DataError

    good: list[Path] = []
    pixels: list[Pixels] = []
    problems: list[str] = []
    for path in files:
        try:
            pixels.append(decode_image(path.read_bytes(), shape))
            good.append(path)
        except OSError as error:
            problems.append(f"{path}: {error.strerror or error}")
        except BadRecordError as error:
            problems.append(f"{path}: {error.detail} ({error.reason})")
    if not good:
        raise DataError(
            "no file can be used: " + "; ".join(problems[:3]),
            expected="PNG, JPEG, WebP, GIF, BMP, TIFF or PPM files, of at most 64 million pixels",
            do="save the image again with another program, or give another file",
        )
    for problem in problems:
        print(f"skipped {problem}", file=sys.stderr)
    if problems:
        print(f"{len(problems):,} of {len(files):,} files skipped", file=sys.stderr)
    return good, np.stack(pixels)
