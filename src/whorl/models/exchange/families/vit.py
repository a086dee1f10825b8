"""ViT (Dosovitskiy et al. 2020, arXiv:2010.11929) in the format of `transformers`, and the parts shared with CLIP.

As `family.py` for language models: a table of fields and a table of tensors for both directions, for networks that are not
a `Transformer`. `architectures` distinguishes two kinds of folders:

    ViTForImageClassification    tensors "vit. ...", and "classifier"       -> a ViT with a head
    ViTModel                     the same without the prefix, no classifier -> a ViT with classes = 0, for `features`

The subtle part is the layer between the class token and the classifier. A `ViTModel` may hold a "pooler", a dense layer with
tanh, which the classifier does not use. In most files it is random; it is left unread, with a warning. Absent fields have
the defaults of the family's own programs: an eps of 1e-12, where the paper's code has 1e-6.

The first map is a convolution in the files, [d, C, p, p], and a matrix in Whorl, [d, C p p] (`nn/patches.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from pydantic import BaseModel
from torch import nn

from whorl.models.exchange.fields import ConfigReader
from whorl.models.exchange.rules import ConversionRule, converted, unchanged
from whorl.models.vision.vit import ViT, ViTConfig
from whorl.nn.mlp import Activation

C = TypeVar("C", bound=BaseModel)
N = TypeVar("N", bound=nn.Module)


@dataclass(frozen=True)
class VisionFamily(Generic[C, N]):
    """One family of vision models.

    model_type: its name in `config.json`; network: the class in Whorl; config_of: model -> configuration; build:
    (configuration, compute type) -> model; ignored_tensors: a pattern of tensors that may be left unread;
    dropped_tensors: the same, with a warning; sub_fields: (object in config.json, field) copied from a source, in addition
    to labels.
    """

    model_type: str
    network: type[N]
    config_of: Callable[[N], C]
    build: Callable[[C, torch.dtype], N]
    read: Callable[[ConfigReader, Collection[str]], C]
    write: Callable[[C], dict[str, Any]]
    rules: Callable[[C], list[ConversionRule]]
    ignored_tensors: str = ""
    dropped_tensors: str = ""
    sub_fields: tuple[tuple[str, str], ...] = ()


ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "quick_gelu": "quick_gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
# Fields of old files that are on in all of them, about text generation or training; and class names.
LEGACY_FIELDS = (
    *("id2label", "label2id", "initializer_factor", "length_penalty", "max_length", "num_beam_groups", "num_beams"),
    *("num_return_sequences", "repetition_penalty", "return_dict", "temperature", "tie_word_embeddings", "top_k", "top_p"),
    *("typical_p", "tokenizer_class", "dropout", "output_attentions", "output_hidden_states"),
)  # fmt: skip


def read_blocks(fields: ConfigReader, width: int, hidden: int, n_heads: int, act: str) -> dict[str, Any]:
    """Return the arguments that all towers have. The other arguments are values of absent fields."""
    return {
        "d_model": fields.get("hidden_size", int, width),
        "n_layers": fields.get("num_hidden_layers", int, 12),
        "n_heads": fields.get("num_attention_heads", int, n_heads),
        "mlp": fields.choose("hidden_act", ACTIVATIONS, act),
        "mlp_hidden": fields.get("intermediate_size", int, hidden),
    }


def read_grid(fields: ConfigReader, patch: int) -> dict[str, Any]:
    """Return pixels of an image and of a patch. patch: the value of an absent field."""
    return {
        "image_size": _side(fields, "image_size", 224),
        "patch": _side(fields, "patch_size", patch),
        "channels": fields.get("num_channels", int, 3),
    }


def _side(fields: ConfigReader, name: str, default: int) -> int:
    """Return a number, given as a number or as a pair of equal numbers."""
    if not isinstance(pair := fields.data.get(name), list):
        return fields.get(name, int, default)
    fields.mark_read(name)
    if len(pair) != 2 or pair[0] != pair[1] or not isinstance(pair[0], int):
        raise fields.error(name, "a square")
    return pair[0]


def write_blocks(d_model: int, n_layers: int, n_heads: int, mlp: Activation, hidden: int) -> dict[str, Any]:
    acts = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    return {
        "hidden_size": d_model,
        "num_hidden_layers": n_layers,
        "num_attention_heads": n_heads,
        "hidden_act": acts.get(mlp, mlp),
        "intermediate_size": hidden,
    }


def write_grid(config: ViTConfig) -> dict[str, Any]:
    return {"image_size": config.image_size, "patch_size": config.patch, "num_channels": config.channels}


def weight_bias_rules(hf_prefix: str, prefix: str, names: dict[str, str]) -> list[ConversionRule]:
    """Return rules for a weight and a bias of each pair of names, with their prefixes."""
    return [
        unchanged(f"{hf_prefix}{a}.{kind}", f"{prefix}{b}.{kind}") for a, b in names.items() for kind in ("weight", "bias")
    ]  # fmt: skip


def patch_rule(hf_name: str, name: str, config: ViTConfig) -> ConversionRule:
    """Return the rule of a convolution's kernel as a matrix."""
    kernel = (config.channels, config.patch, config.patch)
    return converted(hf_name, name, lambda t: t.flatten(1), lambda t: t.reshape(len(t), *kernel))


