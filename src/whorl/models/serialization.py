"""Saving and loading of language models: `config.json` (shape) and `model.safetensors` (weights by name).

Models are written by `models/exchange` in this package's own family ("model_type": "whorl"), so `load_model` also reads
folders in Hugging Face format.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from whorl.errors import CheckpointError, ConfigError
from whorl.models.compression.quantize import CONFIG_KEY, load_quantized, save_quantized
from whorl.models.exchange import convert
from whorl.models.language_model import LanguageModel
from whorl.models.lora import ADAPTER, load_lora, merge_lora
from whorl.models.transformer import Transformer, TransformerConfig
from whorl.store.files import load_json


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
    folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu", *, to_train: bool = False, masked: bool = False,
    with_adapter: bool = True,
) -> LanguageModel:  # fmt: skip
    """Load the model of `folder` for inference: weights of matrix products are cast to `dtype`, others stay fp32.

    Args:
        to_train: keep all weights in fp32 instead, for training.
        masked: whether the caller can use a masked diffusion model, whose logits are not of the next token.
        with_adapter: merge the LoRA adapter that a training step left next to its base model (`lora.merge = false`).

    Raises:
        CheckpointError: a file is missing or damaged, or a tensor is missing, unknown or of another shape.
        ConfigError: config.json needs unsupported features; `to_train` with a quantized model; or the model is `masked`.
    """
    data = _read(folder)
    given = (data.get("transformer") or {}).get("masked")
    if given and not masked:
        raise ConfigError(
            f"the model of {folder} is a masked diffusion model (masked = {given})", expected="a model of the next token",
            do="use it with `whorl sample` and `whorl serve` of one process, or set pretrain.objective = 'next_token'",
        )  # fmt: skip
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
    model = convert.import_model(folder, dtype=dtype, device=device, to_train=to_train).train(to_train)
    if with_adapter and (folder / ADAPTER).is_dir():
        merge_lora(model, load_lora(folder / ADAPTER, model))
    return model


def read_config(folder: Path) -> TransformerConfig:
    """Return the shape of the model of `folder`.

    Raises:
        CheckpointError: `config.json` is missing or damaged.
        ConfigError: it needs unsupported features.
    """
    data = _read(folder)
    data.pop(CONFIG_KEY, None)
    return convert.read_config(data, str(folder / "config.json"))


def _read(folder: Path) -> dict[str, Any]:
    try:
        data = load_json(folder / "config.json")
    except (OSError, ValueError) as error:
        raise _unreadable(folder, error) from error
    if not isinstance(data, dict):
        raise _unreadable(folder, TypeError(f"config.json holds a {type(data).__name__}"))
    return data


def _unreadable(folder: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"cannot read a model from {folder}: {error}",
        expected="config.json and model.safetensors as `save_model` writes them",
        do="use a model listed by `whorl ls`",
    )
