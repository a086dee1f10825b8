"""Quantized language models: which matrices are quantized, and their files.

The folder has the files of any model (`serialization.py`) with two differences. config.json has `quantization`. In
model.safetensors a quantized matrix NAME.weight is NAME.codes and NAME.scales (`nn/quantized_linear.py`); the n-gram tables
are memory.codes_N and memory.scales_N, and the head is head_product.codes and .scales. `load_model` reads both forms.

Not quantized: the embedding, norms, routers, experts, matrices that a layer reads without `Linear.forward` (MLA's kv_b,
which is absorbed; those of recurrent layers), and matrices with fewer than 16 rows or columns (gates).

Subtle point: in a tied model the head product is quantized and the embedding is not, so both are stored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from whorl.errors import CheckpointError, ConfigError
from whorl.nn.attention import MultiHeadLatentAttention
from whorl.nn.compiler import meta_device
from whorl.nn.linear import Linear
from whorl.nn.mamba import Mamba
from whorl.nn.ngram import NGramEmbedding
from whorl.nn.quantized_linear import QuantizedLinear, QuantizedNGramEmbedding, WeightFormat
from whorl.nn.recurrent import Recurrent
from whorl.store.files import require_regular

if TYPE_CHECKING:
    from whorl.models.language_model import LanguageModel

CONFIG_KEY = "quantization"  # in config.json
HEAD_NAME = "head_product"
MIN_EXTENT = 16


class QuantizationConfig(BaseModel):
    """Format of a model's matrices."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: WeightFormat = "int8"
    group_size: int | None = Field(
        default=None, ge=2, description="columns per scale; default: the whole row"
    )
    dynamic: bool = Field(default=False, description="quantize activations too, row by row")
    rounding: str = Field(
        default="nearest", pattern="^(nearest|calibrated)$", description="method that finds the codes"
    )
    head: bool = Field(default=False, description="quantize the output matrix to int8, one scale per row")
    ngram: bool = Field(default=False, description="quantize n-gram tables to int8, one scale per row")

    @model_validator(mode="after")
    def _validate(self) -> QuantizationConfig:
        if self.dynamic and (self.group_size is not None or self.format == "int4"):
            raise ValueError("dynamic needs one scale per row: int8 or fp8, without group_size")
        if self.group_size is not None and self.group_size % 2:
            raise ValueError(f"group_size ({self.group_size}) must be even")
        return self

    def __str__(self) -> str:
        parts = [self.format, *(["dynamic"] if self.dynamic else [])]
        parts += [f"groups of {self.group_size}"] if self.group_size else []
        parts += [self.rounding] if self.rounding != "nearest" else []
        return ", ".join(parts)


def layers_read_directly(model: nn.Module) -> set[str]:
    """Return the names of layers whose weight is read without `Linear.forward`."""
    layers = {MultiHeadLatentAttention: ("kv_b",), Mamba: ("delta",), Recurrent: ("inward", "recurrent")}
    return {
        f"{path}.{name}"
        for path, module in model.named_modules()
        for kind, names in layers.items()
        if isinstance(module, kind)
        for name in names
    }


def quantizable_layers(model: nn.Module) -> list[str]:
    """Return the names of the block layers that can be quantized (see the top of this file)."""
    excluded = layers_read_directly(model)
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, Linear) and name.startswith("blocks.") and name not in excluded
        and min(module.weight.shape) >= MIN_EXTENT
    ]  # fmt: skip


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replace the module called `name`."""
    owner, _, last = name.rpartition(".")
    setattr(model.get_submodule(owner), last, module)


def head_as_linear(model: LanguageModel) -> Linear:
    """Return the output matrix as a layer."""
    with meta_device():
        layer = Linear(*reversed(model.head_weight.shape), std=0.0)
    layer.weight = nn.Parameter(model.head_weight.detach(), requires_grad=False)
    return layer


def set_head_layer(model: LanguageModel, layer: QuantizedLinear) -> None:
    """Compute logits with `layer`; the model's own output matrix is dropped."""
    model.head = None
    setattr(model, HEAD_NAME, layer)


