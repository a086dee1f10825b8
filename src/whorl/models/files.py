"""A model on disk: `config.json` (its shape) and `model.safetensors` (its weights by name, fp32)."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from whorl.errors import CheckpointError
from whorl.models.decoder import Decoder, DecoderConfig
from whorl.nn import Linear


def save_decoder(model: Decoder, folder: Path) -> None:
    """Writes `config.json` and `model.safetensors` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(model.config.model_dump_json(indent=2) + "\n")
    weights = {name: p.detach().contiguous().clone() for name, p in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def load_decoder(folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Decoder:
    """The model of `folder`, to be run: its products' weights are cast to `dtype`, the rest stays fp32.

    Raises:
        CheckpointError: a file is missing or damaged, or a tensor is missing, unknown or of another shape.
    """
    config = read_config(folder)
    try:
        weights = load_file(folder / "model.safetensors", device=device)
    except (OSError, ValueError, SafetensorError) as error:
        raise _unreadable(folder, error) from error
    with torch.device("meta"):
        model = Decoder(config, dtype=dtype)
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
    for layer in model.modules():  # to be run, not trained: cast once, not at every use
        if isinstance(layer, Linear):
            layer.weight.data = layer.weight.data.to(dtype)
    if model.head is not None:
        model.head.data = model.head.data.to(dtype)
    return model.to(device)


def read_config(folder: Path) -> DecoderConfig:
    """The shape of the model of `folder`.

    Raises:
        CheckpointError: `config.json` is missing or damaged.
    """
    try:
        return DecoderConfig.model_validate(json.loads((folder / "config.json").read_text()))
    except (OSError, ValueError, ValidationError) as error:
        raise _unreadable(folder, error) from error


def _unreadable(folder: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"no model could be read from {folder}: {error}",
        expected="config.json and model.safetensors as `save_decoder` writes them",
        do="name a model that `whorl ls` lists",
    )
