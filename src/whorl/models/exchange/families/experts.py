"""Families with mixtures of experts: Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE.

- Mixtral (Jiang et al. 2024, arXiv:2401.04088): Mistral with 8 experts in every layer; softmax over all, the two best, their
  weights divided by their sum. Its w1, w3, w2 are gate, up, down.
- Qwen2-MoE (arXiv:2407.10671): Qwen2 with many small experts, and a shared one behind a sigmoid gate.
- Qwen3-MoE (arXiv:2505.09388): Qwen3 with many small experts, none shared.
- OLMoE (arXiv:2409.02060): Llama with many small experts, none shared; queries and keys are normalized over all heads. A
  model that was trained with `clip_qkv` is refused.

The subtle part is `norm_topk_prob`: off by default in both Qwens and OLMoE, so that the weights of a token's experts do not
sum to 1.
Routing is "dropless", as these models were trained and are served.
"""

from __future__ import annotations

from typing import Any

from whorl.models.exchange.families.llama import SILU, qwen_layers, qwen_window, read_llama
from whorl.models.exchange.family import (
    ModelFamily,
    attention_rules,
    embedding_and_head_rules,
    mlp_rules,
    norm_rules,
    read_attention,
    read_shape,
    require_attention,
    unsupported_by_family,
    write_shape,
    write_windows,
)
from whorl.models.exchange.fields import ConfigReader
from whorl.models.exchange.rules import ConversionRule, concatenated, unchanged
from whorl.models.transformer_config import MoEConfig, TransformerConfig


def require_experts(config: TransformerConfig) -> MoEConfig:
    """Return the mixture of experts.

    Raises:
        ConfigError: the model has none.
    """
    if config.experts is None:
        raise unsupported_by_family("it has no experts", "a mixture of experts")
    return config.experts


def expert_rules(
    hf_prefix: str, prefix: str, n_experts: int, names: tuple[str, str, str]
) -> list[ConversionRule]:
    """Return rules for the experts; the caller adds the router. names: of gate, up and down; both prefixes end in a dot."""
    gate, up, down = names
    rules = []
    for e in range(n_experts):
        parts = (f"{hf_prefix}experts.{e}.{gate}.weight", f"{hf_prefix}experts.{e}.{up}.weight")
        rules.append(concatenated(parts, f"{prefix}experts.up.{e}"))
        rules.append(unchanged(f"{hf_prefix}experts.{e}.{down}.weight", f"{prefix}experts.down.{e}"))
    return rules


def read_top_k(fields: ConfigReader, default: int, n_experts: int, norm_topk_prob: bool) -> int:
    """Return the number of experts per token. norm_topk_prob: their weights are divided by their sum.

    Raises:
        ConfigError: the model has fewer experts; or it is one, whose normalized weight is always 1, so that the router
            could not be trained.
    """
    top_k = fields.get("num_experts_per_tok", int, default, above=0)
    if top_k > n_experts:
        raise fields.error("num_experts_per_tok", f"at most the number of experts ({n_experts})")
    if norm_topk_prob and top_k == 1 < n_experts:
        raise fields.error("num_experts_per_tok", "at least 2, since weights are divided by their sum")
    return top_k


PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def read_mixtral(fields: ConfigReader) -> TransformerConfig:
    shape = read_shape(fields, act=SILU, eps=1e-5, max_length=131_072)
    window = fields.optional("sliding_window", int, above=0)
    heads = read_attention(fields, kv_heads=8, head_dim=None, base=1_000_000.0, window=window)
    n_experts = fields.get("num_local_experts", int, 8, above=0)
    experts = MoEConfig(
        n_experts=n_experts,
        top_k=read_top_k(fields, 2, n_experts, norm_topk_prob=True),
        hidden=shape["mlp_hidden"],
    )
    return TransformerConfig(**shape, mixers={"full": heads}, experts=experts)


def write_mixtral(config: TransformerConfig) -> dict[str, Any]:
    experts = require_experts(config)
    return write_shape(config) | {
        "hidden_act": "silu",
        "sliding_window": require_attention(config)[0].window,
        "intermediate_size": experts.hidden,
        "num_local_experts": experts.n_experts,
        "num_experts_per_tok": experts.top_k,
    }


def mixtral_rules(config: TransformerConfig) -> list[ConversionRule]:
    rules = embedding_and_head_rules(config)
    for n, heads in enumerate(require_attention(config)):
        theirs, ours = f"model.layers.{n}.", f"blocks.{n}."
        rules += norm_rules(theirs, ours, config)
        rules += attention_rules(f"{theirs}self_attn.", f"{ours}mixer.", heads)
        rules.append(unchanged(f"{theirs}block_sparse_moe.gate.weight", f"{ours}mlp.router.weight"))
        n_experts = require_experts(config).n_experts
        rules += expert_rules(f"{theirs}block_sparse_moe.", f"{ours}mlp.", n_experts, ("w1", "w3", "w2"))
    return rules


def _read_experts(
    fields: ConfigReader, n_layers: int, n_experts: int, top_k: int, hidden: int, **others: Any
) -> MoEConfig:
    """Return the experts of both Qwens. n_experts, top_k, hidden: values of absent fields."""
    every = fields.get("decoder_sparse_step", int, 1, above=0)
    plain = fields.get("mlp_only_layers", list, [])
    local = fields.optional("num_local_experts", int, above=0)  # the name in newer files
    n_experts = fields.get("num_experts", int, local or n_experts, above=0)
    normalise = fields.get("norm_topk_prob", bool, False)
    return MoEConfig(
        n_experts=n_experts,
        top_k=read_top_k(fields, top_k, n_experts, normalise),
        hidden=fields.get("moe_intermediate_size", int, hidden, above=0),
        norm_topk_prob=normalise,
        dense_layers=tuple(n for n in range(n_layers) if n in plain or (n + 1) % every),
        **others,
    )


