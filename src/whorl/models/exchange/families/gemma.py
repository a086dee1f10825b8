"""Gemma (arXiv:2403.08295), Gemma 2 (arXiv:2408.00118) and the text part of Gemma 3 (arXiv:2503.19786).

Differences from Llama: embeddings are tied and multiplied by sqrt(d_model); norms have the gain 1 + weight; GeGLU. From
Gemma 2 on, both branches have norms before and after, and scores are divided by sqrt(query_pre_attn_scalar), independent
of the head's width.

- Gemma 2: scores and logits are soft-capped; every second layer has a sliding window, beginning with the first.
- Gemma 3: no caps; queries and keys are normalized; five of six layers have a sliding window and a separate rotary base
  without scaling.
"""

from __future__ import annotations

from typing import Any

from whorl.models.exchange.families.llama import llama_rules
from whorl.models.exchange.family import (
    ModelFamily,
    read_attention,
    read_shape,
    require_attention,
    sliding_mixers,
    unsupported_by_family,
    write_shape,
    write_windows,
)
from whorl.models.exchange.fields import ConfigReader, parse_rope, read_rope, window_pattern, write_rope
from whorl.models.transformer_config import AttentionConfig, Rope, TransformerConfig
from whorl.nn.mlp import Activation

GELU: dict[str, Activation] = {"gelu_pytorch_tanh": "geglu"}


def _heads(fields: ConfigReader, rope: Rope, cap: float | None, **others: Any) -> AttentionConfig:
    dim = fields.get("head_dim", int, 256, above=0)
    if dim % 2:
        raise fields.error("head_dim", "an even number")
    asked = fields.get("query_pre_attn_scalar", float, 256.0, above=0)
    n_heads = fields.get("num_attention_heads", int, 8, above=0)
    n_kv_heads = fields.get("num_key_value_heads", int, 4, above=0)
    return AttentionConfig(
        n_heads=n_heads,
        n_kv_heads=fields.divides("num_key_value_heads", n_kv_heads, "num_attention_heads", n_heads),
        head_dim=dim,
        rope=rope,
        scale=None if asked == dim else asked**-0.5,
        softcap=cap,
        bias=fields.get("attention_bias", bool, False),
        out_bias=fields.get("attention_bias", bool, False),
        **others,
    )


def _config(
    fields: ConfigReader,
    shape: dict[str, Any],
    full: AttentionConfig,
    sliding: AttentionConfig,
    slides: list[bool],
    cap: float | None,
) -> TransformerConfig:
    # It would let a token attend to later ones.
    fields.must_be("use_bidirectional_attention", False)
    return TransformerConfig(
        **shape,
        **sliding_mixers(full, sliding, slides),
        norm_offset=1.0,
        sandwich=True,
        embedding_scale=shape["d_model"] ** 0.5,
        logit_softcap=cap,
    )


def _cap(fields: ConfigReader, name: str, default: float | None) -> float | None:
    """Return a cap: the family's default if absent, None if null."""
    return fields.optional(name, float, above=0) if name in fields.data else _seen(fields, name, default)


def _seen(fields: ConfigReader, name: str, default: float | None) -> float | None:
    fields.mark_read(name)
    return default


def _window(fields: ConfigReader) -> int:
    return fields.get("sliding_window", int, 4096, above=0)


def _shape(fields: ConfigReader, max_length: int) -> dict[str, Any]:
    # Gemma's first files also had `hidden_act`, which its programs ignore.
    fields.mark_read("hidden_act")
    return read_shape(
        fields,
        act=GELU,
        act_field="hidden_activation",
        act_default="gelu_pytorch_tanh",
        tied=True,
        max_length=max_length,
    )


def read_gemma(fields: ConfigReader) -> TransformerConfig:
    fields.must_be("use_bidirectional_attention", False)
    fields.must_be(
        "hidden_activation", "gelu_pytorch_tanh"
    )  # newer than `hidden_act`, and not read by its program
    bias = fields.get("attention_bias", bool, False)
    heads = read_attention(fields, kv_heads=16, head_dim=256, base=10_000.0, bias=bias, out_bias=bias)
    # "gelu" in the first files means the approximation.
    acts: dict[str, Activation] = {**GELU, "gelu": "geglu"}
    shape = read_shape(fields, act=acts, act_default="gelu_pytorch_tanh", tied=True, max_length=8192)
    scale = shape["d_model"] ** 0.5
    return TransformerConfig(**shape, mixers={"full": heads}, norm_offset=1.0, embedding_scale=scale)