def save_quantized(model: LanguageModel, folder: Path) -> None:
    """Write `config.json` and `model.safetensors`; weights that are not quantized keep their type."""
    scheme = model.quantization
    assert isinstance(scheme, QuantizationConfig)
    config = model.config.model_dump(mode="json")
    config = {"architectures": ["Transformer"], "model_type": "whorl", "transformer": config}
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**config, CONFIG_KEY: scheme.model_dump(mode="json")}, indent=2)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    state = {name: t.detach().cpu().contiguous().clone() for name, t in model.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def load_quantized(
    folder: Path,
    config_data: Any,
    make: Callable[[], LanguageModel],
    dtype: torch.dtype,
    device: str,
) -> LanguageModel:
    """Load a model that `save_quantized` wrote.

    Args:
        config_data: the value of `quantization` in config.json.
        make: returns an untrained model of its shape.

    Raises:
        CheckpointError: a file is damaged, or a tensor is missing, unknown, or of another shape or type.
    """
    where = folder / "model.safetensors"
    try:
        scheme = QuantizationConfig.model_validate(config_data)
        found: Mapping[str, Tensor] = load_file(require_regular(where), device=device)
    except (OSError, ValueError, SafetensorError, ValidationError) as error:
        raise CheckpointError(
            f"cannot read a model from {folder}: {error}",
            expected="config.json and model.safetensors as `whorl quantize` writes them",
        ) from error
    with meta_device():
        model = make()
    if any(name not in model.state_dict() for name, _ in model.named_buffers()):
        model = make()  # initializes buffers that are not stored
    with meta_device():
        _install_quantized_layers(
            model, scheme, [n.removesuffix(".codes") for n in found if n.endswith(".codes")], where
        )
    wanted = {name: (tuple(t.shape), _dtype_class(t)) for name, t in model.state_dict().items()}
    given = {name: (tuple(t.shape), _dtype_class(t)) for name, t in found.items()}
    if wanted != given:
        name = min(n for n in wanted.keys() | given.keys() if wanted.get(n) != given.get(n))
        raise CheckpointError(
            f"{where}: tensor {name!r} is {given.get(name, 'missing')}",
            expected=f"{wanted.get(name, 'no such tensor')} by config.json",
        )
    # Copied for alignment: tensors in a file begin at any byte, and kernels read whole cache lines.
    model.load_state_dict({name: t.clone() for name, t in found.items()}, assign=True)
    for p in model.parameters():
        p.requires_grad_(False)
    for layer in model.modules():
        if isinstance(layer, Linear) and not isinstance(layer, QuantizedLinear):
            layer.weight.data = layer.weight.data.to(dtype)
    if model.head is not None:
        model.head.data = model.head.data.to(dtype)
    return model.to(device).eval()


def _dtype_class(t: Tensor) -> str:
    """Return "float" for every floating-point type, since the stored precision may vary."""
    return "float" if t.dtype in (torch.float32, torch.bfloat16, torch.float16) else str(t.dtype)


def _install_quantized_layers(
    model: LanguageModel, scheme: QuantizationConfig, names: list[str], where: Path
) -> None:
    """Install empty quantized layers under the names found in a file."""
    for name in names:
        if name == HEAD_NAME:
            vocab, d = model.head_weight.shape
            set_head_layer(model, QuantizedLinear(d, vocab, "int8"))
            continue
        try:
            layer = model.get_submodule(name)
        except AttributeError:
            layer = None
        if not isinstance(layer, Linear):
            raise CheckpointError(
                f"{where}: tensor '{name}.codes' belongs to no matrix",
                expected="a layer of the model in config.json",
            )
        d_out, d_in = layer.weight.shape
        bias = layer.bias is not None
        try:
            replace_module(
                model,
                name,
                QuantizedLinear(
                    d_in, d_out, scheme.format, scheme.group_size, dynamic=scheme.dynamic, bias=bias
                ),
            )
        except ConfigError as error:
            raise CheckpointError(f"{where}: {name}: {error.what}", expected=error.expected) from error
    memory = getattr(model, "memory", None)
    if scheme.ngram and isinstance(memory, NGramEmbedding):
        model.memory = QuantizedNGramEmbedding(memory.orders, memory.buckets, memory.tables[0].shape[1])
    model.quantization = scheme
