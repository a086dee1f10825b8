"""`import_vision` and `export_vision`: a folder of `transformers` to a `ViT` or a `DualEncoder` (CLIP), and back.

    model = import_vision(Path("clip-vit-base-patch32"), dtype=torch.bfloat16)
    scores = model.scores(pictures, ids)                                           # [N, M]
    export_vision(model, Path("mine"), "clip", source=Path("clip-vit-base-patch32"))

As in `convert.py`, fields are read or rejected, and the files must hold exactly the tensors that the fields imply. A model
can be written as a family if its fields, written and read back, are equal. The preprocessing of a folder, from pixels
(size, mean, deviation) and from text to ids, is copied but not read.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from whorl.errors import ConfigError
from whorl.models.exchange.families.clip import CLIP
from whorl.models.exchange.families.vit import VIT, VisionFamily
from whorl.models.exchange.fields import ConfigReader, invalid_config_error, model_type
from whorl.models.exchange.safetensors_io import SHARD_BYTES, TOKENIZER_FILES, Shards, read_json
from whorl.models.exchange.weights import (
    expected_shapes,
    export_dtypes,
    load_tensors,
    matmul_weights,
    reject_unexpected,
    unmatched_tensors,
    write_folder,
)
from whorl.models.vision.clip import DualEncoder
from whorl.models.vision.vit import ViT
from whorl.nn.compiler import meta_device

VISION_FAMILIES: dict[str, VisionFamily[Any, Any]] = {family.model_type: family for family in (VIT, CLIP)}
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", *TOKENIZER_FILES)
LABELS = ("id2label", "label2id")


def read_vision_config(data: dict[str, Any], where: str, ignore: Collection[str] = ()) -> Any:
    """Return the configuration that a `config.json` describes: a `ViTConfig`, or a `ClipConfig`.

    Args:
        data: its object; where: its path, for messages; ignore: fields that the caller declares harmless.

    Raises:
        ConfigError: a field that is missing, wrong, or would change the result and is not supported.
    """
    family = VISION_FAMILIES[model_type(data, where, VISION_FAMILIES)]
    fields = ConfigReader(data, where)
    try:
        config = family.read(fields, ignore)
    except ValidationError as error:
        raise invalid_config_error(error, where, family.model_type) from error
    return config


def import_vision(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    to_train: bool = True,
    ignore: Collection[str] = (),
) -> ViT | DualEncoder:
    """Return the model of a folder with `config.json` and safetensors weights.

    Args:
        dtype: compute type of the activations, for any type of the images.
        to_train: keep all weights in fp32; False keeps the matrices in `dtype`, for inference.
        ignore: names of fields in `config.json` that do not change the result.

    Raises:
        ConfigError: see `read_vision_config`.
        CheckpointError: a file is missing or damaged; a tensor is missing, unknown, or has another shape or type.
    """
    where = folder / "config.json"
    data = read_json(where)
    config = read_vision_config(data, str(where), ignore)
    family = VISION_FAMILIES[data["model_type"]]
    with meta_device():
        model: ViT | DualEncoder = family.build(config, dtype)
    shards, rules, own = Shards(folder), family.rules(config), model.state_dict()
    names, shapes = {name: name for name in shards.names()}, expected_shapes(rules, own)
    extra = [
        name
        for name in unmatched_tensors(shards, names, shapes)
        if not re.fullmatch(family.ignored_tensors, name)
    ]
    if lost := [name for name in extra if re.fullmatch(family.dropped_tensors, name)]:
        warnings.warn(
            f"{folder}: {len(lost)} tensors are left out ({lost[0]!r}): no classifier uses them",
            stacklevel=2,
        )
    reject_unexpected(shards, names, [n for n in extra if n not in lost], family.model_type, len(shapes))
    low = set() if to_train else matmul_weights(model)
    model.load_state_dict(load_tensors(shards, names, rules, own, low, dtype, device), assign=True)
    if isinstance(model, DualEncoder):
        model.max_logit_scale = max(model.max_logit_scale, math.exp(float(model.log_scale.detach())))
    return model.to(device)


def export_vision(
    model: nn.Module,
    folder: Path,
    family: str,
    *,
    dtype: torch.dtype | None = None,
    source: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a model as a folder of a family.

    Args:
        family: its `model_type`: "vit" for a `ViT`, "clip" for a `DualEncoder`.
        dtype: of the weights written; None keeps each unchanged.
        source: a folder whose processor's and tokenizer's files, special ids and labels (if the count matches) are
            copied.
        shard_bytes: the maximum size of a weight file.

    Raises:
        ConfigError: the family cannot express this model (the error names the field), or `folder` is not empty.
    """
    chosen = VISION_FAMILIES[model_type({"model_type": family}, "export_vision", VISION_FAMILIES)]
    if not isinstance(model, chosen.network):
        raise _not_possible(family, f"it is a {type(model).__name__}", f"a {chosen.network.__name__}")
    config = chosen.config_of(model)
    fields = {"model_type": family, **chosen.write(config)}
    for name, (ours, theirs) in _unequal(config.model_dump(), _read_back(fields, config)).items():
        raise _not_possible(family, f"its {name} is {ours!r}", repr(theirs))
    if source is not None:
        _carry_fields(chosen, fields, read_json(source / "config.json"))
    rules, own = chosen.rules(config), model.state_dict()
    types = export_dtypes(own, dtype)
    fields["dtype"] = str(types[next(name for name in own if own[name].dim() == 2)]).removeprefix("torch.")
    write_folder(
        folder, fields, rules, own, types, source=source, files=PROCESSOR_FILES, shard_bytes=shard_bytes
    )


def _read_back(fields: dict[str, Any], config: Any) -> dict[str, Any]:
    where = f"the {fields['model_type']} written of this model"
    read: dict[str, Any] = read_vision_config(fields, where).model_dump()
    return read


def _unequal(a: dict[str, Any], b: dict[str, Any], path: str = "") -> dict[str, tuple[Any, Any]]:
    """Return field -> (a's value, b's) where they differ; nested fields by their path."""
    found: dict[str, tuple[Any, Any]] = {}
    for name, value in a.items():
        if isinstance(value, dict):
            found |= _unequal(value, b[name], f"{path}{name}.")
        elif value != b[name]:
            found[path + name] = (value, b[name])
    return found


def _carry_fields(family: VisionFamily[Any, Any], fields: dict[str, Any], given: dict[str, Any]) -> None:
    """Copy labels and special ids of a source into the fields."""
    if "id2label" in fields and len(given.get("id2label") or ()) == len(fields["id2label"]):
        fields |= {name: given[name] for name in LABELS if name in given}
    for part, name in family.sub_fields:
        if isinstance(given.get(part), dict) and name in given[part]:
            fields[part][name] = given[part][name]


def _not_possible(family: str, what: str, expected: str) -> ConfigError:
    return ConfigError(f"this model cannot be written as {family!r}: {what}", expected=expected)