def write_gemma(config: TransformerConfig) -> dict[str, Any]:
    bias = require_attention(config)[0].bias
    return write_shape(config) | {"hidden_act": "gelu_pytorch_tanh", "attention_bias": bias}


def read_gemma2(fields: ConfigReader) -> TransformerConfig:
    shape = _shape(fields, 8192)
    base, scaling, share, _ = read_rope(fields, 10_000.0)
    if share != 1.0:
        raise fields.error("partial_rotary_factor", "1.0", share)
    full = _heads(fields, Rope(base=base, scaling=scaling), _cap(fields, "attn_logit_softcapping", 50.0))
    sliding = full.model_copy(update={"window": _window(fields)})
    slides = window_pattern(fields, shape["n_layers"], [n % 2 == 0 for n in range(shape["n_layers"])])
    return _config(fields, shape, full, sliding, slides, _cap(fields, "final_logit_softcapping", 30.0))


def read_gemma3(fields: ConfigReader) -> TransformerConfig:
    shape = _shape(fields, 131_072)
    every = fields.get("_sliding_window_pattern", int, 6, above=0)
    every = fields.get("sliding_window_pattern", int, every, above=0)
    slides = window_pattern(
        fields, shape["n_layers"], [(n + 1) % every != 0 for n in range(shape["n_layers"])]
    )
    far, near = _ropes(fields)
    cap = _cap(fields, "attn_logit_softcapping", None)
    full = _heads(fields, far, cap, qk_norm=True)
    sliding = full.model_copy(update={"rope": near, "window": _window(fields)})
    return _config(fields, shape, full, sliding, slides, _cap(fields, "final_logit_softcapping", None))


def _ropes(fields: ConfigReader) -> tuple[Rope, Rope]:
    """Return rotary positions of the global layers, and of those with a window."""
    given = fields.optional("rope_parameters", dict)
    base = fields.get("rope_theta", float, 1_000_000.0)
    local = fields.get("rope_local_base_freq", float, 10_000.0)
    if given is None or "full_attention" not in given:
        old = given if given is not None else fields.optional("rope_scaling", dict) or {}
        given = {"full_attention": old, "sliding_attention": {}}
    for name in given:
        if name not in ("full_attention", "sliding_attention"):
            raise fields.error("rope_parameters", "entries full_attention and sliding_attention")
    ropes = []
    for name, default in (("full_attention", base), ("sliding_attention", local)):
        theirs = {"rope_theta": default, **(given.get(name) or {})}
        frequency, scaling, share, _ = parse_rope(theirs, f"rope_parameters.{name}", fields)
        if share != 1.0:
            raise fields.error("rope_parameters", "partial_rotary_factor 1.0")
        ropes.append(Rope(base=frequency, scaling=scaling))
    return ropes[0], ropes[1]


def _write(config: TransformerConfig) -> dict[str, Any]:
    first = require_attention(config)[0]
    asked = float(first.head_dim) if first.scale is None else first.scale**-2
    whole = round(asked)
    return (
        write_shape(config)
        | write_windows(config)
        | {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": whole if abs(asked - whole) < 1e-6 * asked else asked,
            "attention_bias": first.bias,
            "attn_logit_softcapping": first.softcap,
            "final_logit_softcapping": config.logit_softcap,
        }
    )


def write_gemma3(config: TransformerConfig) -> dict[str, Any]:
    ropes: dict[str, Any] = {}
    for heads in require_attention(config):
        if heads.rope is None:
            raise unsupported_by_family("a mixer has no rope", "rotary positions")
        name = "full_attention" if heads.window is None else "sliding_attention"
        ropes.setdefault(name, write_rope(heads.rope.base, heads.rope.scaling))
    return _write(config) | {"rope_parameters": ropes}


GEMMA = ModelFamily("gemma", "GemmaForCausalLM", read_gemma, write_gemma, llama_rules)
GEMMA2 = ModelFamily("gemma2", "Gemma2ForCausalLM", read_gemma2, _write, llama_rules)
GEMMA3 = ModelFamily("gemma3_text", "Gemma3ForCausalLM", read_gemma3, write_gemma3, llama_rules)
