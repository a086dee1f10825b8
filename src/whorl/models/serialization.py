"""A language model on disk: `config.json` (its shape) and `model.safetensors` (its weights by name).

Two forms of the same two files. A `Decoder`'s config.json is its `DecoderConfig`. A `Transformer` is written as
`models/exchange` writes its own family ("model_type": "whorl"); so `load_model` also reads the folders of others.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from whorl.errors import CheckpointError, ConfigError
from whorl.models.decoder import Decoder, DecoderConfig
from whorl.models.exchange import convert
from whorl.models.language_model import LanguageModel
from whorl.models.legacy_config import upgrade_quantization
from whorl.models.quantization.weights import CONFIG_KEY, load_quantized, save_quantized
from whorl.models.transformer import Transformer, TransformerConfig
from whorl.nn import Linear

ModelConfig = DecoderConfig | TransformerConfig


def make_model(
    config: ModelConfig, generator: torch.Generator | None = None, dtype: torch.dtype = torch.float32
) -> LanguageModel:
    """An untrained model of that shape."""
    if isinstance(config, DecoderConfig):
        return Decoder(config, generator, dtype)
    return Transformer(config, generator, dtype)


def save_model(model: LanguageModel, folder: Path) -> None:
    """Writes `config.json` and `model.safetensors` into `folder`, in fp32; a quantised model's matrices as they are.

    Raises:
        ConfigError: a `Transformer`, and the folder is not empty.
    """
    if model.quantization is not None:
        save_quantized(model, folder)
        return
    if isinstance(model, Transformer):
        convert.export_model(model, folder)
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(model.config.model_dump_json(indent=2) + "\n")
    weights = {name: p.detach().contiguous().clone() for name, p in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def load_model(
    folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu", *, to_train: bool = False
) -> LanguageModel:
    """The model of `folder`, to be run: its products' weights are cast to `dtype`, the rest stays fp32.

    Args:
        to_train: keep all weights in fp32 instead, ready for gradients.

    Raises:
        CheckpointError: a file is missing or damaged, or a tensor is missing, unknown or of another shape.
        ConfigError: config.json is of others, and asks for what is not supported; to train a quantised model.
    """
    data = _read(folder)
    if CONFIG_KEY in data:
        if to_train:
            raise ConfigError(
                f"the model of {folder} is quantised, and would be trained",
                expected="a model in full precision",
                do="train the one that it was made from, or an adapter beside it",
            )
        config = read_config(folder)
        return load_quantized(
            folder, data[CONFIG_KEY], lambda: make_model(config, dtype=dtype), dtype, device
        )
    if "model_type" in data:
        read = convert.import_model(folder, dtype=dtype, device=device, to_train=to_train)
        return read.train(to_train)
    config = read_config(folder)
    try:
        weights = load_file(folder / "model.safetensors", device=device)
    except (OSError, ValueError, SafetensorError) as error:
        raise _unreadable(folder, error) from error
    with torch.device("meta"):
        model = make_model(config, dtype=dtype)
    wanted = {name: tuple(p.shape) for name, p in model.named_parameters()}
    found = {name: tuple(t.shape) for name, t in weights.items()}
    if wanted != found:
        differing = sorted(n for n in wanted.keys() | found.keys() if wanted.get(n) != found.get(n))
        name = differing[0]
        raise CheckpointError(
            f"{folder / 'model.safetensors'}: tensor {name!r} is {found.get(name, 'missing')}",
            expected=f"{wanted.get(name, 'no such tensor')} by config.json ({len(differing)} tensors differ in all)",
        )
    model.load_state_dict(weights, assign=True)
    if to_train:
        return model.to(device).train()
    for layer in model.modules():  # to be run, not trained: cast once, not at every use
        if isinstance(layer, Linear):
            layer.weight.data = layer.weight.data.to(dtype)
    if model.head is not None:
        model.head.data = model.head.data.to(dtype)
    return model.to(device).eval()


def read_config(folder: Path) -> ModelConfig:
    """The shape of the model of `folder`.

    Raises:
        CheckpointError: `config.json` is missing or damaged.
        ConfigError: it is of others, and asks for what is not supported.
    """
    data = _read(folder)
    data.pop(CONFIG_KEY, None)
    if "model_type" in data:
        return convert.read_config(data, str(folder / "config.json"))
    try:
        return DecoderConfig.model_validate(data)
    except ValidationError as error:
        raise _unreadable(folder, error) from error


def _read(folder: Path) -> dict[str, Any]:
    try:
        data = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise _unreadable(folder, error) from error
    if not isinstance(data, dict):
        raise _unreadable(folder, TypeError(f"config.json holds a {type(data).__name__}"))
    return upgrade_quantization(data)


def _unreadable(folder: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"no model could be read from {folder}: {error}",
        expected="config.json and model.safetensors as `save_model` writes them",
        do="name a model that `whorl ls` lists",
    )
