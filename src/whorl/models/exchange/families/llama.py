"""Llama and the families with small differences: Mistral, Qwen2, Qwen3.

- Llama (Touvron et al. 2023, arXiv:2302.13971; 3: Grattafiori et al. 2024, arXiv:2407.21783): pre-norm, RMS norms, rotary
  positions in the half-split layout, SwiGLU; from 2 on grouped queries, from 3.1 on rotary scaling.
- Mistral (Jiang et al. 2023, arXiv:2310.06825): every layer has a sliding window, if the field is not null.
- Qwen2 (Yang et al. 2024, arXiv:2407.10671): biases on queries, keys and values, not on the output; the layers from
  `max_window_layers` on have a sliding window if `use_sliding_window`.
- Qwen3 (Yang et al. 2025, arXiv:2505.09388): no biases; queries and keys are normalized over each head's features, and
  head_dim is a separate field.

Absent fields have the defaults of the family's own programs, so the defaults differ between functions here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from whorl.models.exchange.family import (
    ModelFamily,
    attention_rules,
    embedding_and_head_rules,
    mlp_rules,
    norm_rules,
    read_attention,
    read_shape,
    require_attention,
    sliding_mixers,
    write_shape,
    write_windows,
)
from whorl.models.exchange.fields import ConfigReader, window_pattern
from whorl.models.exchange.rules import ConversionRule
from whorl.models.transformer_config import AttentionConfig, TransformerConfig
from whorl.nn.mlp import Activation

SILU: dict[str, Activation] = {"silu": "swiglu", "swish": "swiglu"}


def read_llama(
    fields: ConfigReader, *, eps: float = 1e-6, max_length: int = 2048, **heads_fields: Any
) -> TransformerConfig:
    """Return a Llama. eps, max_length: values of absent fields; heads_fields: fixed ones of its attention."""
    bias = fields.get("attention_bias", bool, False)
    heads = read_attention(
        fields, kv_heads=None, head_dim=None, base=10_000.0, bias=bias, out_bias=bias, **heads_fields
    )
    shape = read_shape(fields, act=SILU, eps=eps, max_length=max_length)
    return TransformerConfig(**shape, mixers={"full": heads}, mlp_bias=fields.get("mlp_bias", bool, False))


def write_llama(config: TransformerConfig) -> dict[str, Any]:
    bias = require_attention(config)[0].bias
    return write_shape(config) | {"hidden_act": "silu", "attention_bias": bias, "mlp_bias": config.mlp_bias}


def llama_rules(config: TransformerConfig) -> list[ConversionRule]:
    rules = embedding_and_head_rules(config)
    for n, heads in enumerate(require_attention(config)):
        theirs, ours = f"model.layers.{n}.", f"blocks.{n}."
        rules += norm_rules(theirs, ours, config)
        rules += attention_rules(f"{theirs}self_attn.", f"{ours}mixer.", heads)
        rules += mlp_rules(f"{theirs}mlp.", f"{ours}mlp.", config)
    return rules


def read_mistral(fields: ConfigReader) -> TransformerConfig:
    # An absent window is 4096, a null one is none: the only field where the two differ.
    window = fields.optional("sliding_window", int, above=0) if "sliding_window" in fields.data else 4096
    heads = read_attention(fields, kv_heads=8, head_dim=None, base=10_000.0, window=window)
    return TransformerConfig(**read_shape(fields, act=SILU, max_length=131_072), mixers={"full": heads})


def write_mistral(config: TransformerConfig) -> dict[str, Any]:
    return write_shape(config) | {"hidden_act": "silu", "sliding_window": require_attention(config)[0].window}


def qwen_window(fields: ConfigReader) -> int | None:
    """Return the window of Qwen's sliding layers; None while `use_sliding_window` is off, regardless of `sliding_window`."""
    fields.mark_read("sliding_window")
    slides = fields.get("use_sliding_window", bool, False)
    return fields.get("sliding_window", int, 4096, above=0) if slides else None


def qwen_layers(
    fields: ConfigReader, n_layers: int, full: AttentionConfig, slides: Callable[[int, int], bool]
) -> dict[str, Any]:
    """Return `mixers` and `pattern`. full: global layers; slides: (layer, `max_window_layers`) -> default."""
    window, bound = qwen_window(fields), fields.get("max_window_layers", int, 28)
    default = [window is not None and slides(n, bound) for n in range(n_layers)]
    pattern = window_pattern(fields, n_layers, default)
    if window is None and any(pattern):
        raise fields.error("layer_types", "no 'sliding_attention' while use_sliding_window is off")
    return sliding_mixers(full, full.model_copy(update={"window": window}), pattern)


def _read_qwen(fields: ConfigReader, kv_heads: int, head_dim: int | None, **heads: Any) -> TransformerConfig:
    shape = read_shape(fields, act=SILU, max_length=32_768)
    full = read_attention(fields, kv_heads=kv_heads, head_dim=head_dim, base=10_000.0, **heads)
    layers = qwen_layers(fields, shape["n_layers"], full, lambda n, first: n >= first)
    return TransformerConfig(**shape, **layers)


def _write_qwen(config: TransformerConfig) -> dict[str, Any]:
    windows = write_windows(config)
    slides = windows["sliding_window"] is not None
    return write_shape(config) | windows | {"hidden_act": "silu", "use_sliding_window": slides}


def read_qwen2(fields: ConfigReader) -> TransformerConfig:
    return _read_qwen(fields, 32, None, bias=True)


def read_qwen3(fields: ConfigReader) -> TransformerConfig:
    bias = fields.get("attention_bias", bool, False)
    return _read_qwen(fields, 32, 128, bias=bias, out_bias=bias, qk_norm=True)


def write_qwen3(config: TransformerConfig) -> dict[str, Any]:
    return _write_qwen(config) | {"attention_bias": require_attention(config)[0].bias}


LLAMA = ModelFamily("llama", "LlamaForCausalLM", read_llama, write_llama, llama_rules)
MISTRAL = ModelFamily("mistral", "MistralForCausalLM", read_mistral, write_mistral, llama_rules)
QWEN2 = ModelFamily("qwen2", "Qwen2ForCausalLM", read_qwen2, _write_qwen, llama_rules)
QWEN3 = ModelFamily("qwen3", "Qwen3ForCausalLM", read_qwen3, write_qwen3, llama_rules)
