"""Families that differ from Llama by a few fields: Phi-3, SmolLM3, Granite and OLMo 2.

- Phi-3 and Phi-4 (arXiv:2404.14219, arXiv:2412.08905): one matrix for queries, keys and values, one for gate and up
  projection; Phi-4-mini rotates a part of each head. Models for long contexts (`longrope`) are refused.
- SmolLM3 (Hugging Face 2025): every fourth layer has no positions (arXiv:2501.18795), and may have a sliding window.
- Granite 3 (IBM 2024): four multipliers. Those of embedding and scores are fields of a `Transformer`. Those of both branches
  and of the logits become part of the weights (`fold_granite`), so that an exported Granite has 1 there.
- OLMo 2 (arXiv:2501.00656): norms after both branches and none before; queries and keys are normalized over all heads.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from whorl.models.exchange.families.llama import SILU, llama_rules, read_llama, write_llama
from whorl.models.exchange.family import (
    ModelFamily,
    embedding_and_head_rules,
    norm_rules,
    read_attention,
    read_shape,
    require_attention,
    shortest_pattern,
    unsupported_by_family,
    write_shape,
    write_windows,
)
from whorl.models.exchange.fields import ConfigReader, window_pattern
from whorl.models.exchange.rules import ConversionRule, unchanged
from whorl.models.transformer_config import TransformerConfig
from whorl.nn.mlp import GATED


def read_phi3(fields: ConfigReader) -> TransformerConfig:
    window = fields.optional("sliding_window", int, above=0)
    fields.mark_read("original_max_position_embeddings")  # of longrope
    heads = read_attention(
        fields, kv_heads=None, head_dim=None, base=10_000.0, partial=True, window=window, fused_qkv=True
    )
    if heads.rope is not None and heads.rope.scaling is not None:
        raise fields.error("rope_parameters", "rope_type 'default'", heads.rope.scaling.kind)
    shape = read_shape(fields, act=SILU, eps=1e-5, max_length=4096)
    return TransformerConfig(**shape, mixers={"full": heads})


def write_phi3(config: TransformerConfig) -> dict[str, Any]:
    heads = require_attention(config)[0]
    shape = write_shape(config, partial=True, head_dim=False)
    return shape | {"hidden_act": "silu", "sliding_window": heads.window}


def phi3_rules(config: TransformerConfig) -> list[ConversionRule]:
    if config.mlp not in GATED:
        raise unsupported_by_family(f"mlp is {config.mlp!r}", " or ".join(GATED))
    rules = embedding_and_head_rules(config)
    parts = {
        "self_attn.qkv_proj": "mixer.qkv",
        "self_attn.o_proj": "mixer.out",
        "mlp.gate_up_proj": "mlp.up",
        "mlp.down_proj": "mlp.down",
    }
    for n in range(config.n_layers):
        theirs, ours = f"model.layers.{n}.", f"blocks.{n}."
        rules += norm_rules(theirs, ours, config)
        rules += [unchanged(f"{theirs}{a}.weight", f"{ours}{b}.weight") for a, b in parts.items()]
    return rules


def read_smollm3(fields: ConfigReader) -> TransformerConfig:
    bias = fields.get("attention_bias", bool, False)
    heads = read_attention(fields, kv_heads=4, head_dim=None, base=2_000_000.0, bias=bias, out_bias=bias)
    shape = read_shape(fields, act=SILU, tied=True, max_length=32_768)
    n_layers, every = shape["n_layers"], fields.get("no_rope_layer_interval", int, 4, above=0)
    rotates = fields.get("no_rope_layers", list, [int((n + 1) % every != 0) for n in range(n_layers)])
    if len(rotates) < n_layers or not {*rotates} <= {0, 1}:
        raise fields.error("no_rope_layers", f"0 or 1 for each of {n_layers} layers")
    window = fields.optional("sliding_window", int, above=0)
    if not fields.get("use_sliding_window", bool, False):
        window = None
    slides = window_pattern(
        fields, n_layers, [window is not None and not rotates[n] for n in range(n_layers)]
    )
    names = [
        ("rope" if rotates[n] else "nope") + ("_sliding" if window and slides[n] else "")
        for n in range(n_layers)
    ]
    mixers: dict[str, Any] = {
        name: heads.model_copy(
            update={
                "rope": heads.rope if name.startswith("rope") else None,
                "window": window if name.endswith("_sliding") else None,
            }
        )
        for name in dict.fromkeys(names)
    }
    mlp_bias = fields.get("mlp_bias", bool, False)
    return TransformerConfig(**shape, mixers=mixers, pattern=shortest_pattern(names), mlp_bias=mlp_bias)


def write_smollm3(config: TransformerConfig) -> dict[str, Any]:
    heads, windows = require_attention(config), write_windows(config)
    rotates = [int(h.rope is not None) for h in heads]
    rotary = next((h for h in heads if h.rope is not None), heads[0])
    return write_shape(config, first=rotary) | windows | {
        "hidden_act": "silu", "attention_bias": rotary.bias, "mlp_bias": config.mlp_bias, "no_rope_layers": rotates,
        "use_sliding_window": windows["sliding_window"] is not None,
    }  # fmt: skip


def read_granite(fields: ConfigReader) -> TransformerConfig:
    config = read_llama(fields)
    scale = fields.get("attention_multiplier", float, 1.0, above=0)
    for name in ("residual_multiplier", "logits_scaling"):  # of `fold_granite`
        fields.get(name, float, 1.0, above=0)
    heads = require_attention(config)[0].model_copy(update={"scale": scale})
    multiplier = fields.get("embedding_multiplier", float, 1.0, above=0)
    return config.model_copy(update={"mixers": {"full": heads}, "embedding_scale": multiplier})


def write_granite(config: TransformerConfig) -> dict[str, Any]:
    heads = require_attention(config)[0]
    scale = heads.head_dim**-0.5 if heads.scale is None else heads.scale
    return write_llama(config) | {
        "attention_multiplier": scale, "embedding_multiplier": config.embedding_scale, "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
    }  # fmt: skip


def fold_granite(data: dict[str, Any], state: dict[str, Tensor]) -> None:
    """Multiply the weights behind both branches and the gains of the final norm by the multipliers of a file, in place."""
    for name, tensor in state.items():
        if name.endswith((".mixer.out.weight", ".mlp.down.weight", ".mixer.out.bias", ".mlp.down.bias")):
            tensor *= data.get("residual_multiplier") or 1.0
    state["final_norm.weight"] /= data.get("logits_scaling") or 1.0


def read_olmo2(fields: ConfigReader) -> TransformerConfig:
    llama = read_llama(fields, eps=1e-5, qk_norm="all_heads")
    return llama.model_copy(update={"sandwich": True, "pre_norm": False})


def write_olmo2(config: TransformerConfig) -> dict[str, Any]:
    shape, bias = write_shape(config, head_dim=False), require_attention(config)[0].bias
    return shape | {"hidden_act": "silu", "attention_bias": bias}


PHI3 = ModelFamily("phi3", "Phi3ForCausalLM", read_phi3, write_phi3, phi3_rules)
SMOLLM3 = ModelFamily("smollm3", "SmolLM3ForCausalLM", read_smollm3, write_smollm3, llama_rules)
GRANITE = ModelFamily(
    "granite", "GraniteForCausalLM", read_granite, write_granite, llama_rules, fold=fold_granite
)
OLMO2 = ModelFamily("olmo2", "Olmo2ForCausalLM", read_olmo2, write_olmo2, llama_rules)
