"""ViT and CLIP in the format of `transformers`, with the preprocessing and the classes that their folder gives.

preprocessor_config.json    size, crop, mean, deviation, filter; in newer folders part of processor_config.json
config.json                 id2label, the classes of a ViT
tokenizer.json              of CLIP's texts
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal, cast

from whorl.data.images import ImageShape
from whorl.errors import ConfigError
from whorl.models.exchange import import_vision
from whorl.models.vision.clip import DualEncoder
from whorl.models.vision.vit import ViT, ViTConfig
from whorl.store.files import load_json
from whorl.tokens.hf_tokenizer import HFTokenizer
from whorl.vision.image_set import Preprocessing
from whorl.vision.model import VisionModel

# The numbers of Pillow's filters.
RESAMPLE: dict[int, Literal["nearest", "bilinear", "bicubic", "lanczos"]] = {
    0: "nearest",
    1: "lanczos",
    2: "bilinear",
    3: "bicubic",
}


def load_imported(folder: Path, data: dict[str, Any], device: str = "cpu") -> VisionModel:
    """Return the model of a folder whose `config.json` is `data`.

    Raises:
        ConfigError: unsupported features, or no preprocessing. CheckpointError: a file is damaged.
    """
    network = import_vision(folder, device=device).eval()
    if data["model_type"] == "clip":
        tokenizer = HFTokenizer(folder) if (folder / "tokenizer.json").is_file() else None
        image = cast(ViT, cast(DualEncoder, network).image).config
        return VisionModel("clip", network, _preprocessing(folder, image), tokenizer=tokenizer)
    shape = cast(ViT, network).config
    labels = data.get("id2label") or {}
    classes = tuple(str(labels.get(str(n), n)) for n in range(shape.classes))
    return VisionModel("classifier", network, _preprocessing(folder, shape), classes)


def _preprocessing(folder: Path, image: ViTConfig) -> Preprocessing:
    where, fields = _processor_fields(folder)
    rescale = fields.get("rescale_factor", 1 / 255) if fields.get("do_rescale", True) else 1.0
    if not math.isclose(rescale, 1 / 255, rel_tol=1e-3):
        raise ConfigError(f"{where}: rescale_factor is {rescale}", expected="1/255: pixels from 0 to 1")
    mean, std = fields.get("image_mean", 0.5), fields.get("image_std", 0.5)
    if not fields.get("do_normalize", True):
        mean, std = 0.0, 1.0
    n = image.channels
    shape = ImageShape(
        size=image.image_size,
        channels=n,
        fit="crop" if fields.get("do_center_crop", False) else "stretch",
        resample=RESAMPLE.get(fields.get("resample", 3), "bicubic"),
    )
    values = [tuple(v) if isinstance(v, list) else (v,) * n for v in (mean, std)]
    if any(len(v) != n for v in values):
        raise ConfigError(
            f"{where}: image_mean and image_std have {[len(v) for v in values]} values", expected=f"{n} each"
        )
    return Preprocessing(shape=shape, mean=values[0], std=values[1])


def _processor_fields(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return the file and the fields of the preprocessing. Raises ConfigError: there is no such file, or it is damaged."""
    for name, part in (("preprocessor_config.json", None), ("processor_config.json", "image_processor")):
        path = folder / name
        if not path.is_file():
            continue
        try:
            found = load_json(path)
            found = found.get(part) if part else found
        except (ValueError, AttributeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}", expected="a JSON object") from error
        if isinstance(found, dict):
            return path, found
    raise ConfigError(
        f"{folder} has no preprocessor_config.json", expected="mean, deviation and size of the training images",
        do="copy the file from the model's folder, and import the model again",
    )  # fmt: skip
