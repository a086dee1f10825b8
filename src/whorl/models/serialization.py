"""Saving and loading of language models: `config.json` (shape) and `model.safetensors` (weights by name).

Models are written by `models/exchange` in this package's own family ("model_type": "whorl"), so `load_model` also reads
folders in Hugging Face format. Fields and tensors renamed since a model was saved are mapped by `legacy_config.py`.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file

from whorl.errors import CheckpointError, ConfigError
from whorl.models.exchange import convert
from whorl.models.language_model import LanguageModel
from whorl.models.legacy_config import (
    upgrade_parameter_name,
    upgrade_quantization,
    upgrade_transformer,
)
from whorl.models.quantization.weights import CONFIG_KEY, load_quantized, save_quantized
from whorl.models.transformer import Transformer, TransformerConfig
from whorl.nn import Linear
from whorl.nn.compiler import meta_device
from whorl.store.files import load_json, require_regular


def make_model(
    config: TransformerConfig, generator: torch.Generator | None = None, dtype: torch.dtype = torch.float32
) -> Transformer:
    """Return an untrained model of the shape `config`."""
    return Transformer(config, generator, dtype)


def save_model(model: LanguageModel, folder: Path) -> None:
    """Write `config.json` and `model.safetensors` into `folder`; quantized matrices as codes and scales.

    Other files of the folder stay; a model in it is replaced.

    Raises:
        ConfigError: the model is no `Transformer`.
    """
    if model.quantization is not None:
        save_quantized(model, folder)
        return
    if not isinstance(model, Transformer):
        raise ConfigError(f"a {type(model).__name__} cannot be saved", expected="a Transformer")
    draft = folder / ".model"
    shutil.rmtree(draft, ignore_errors=True)
    convert.export_model(model, draft)
    for file in sorted(draft.iterdir()):
        file.replace(folder / file.name)
    draft.rmdir()


def load_model(
    folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu", *, to_train: bool = False
) -> LanguageModel:
    """Load the model of `folder` for inference: weights of matrix products are cast to `dtype`, others stay fp32.

    Args:
        to_train: keep all weights in fp32 instead, for training.

    Raises:
        CheckpointError: a file is missing or damaged, or a tensor is missing, unknown or of another shape.
        ConfigError: config.json needs unsupported features; or `to_train` with a quantized model.
    """
    data = _read(folder)
    if CONFIG_KEY in data:
        if to_train:
            raise ConfigError(
                f"the model of {folder} is quantized and cannot be trained",
                expected="a model in full precision",
                do="train the model it was quantized from, or a LoRA adapter",
            )
        config = read_config(folder)
        return load_quantized(
            folder, data[CONFIG_KEY], lambda: make_model(config, dtype=dtype), dtype, device
        )
    if "model_type" in data:
        transformer = convert.import_model(folder, dtype=dtype, device=device, to_train=to_train)
        return transformer.train(to_train)
    return _load_former_decoder(folder, dtype, device, to_train)


def _load_former_decoder(folder: Path, dtype: torch.dtype, device: str, to_train: bool) -> LanguageModel:
    """Load a model of the class that preceded the preset `whorl_decoder`."""
    config = read_config(folder)
    try:
        weights = load_file(require_regular(folder / "model.safetensors"), device=device)
    except (OSError, ValueError, SafetensorError) as error:
        raise _unreadable(folder, error) from error
    weights = {upgrade_parameter_name(name): t for name, t in weights.items()}
    with meta_device():
        model = make_model(config, dtype=dtype)
    wanted = {name: tuple(p.shape) for name, p in model.named_parameters()}
    found = {name: tuple(t.shape) for name, t in weights.items()}
    if wanted != found:
        differing = sorted(n for n in wanted.keys() | found.keys() if wanted.get(n) != found.get(n))
        name = differing[0]
        raise CheckpointError(
            f"{folder / 'model.safetensors'}: tensor {name!r} is {found.get(name, 'missing')}",
            expected=f"{wanted.get(name, 'no such tensor')} by config.json ({len(differing)} tensors differ)",
        )
    model.load_state_dict(weights, assign=True)
    if to_train:
        return model.to(device).train()
    for layer in model.modules():  # inference: cast once, not at every use
        if isinstance(layer, Linear):
            layer.weight.data = layer.weight.data.to(dtype)
    if model.head is not None:
        model.head.data = model.head.data.to(dtype)
    return model.to(device).eval()


def read_config(folder: Path) -> TransformerConfig:
    """Return the shape of the model of `folder`.

    Raises:
        CheckpointError: `config.json` is missing or damaged.
        ConfigError: it needs unsupported features.
    """
    data = _read(folder)
    data.pop(CONFIG_KEY, None)
    if "model_type" in data:
        return convert.read_config(data, str(folder / "config.json"))
    try:
        return TransformerConfig.model_validate(upgrade_transformer(data))
    except (ValidationError, TypeError) as error:
        raise _unreadable(folder, error) from error


def _read(folder: Path) -> dict[str, Any]:
    try:
        data = load_json(folder / "config.json")
    except (OSError, ValueError) as error:
        raise _unreadable(folder, error) from error
    if not isinstance(data, dict):
        raise _unreadable(folder, TypeError(f"config.json holds a {type(data).__name__}"))
    return upgrade_quantization(data)


def _unreadable(folder: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"cannot read a model from {folder}: {error}",
        expected="config.json and model.safetensors as `save_model` writes them",
        do="use a model listed by `whorl ls`",
    )
