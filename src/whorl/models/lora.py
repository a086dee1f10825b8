"""LoRA adapters: low-rank updates of a model's matrices, on disk and merged.

    y = W x + scale * B A x          A [r, in], B [out, r], scale = alpha / r, or alpha / sqrt(r)

(Hu et al. 2021, arXiv:2106.09685, eq. 3; rsLoRA's root: Kalajdzievski 2023, arXiv:2312.03732.) B starts at 0, so a new
adapter changes nothing. The files are those of the PEFT library: adapter_config.json, and in adapter_model.safetensors,
for each layer,

    base_model.model.NAME.lora_A.weight [r, in]        base_model.model.NAME.lora_B.weight [out, r]

NAME is a layer of this model (blocks.0.mixer.q) or of its Hugging Face family (model.layers.0.self_attn.q_proj). The
family's conversion rules (`models/exchange`) map the second to the first.

Subtle point: some families store gate and up apart, and this package stores them as one matrix. Their two adapters become
one of the summed rank: A is stacked, and B is block-diagonal, with 0 for a half without an adapter.

`engine/model/multi_lora.py` serves several adapters in one batch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from whorl.errors import CheckpointError, ConfigError
from whorl.models.compression.quantize import layers_read_directly
from whorl.models.exchange import FAMILIES
from whorl.models.exchange.rules import ConversionRule
from whorl.models.exchange.safetensors_io import read_json
from whorl.models.language_model import LanguageModel
from whorl.models.transformer import Transformer
from whorl.nn.linear import Linear
from whorl.nn.quantized_linear import QuantizedLinear
from whorl.store.files import require_regular

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
ADAPTER = "adapter"  # folder of an adapter next to its base model
PREFIX = "base_model.model."
FACTOR_SUFFIXES = (".lora_A.weight", ".lora_B.weight")
UNSUPPORTED_DEFAULTS = {
    "use_dora": False,
    "fan_in_fan_out": False,
    "lora_bias": False,
    "modules_to_save": None,
    "bias": "none",
}


@dataclass(frozen=True)
class LoRAFactors:
    """Factors of one layer. a: [r, in]; b: [out, r]; scale: of their product."""

    a: Tensor
    b: Tensor
    scale: float

    @property
    def delta(self) -> Tensor:
        """Return the update of the weight, [out, in] fp32."""
        return self.scale * (self.b.float() @ self.a.float())


@dataclass(frozen=True)
class LoRA:
    """One adapter: layer name -> factors."""

    factors: Mapping[str, LoRAFactors]

    @property
    def rank(self) -> int:
        """Return the largest rank of all layers."""
        return max(len(part.a) for part in self.factors.values())


def target_modules(model: LanguageModel) -> dict[str, Linear]:
    """Return the layers of the blocks that an adapter may change: those that apply their weight by `Linear.forward` only."""
    excluded = layers_read_directly(model)
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Linear) and name.startswith("blocks.") and name not in excluded
    }


def init_lora(
    model: LanguageModel,
    rank: int,
    alpha: float,
    layer_suffixes: Collection[str] = (),
    generator: torch.Generator | None = None,
) -> LoRA:
    """Return a new adapter with B = 0, on the model's device.

    layer_suffixes: ends of layer names, such as "mixer.q"; by default all layers of `target_modules`.

    Raises:
        ConfigError: no layer matches; a rank below 1.
    """
    if rank < 1:
        raise ConfigError(f"rank is {rank}", expected="at least 1")
    parts = {}
    for name, layer in target_modules(model).items():
        if not layer_suffixes or name.endswith(tuple(f".{end}" for end in layer_suffixes)):
            d_out, d_in = layer.weight.shape
            a = torch.randn(rank, d_in, generator=generator) * d_in**-0.5
            b = torch.zeros(d_out, rank)
            device = layer.weight.device
            parts[name] = LoRAFactors(a.to(device), b.to(device), alpha / rank)
    if not parts:
        raise ConfigError(
            f"no layer name ends with {sorted(layer_suffixes)}", expected=_some_layer_names(model)
        )
    return LoRA(parts)


@torch.no_grad()
def merge_lora(model: LanguageModel, lora: LoRA) -> None:
    """Add an adapter to the model's weights, in place.

    Raises:
        ConfigError: it does not fit, or one of its matrices is quantized.
    """
    check_lora(lora, model)
    layers = target_modules(model)
    for name in lora.factors:
        if isinstance(layers[name], QuantizedLinear):
            raise ConfigError(
                f"{name} is quantized: an adapter cannot be merged into it",
                expected="a model in full precision",
                do="merge first, then quantize; or serve the adapter unmerged",
            )
    for name, part in lora.factors.items():
        weight = layers[name].weight
        weight.copy_(weight.float() + part.delta.to(weight.device))


def check_lora(lora: LoRA, model: LanguageModel, label: str = "the adapter") -> None:
    """Check that every tensor fits its layer.

    Raises:
        ConfigError: a tensor does not; the message names it.
    """
    layers = target_modules(model)
    if not lora.factors:
        raise ConfigError(f"{label} changes no layer", expected="factors of at least one layer")
    for name, part in lora.factors.items():
        if name not in layers:
            raise ConfigError(
                f"{label}: {name!r} is no layer that an adapter can change",
                expected=_some_layer_names(model),
            )
        d_out, d_in = layers[name].weight.shape
        rank = len(part.a)
        for side, t, want in (("lora_A", part.a, (rank, d_in)), ("lora_B", part.b, (d_out, rank))):
            tensor = f"{label}: tensor {PREFIX}{name}.{side}.weight"
            if tuple(t.shape) != want:
                raise ConfigError(f"{tensor} has the shape {list(t.shape)}", expected=f"{list(want)}")
            if not t.is_floating_point() or not t.isfinite().all():
                raise ConfigError(f"{tensor} is not finite", expected="finite floating-point numbers")


def save_lora(lora: LoRA, folder: Path, base: str = "") -> None:
    """Write an adapter under this package's layer names; base: name of its base model, for information."""
    ranks = {name: len(part.a) for name, part in lora.factors.items()}
    alphas = {name: part.scale * len(part.a) for name, part in lora.factors.items()}
    rank, alpha = next(iter(ranks.values())), next(iter(alphas.values()))
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True,
        "r": rank, "lora_alpha": alpha, "lora_dropout": 0.0, "use_rslora": False, **UNSUPPORTED_DEFAULTS,
        "target_modules": sorted(ranks),
        "rank_pattern": {name: r for name, r in ranks.items() if r != rank},
        "alpha_pattern": {name: a for name, a in alphas.items() if a != alpha},
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tensors = {
        f"{PREFIX}{name}{side}": t.detach().cpu().contiguous().clone()
        for name, part in lora.factors.items()
        for side, t in zip(FACTOR_SUFFIXES, (part.a, part.b), strict=True)
    }
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def load_lora(folder: Path, model: LanguageModel) -> LoRA:
    """Load an adapter in PEFT's format for `model`.

    Raises:
        CheckpointError: a file is missing or damaged.
        ConfigError: it does not fit the model, or uses unsupported options; the tensor or the field is named.
    """
    config = read_json(folder / CONFIG_FILE)
    if config.get("peft_type") != "LORA":
        raise ConfigError(
            f"{folder / CONFIG_FILE}: peft_type is {config.get('peft_type')!r}", expected="'LORA'"
        )
    for field, default in UNSUPPORTED_DEFAULTS.items():
        given = config.get(field)  # absent or null in adapters of older versions
        if given is not None and given != default and not (field == "modules_to_save" and given == []):
            raise ConfigError(f"{folder / CONFIG_FILE}: {field} is {given!r}", expected=f"{default!r}")
    try:
        tensors = load_file(require_regular(folder / WEIGHTS_FILE))
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"{folder / WEIGHTS_FILE} cannot be read: {error}",
            expected="an adapter as PEFT's `save_pretrained` writes it",
        ) from error
    factors_by_name: dict[str, LoRAFactors] = {}
    where = str(folder / WEIGHTS_FILE)
    for tensor in sorted(tensors):
        name = tensor.removeprefix(PREFIX).removesuffix(FACTOR_SUFFIXES[0]).removesuffix(FACTOR_SUFFIXES[1])
        if not tensor.startswith(PREFIX) or not tensor.endswith(FACTOR_SUFFIXES):
            raise ConfigError(
                f"{where}: tensor {tensor} is unknown",
                expected=f"{PREFIX}LAYER{FACTOR_SUFFIXES[0]} or {FACTOR_SUFFIXES[1]}",
            )
        missing = [PREFIX + name + side for side in FACTOR_SUFFIXES if PREFIX + name + side not in tensors]
        if missing:
            raise ConfigError(
                f"{where}: tensor {missing[0]} is missing", expected="both factors of every layer"
            )
        a, b = (tensors[PREFIX + name + side] for side in FACTOR_SUFFIXES)
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
            raise ConfigError(
                f"{where}: tensors {PREFIX}{name}.lora_A and lora_B have the shapes {list(a.shape)} and {list(b.shape)}",
                expected="[r, in] and [out, r], of one rank r",
            )
        rank = int(_pattern(config, "rank_pattern", name, config.get("r", len(a))))
        if rank != len(a):
            raise ConfigError(
                f"{where}: tensor {PREFIX}{name}{FACTOR_SUFFIXES[0]} has {len(a)} rows",
                expected=f"r = {rank}",
            )
        alpha = float(_pattern(config, "alpha_pattern", name, config.get("lora_alpha", rank)))
        factors_by_name[name] = LoRAFactors(
            a, b, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        )
    lora = LoRA(_map_layer_names(factors_by_name, model, where))
    check_lora(lora, model, where)
    return lora