def read_qwen2_moe(fields: ConfigReader) -> TransformerConfig:
    shape = read_shape(fields, act=SILU, max_length=32_768)
    n_layers = shape["n_layers"]
    full = read_attention(
        fields, kv_heads=16, head_dim=None, base=10_000.0, bias=fields.get("qkv_bias", bool, True)
    )
    layers = qwen_layers(fields, n_layers, full, lambda n, last: n % 2 == 0 and n < last)
    shared = fields.get("shared_expert_intermediate_size", int, 5632, above=-1)
    experts = _read_experts(fields, n_layers, 60, 4, 1408, shared_hidden=shared, shared_gate=True)
    return TransformerConfig(**shape, **layers, experts=experts)


def read_qwen3_moe(fields: ConfigReader) -> TransformerConfig:
    shape = read_shape(fields, act=SILU, max_length=32_768)
    bias = fields.get("attention_bias", bool, False)
    heads = read_attention(
        fields,
        kv_heads=4,
        head_dim=None,
        base=10_000.0,
        bias=bias,
        out_bias=bias,
        qk_norm=True,
        window=qwen_window(fields),
    )
    experts = _read_experts(fields, shape["n_layers"], 128, 8, 768)
    return TransformerConfig(**shape, mixers={"full": heads}, experts=experts)


def _write_qwen(config: TransformerConfig) -> dict[str, Any]:
    experts, windows = require_experts(config), write_windows(config)
    return write_shape(config) | {
        "hidden_act": "silu",
        "sliding_window": windows["sliding_window"],
        "use_sliding_window": windows["sliding_window"] is not None,
        "num_experts": experts.n_experts,
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": experts.hidden,
        "norm_topk_prob": experts.norm_topk_prob,
        "mlp_only_layers": list(experts.dense_layers),
        "decoder_sparse_step": 1,
    }


def write_qwen2_moe(config: TransformerConfig) -> dict[str, Any]:
    others = {
        "shared_expert_intermediate_size": require_experts(config).shared_hidden,
        "qkv_bias": require_attention(config)[0].bias,
        "layer_types": write_windows(config)["layer_types"],
    }
    return _write_qwen(config) | others


def write_qwen3_moe(config: TransformerConfig) -> dict[str, Any]:
    return _write_qwen(config) | {"attention_bias": require_attention(config)[0].bias}


def read_olmoe(fields: ConfigReader) -> TransformerConfig:
    fields.must_be("clip_qkv")
    config = read_llama(fields, eps=1e-5, max_length=4096, qk_norm="all_heads")
    n_experts, normalise = (
        fields.get("num_experts", int, 64, above=0),
        fields.get("norm_topk_prob", bool, False),
    )
    top_k = read_top_k(fields, 8, n_experts, normalise)
    experts = MoEConfig(n_experts=n_experts, top_k=top_k, hidden=config.mlp_hidden, norm_topk_prob=normalise)
    return config.model_copy(update={"experts": experts})


def write_olmoe(config: TransformerConfig) -> dict[str, Any]:
    experts = require_experts(config)
    return write_shape(config, head_dim=False) | {
        "hidden_act": "silu",
        "attention_bias": require_attention(config)[0].bias,
        "intermediate_size": experts.hidden,
        "num_experts": experts.n_experts,
        "num_experts_per_tok": experts.top_k,
        "norm_topk_prob": experts.norm_topk_prob,
    }


def qwen_moe_rules(config: TransformerConfig) -> list[ConversionRule]:
    rules, experts = embedding_and_head_rules(config), require_experts(config)
    for n, heads in enumerate(require_attention(config)):
        theirs, ours = f"model.layers.{n}.", f"blocks.{n}."
        rules += norm_rules(theirs, ours, config)
        rules += attention_rules(f"{theirs}self_attn.", f"{ours}mixer.", heads)
        if not config.has_experts(n):
            rules += mlp_rules(f"{theirs}mlp.", f"{ours}mlp.", config)
            continue
        rules.append(unchanged(f"{theirs}mlp.gate.weight", f"{ours}mlp.router.weight"))
        rules += expert_rules(f"{theirs}mlp.", f"{ours}mlp.", experts.n_experts, PROJECTIONS)
        if experts.shared_hidden:
            rules += mlp_rules(f"{theirs}mlp.shared_expert.", f"{ours}mlp.shared.", config, bias=False)
        if experts.shared_gate:
            rules.append(unchanged(f"{theirs}mlp.shared_expert_gate.weight", f"{ours}mlp.shared_gate.weight"))
    return rules


MIXTRAL = ModelFamily("mixtral", "MixtralForCausalLM", read_mixtral, write_mixtral, mixtral_rules)
QWEN2_MOE = ModelFamily("qwen2_moe", "Qwen2MoeForCausalLM", read_qwen2_moe, write_qwen2_moe, qwen_moe_rules)
OLMOE = ModelFamily("olmoe", "OlmoeForCausalLM", read_olmoe, write_olmoe, qwen_moe_rules)
QWEN3_MOE = ModelFamily("qwen3_moe", "Qwen3MoeForCausalLM", read_qwen3_moe, write_qwen3_moe, qwen_moe_rules)
