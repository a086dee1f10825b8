"""A LoRA adapter: a small change to a model's matrices, as it lies on disk and as it is merged.

    y = W x + scale * B A x          A [r, in], B [out, r], scale = alpha / r, or alpha / sqrt(r)

(Hu et al. 2021, arXiv:2106.09685, eq. 3; the root: Kalajdzievski 2023, arXiv:2312.03732.) B starts at 0, so an adapter
starts as no change. On disk it has the names that the library PEFT gives it: adapter_config.json, and in
adapter_model.safetensors, for each layer,

    base_model.model.NAME.lora_A.weight [r, in]        base_model.model.NAME.lora_B.weight [out, r]

NAME is a layer of ours (blocks.0.mixer.q), or of the family that others know the model as (model.layers.0.self_attn.q_proj):
then the rules by which its weights were imported (`models/exchange`) say which layer of ours that is.

The subtle part is where two of theirs are one matrix of ours, gate above up. Their adapters have factors of their own, so
ours has both ranks: A is one above the other, B is block-diagonal, with 0 for a half that has no adapter.

Adapters of several kinds in one batch are in `adapters.py`.
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
from whorl.models.exchange import FAMILIES
from whorl.models.exchange.safetensors_io import read_json
from whorl.models.language_model import LanguageModel
from whorl.models.quantization.weights import layers_read_directly
from whorl.models.transformer import Transformer
from whorl.nn.linear import Linear
from whorl.nn.quantized_linear import QuantizedLinear

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
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
    """Of one layer. a: [r, in]; b: [out, r]; scale: of their product."""

    a: Tensor
    b: Tensor
    scale: float

    @property
    def delta(self) -> Tensor:
        """[out, in] fp32: what is added to the weight."""
        return self.scale * (self.b.float() @ self.a.float())


@dataclass(frozen=True)
class LoRA:
    """One adapter: name of a layer -> its factors."""

    factors: Mapping[str, LoRAFactors]

    @property
    def rank(self) -> int:
        """The largest."""
        return max(len(part.a) for part in self.factors.values())


def target_modules(model: LanguageModel) -> dict[str, Linear]:
    """Layers of the blocks that an adapter may change: those whose product is all that their weight is for."""
    apart = layers_read_directly(model)
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Linear) and name.startswith("blocks.") and name not in apart
    }


def init_lora(
    model: LanguageModel,
    rank: int,
    alpha: float,
    layer_suffixes: Collection[str] = (),
    generator: torch.Generator | None = None,
) -> LoRA:
    """An adapter that changes nothing yet, on the model's device. layers: ends of names, as "mixer.q"; by default all.

    Raises:
        ConfigError: no layer has such a name; a rank below 1.
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
            f"layers: none ends with {sorted(layer_suffixes)}", expected=_some_layer_names(model)
        )
    return LoRA(parts)


@torch.no_grad()
def merge_lora(model: LanguageModel, lora: LoRA) -> None:
    """Adds an adapter to the model's weights, in place.

    Raises:
        ConfigError: it does not fit, or a matrix that it changes is quantised.
    """
    check_lora(lora, model)
    layers = target_modules(model)
    for name in lora.factors:
        if isinstance(layers[name], QuantizedLinear):
            raise ConfigError(
                f"{name} is quantised: an adapter cannot be merged into it",
                expected="a model in full precision",
                do="merge first, then quantise; or serve the adapter beside the model",
            )
    for name, part in lora.factors.items():
        weight = layers[name].weight
        weight.copy_(weight.float() + part.delta.to(weight.device))


def check_lora(lora: LoRA, model: LanguageModel, label: str = "the adapter") -> None:
    """Raises ConfigError, with the name of the tensor, unless every part fits its layer."""
    layers = target_modules(model)
    if not lora.factors:
        raise ConfigError(f"{label} changes no layer", expected="factors of at least one")
    for name, part in lora.factors.items():
        if name not in layers:
            raise ConfigError(
                f"{label}: there is no layer {name!r} that could be adapted",
                expected=_some_layer_names(model),
            )
        d_out, d_in = layers[name].weight.shape
        rank = len(part.a)
        for side, t, want in (("lora_A", part.a, (rank, d_in)), ("lora_B", part.b, (d_out, rank))):
            tensor = f"{label}: tensor {PREFIX}{name}.{side}.weight"
            if tuple(t.shape) != want:
                raise ConfigError(f"{tensor} has the shape {list(t.shape)}", expected=f"{list(want)}")
            if not t.is_floating_point() or not t.isfinite().all():
                raise ConfigError(
                    f"{tensor} holds what is no finite number", expected="floating-point numbers"
                )