def _pattern(config: Mapping[str, Any], field: str, name: str, default: Any) -> Any:
    """Look up a layer in a PEFT pattern, which has full layer names or their ends as keys."""
    patterns: Mapping[str, Any] = config.get(field) or {}
    return next((v for key, v in patterns.items() if name == key or name.endswith(f".{key}")), default)


def _map_layer_names(
    factors: Mapping[str, LoRAFactors], model: LanguageModel, label: str
) -> dict[str, LoRAFactors]:
    """Return the factors by this package's layer names, converted by a family's rules if necessary."""
    layers = target_modules(model)
    if all(name in layers for name in factors) or not isinstance(model, Transformer):
        return dict(factors)
    for family in FAMILIES.values():
        try:
            rules = {t: rule for rule in family.rules(model.config) for t in rule.hf_names}
        except (ConfigError, AttributeError):  # this model cannot be of that family
            continue
        if any(f"{name}.weight" not in rules for name in factors):
            continue
        found: dict[str, LoRAFactors] = {}
        for rule in {id(r): r for r in (rules[f"{name}.weight"] for name in factors)}.values():
            parts = [factors.get(t.removesuffix(".weight")) for t in rule.hf_names]
            name = rule.names[0].removesuffix(".weight")
            if len(rule.names) > 1 or name not in layers or not _is_row_concat(rule, layers[name]):
                raise ConfigError(
                    f"{label}: {rule.hf_names[0]} is only a part of a matrix of this model",
                    expected=f"layers as {_some_layer_names(model)}",
                )
            found[name] = _block_diagonal(parts, layers[name].weight.shape[0] // len(parts))
        return found
    return dict(factors)


def _is_row_concat(rule: ConversionRule, layer: Linear) -> bool:
    """Return whether a rule only stacks the family's matrices row-wise into `layer`."""
    d_out, d_in = layer.weight.shape
    n = len(rule.hf_names)
    whole = torch.arange(d_out * d_in, dtype=torch.float32).view(d_out, d_in)
    return d_out % n == 0 and torch.equal(rule.from_hf(list(whole.chunk(n)))[0], whole)


def _block_diagonal(parts: list[LoRAFactors | None], rows: int) -> LoRAFactors:
    """Return the factors of a matrix stacked from several; None: a part without an adapter."""
    if len(parts) == 1:
        return cast(LoRAFactors, parts[0])
    present = [part for part in parts if part is not None]
    blocks = []
    for part in parts:
        b = torch.zeros(rows, sum(len(p.a) for p in present))
        start = 0
        for other in present:
            if other is part:
                b[:, start : start + len(other.a)] = other.b.float() * other.scale
            start += len(other.a)
        blocks.append(b)
    return LoRAFactors(torch.cat([p.a.float() for p in present]), torch.cat(blocks), 1.0)


def _some_layer_names(model: LanguageModel) -> str:
    names = list(target_modules(model))
    return ", ".join(names[:4]) + (f", ... ({len(names)} in all)" if len(names) > 4 else "")