ARCHITECTURE_HAS_HEAD = {"ViTForImageClassification": True, "ViTModel": False}


def read_vit(fields: ConfigReader, ignore: Collection[str] = ()) -> ViTConfig:
    named = fields.get("architectures", list)
    if len(named) != 1 or named[0] not in ARCHITECTURE_HAS_HEAD:
        raise fields.error("architectures", " or ".join(f"[{name!r}]" for name in ARCHITECTURE_HAS_HEAD))
    classes = 0
    if ARCHITECTURE_HAS_HEAD[named[0]]:
        labels = fields.optional("id2label", dict)
        classes = fields.get("num_labels", int, 2) if labels is None else len(labels)
        if not classes:
            raise fields.error("id2label", "at least one label")
    fields.must_be("qkv_bias", True)
    fields.mark_read("num_labels", "hidden_dropout_prob", "attention_probs_dropout_prob", "encoder_stride")
    fields.mark_read("pooler_act", "pooler_output_size", *LEGACY_FIELDS)
    config = ViTConfig(
        **read_grid(fields, 16),
        **read_blocks(fields, 768, 3072, 12, "gelu"),
        classes=classes,
        eps=fields.get("layer_norm_eps", float, 1e-12),
    )
    fields.reject_unread(ignore)
    return config


def write_vit(config: ViTConfig) -> dict[str, Any]:
    c = config
    fields = {
        "architectures": [name for name, head in ARCHITECTURE_HAS_HEAD.items() if head == (c.classes > 0)],
        "layer_norm_eps": c.eps,
        "qkv_bias": True,
        **write_grid(c),
        **write_blocks(c.d_model, c.n_layers, c.n_heads, c.mlp, c.mlp_hidden),
    }
    if not c.classes:
        return fields
    labels = [f"LABEL_{n}" for n in range(c.classes)]  # the number of labels is stored nowhere else
    return fields | {
        "id2label": {str(n): label for n, label in enumerate(labels)},
        "label2id": {label: n for n, label in enumerate(labels)},
    }


_BLOCK = {
    "layernorm_before": "attention_norm",
    "attention.attention.query": "attention.q",
    "attention.attention.key": "attention.k",
    "attention.attention.value": "attention.v",
    "attention.output.dense": "attention.out",
    "layernorm_after": "mlp_norm",
    "intermediate.dense": "mlp.up",
    "output.dense": "mlp.down",
}


def vit_rules(config: ViTConfig) -> list[ConversionRule]:
    p = "vit." if config.classes else ""
    patches = f"{p}embeddings.patch_embeddings.projection"
    rules = [
        patch_rule(f"{patches}.weight", "embedding.linear.weight", config),
        unchanged(f"{patches}.bias", "embedding.linear.bias"),
        converted(f"{p}embeddings.cls_token", "class_token", lambda t: t[0, 0], lambda t: t[None, None]),
        converted(f"{p}embeddings.position_embeddings", "positions", lambda t: t[0], lambda t: t[None]),
        *weight_bias_rules(p, "", {"layernorm": "norm"}),
    ]
    for n in range(config.n_layers):
        rules += weight_bias_rules(f"{p}encoder.layer.{n}.", f"blocks.{n}.", _BLOCK)
    return rules + (weight_bias_rules("", "", {"classifier": "head"}) if config.classes else [])


def _build(config: ViTConfig, dtype: torch.dtype) -> ViT:
    return ViT(**config.model_dump(), dtype=dtype)


VIT = VisionFamily(
    "vit",
    ViT,
    lambda model: model.config,
    _build,
    read_vit,
    write_vit,
    vit_rules,
    dropped_tensors=r"pooler\.dense\..*",
)