def save_lora(lora: LoRA, folder: Path, base: str = "") -> None:
    """Writes an adapter under our own layers' names. base: what it belongs to, as a word for people."""
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
    """An adapter as PEFT writes it, for `model`.

    Raises:
        CheckpointError: a file is missing or damaged. ConfigError: it does not fit the model, or has options that are not
            supported; the tensor or the field is named.
    """
    config = read_json(folder / CONFIG_FILE)
    if config.get("peft_type") != "LORA":
        raise ConfigError(
            f"{folder / CONFIG_FILE}: peft_type is {config.get('peft_type')!r}", expected="'LORA'"
        )
    for field, off in UNSUPPORTED_DEFAULTS.items():
        if config.get(field, off) not in (off, None, [], False):
            raise ConfigError(f"{folder / CONFIG_FILE}: {field} is {config[field]!r}", expected=f"{off!r}")
    try:
        tensors = load_file(folder / WEIGHTS_FILE)
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"{folder / WEIGHTS_FILE} cannot be read: {error}",
            expected="an adapter as PEFT's `save_pretrained` writes it",
        ) from error
    theirs: dict[str, LoRAFactors] = {}
    where = str(folder / WEIGHTS_FILE)
    for tensor in sorted(tensors):
        name = tensor.removeprefix(PREFIX).removesuffix(FACTOR_SUFFIXES[0]).removesuffix(FACTOR_SUFFIXES[1])
        if not tensor.startswith(PREFIX) or not tensor.endswith(FACTOR_SUFFIXES):
            raise ConfigError(
                f"{where}: tensor {tensor} is not known",
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
        theirs[name] = LoRAFactors(a, b, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))
    lora = LoRA(_map_layer_names(theirs, model, where))
    check_lora(lora, model, where)
    return lora


def _pattern(config: Mapping[str, Any], field: str, name: str, default: Any) -> Any:
    """PEFT's patterns are names of layers, or ends of them."""
    patterns: Mapping[str, Any] = config.get(field) or {}
    return next((v for key, v in patterns.items() if name == key or name.endswith(f".{key}")), default)


def _map_layer_names(
    factors: Mapping[str, LoRAFactors], model: LanguageModel, label: str
) -> dict[str, LoRAFactors]:
    """Factors by our layers' names, if need be by way of a family's rules."""
    layers = target_modules(model)
    if all(name in layers for name in factors) or not isinstance(model, Transformer):
        return dict(factors)
    for family in FAMILIES.values():
        try:
            rules = {t: rule for rule in family.rules(model.config) for t in rule.hf_names}
        except (ConfigError, AttributeError):  # a family that this model cannot be of
            continue
        if any(f"{name}.weight" not in rules for name in factors):
            continue
        found: dict[str, LoRAFactors] = {}
        for rule in {id(r): r for r in (rules[f"{name}.weight"] for name in factors)}.values():
            parts = [factors.get(t.removesuffix(".weight")) for t in rule.hf_names]
            ours = rule.names[0].removesuffix(".weight")
            if len(rule.names) > 1 or ours not in layers or not _is_row_concat(rule, layers[ours]):
                raise ConfigError(
                    f"{label}: {rule.hf_names[0]} is no matrix of ours by itself",
                    expected=f"layers as {_some_layer_names(model)}",
                )
            found[ours] = _block_diagonal(parts, layers[ours].weight.shape[0] // len(parts))
        return found
    return dict(factors)


def _is_row_concat(rule: Any, layer: Linear) -> bool:
    """Whether a rule puts theirs above each other in ours, and does nothing else to them."""
    d_out, d_in = layer.weight.shape
    n = len(rule.hf_names)
    whole = torch.arange(d_out * d_in, dtype=torch.float32).view(d_out, d_in)
    return d_out % n == 0 and torch.equal(rule.from_hf(list(whole.chunk(n)))[0], whole)


def _block_diagonal(parts: list[LoRAFactors | None], rows: int) -> LoRAFactors:
    """Factors of a matrix that is several of theirs above each other; None: a part without an adapter."""
    if len(parts) == 1:
        return cast(LoRAFactors, parts[0])
    there = [part for part in parts if part is not None]
    blocks = []
    for part in parts:
        b = torch.zeros(rows, sum(len(p.a) for p in there))
        at = 0
        for other in there:
            if other is part:
                b[:, at : at + len(other.a)] = other.b.float() * other.scale
            at += len(other.a)
        blocks.append(b)
    return LoRAFactors(torch.cat([p.a.float() for p in there]), torch.cat(blocks), 1.0)


def _some_layer_names(model: LanguageModel) -> str:
    names = list(target_modules(model))
    return ", ".join(names[:4]) + (f", ... ({len(names)} in all)" if len(names) > 4 else "")
