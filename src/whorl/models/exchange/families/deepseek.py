"""DeepSeek-V3 (arXiv:2412.19437): latent attention, many small experts and a shared one; the first layers are dense.

Differences from Llama: keys and values come from a latent (`nn/attention/mla.py`). Experts are chosen by sigmoid scores
within the best groups, with a balancing bias that is not part of the weights (`nn/experts/router.py`).

The subtle parts. (1) Its rotary pairs are interleaved, (0, 1), (2, 3) ..., unless `rope_interleave` is off. (2) The norms of
the two latents always have an eps of 1e-6, regardless of `rms_norm_eps`. (3) With YaRN, the tables are multiplied by the
ratio of two `mscale`s (1 in practice) and the products of queries and keys by the square of one. (4) The published files end
with multi-token prediction layers, which are left out with a warning. Their fp8 weights are rejected
(`quantization_config`): convert them to bf16 first.
"""

from __future__ import annotations

import math
from typing import Any

from whorl.models.exchange.families.experts import PROJECTIONS, expert_rules, read_top_k, require_experts
from whorl.models.exchange.families.llama import SILU
from whorl.models.exchange.family import (
    ModelFamily,
    embedding_and_head_rules,
    mlp_rules,
    norm_rules,
    read_shape,
    unsupported_by_family,
)
from whorl.models.exchange.fields import ConfigReader, read_rope, write_rope, yarn_mscale
from whorl.models.exchange.rules import ConversionRule, unchanged
from whorl.models.transformer_config import MLAConfig, MoEConfig, Rope, TransformerConfig
from whorl.nn.rotary import Layout


def read_deepseek(fields: ConfigReader) -> TransformerConfig:
    shape = read_shape(fields, act=SILU, max_length=4096)
    fields.must_be("attention_bias", False)
    fields.must_be("moe_layer_freq", 1)
    fields.must_be("topk_method", "noaux_tc")
    fields.must_be("scoring_func", "sigmoid")
    fields.mark_read("head_dim", "qk_head_dim")  # both follow from other fields
    n_heads = fields.get("num_attention_heads", int, above=0)
    fields.must_be("num_key_value_heads", n_heads)
    groups = fields.get("n_group", int, 8, above=0), fields.get("topk_group", int, 4, above=0)
    hidden = fields.get("moe_intermediate_size", int, 2048, above=0)
    n_experts = fields.get("num_local_experts", int, 256, above=0)
    n_experts = fields.get("n_routed_experts", int, n_experts, above=0)
    normalise = fields.get("norm_topk_prob", bool, True)
    n_dense = fields.get("first_k_dense_replace", int, 3, above=-1)
    experts = MoEConfig(
        n_experts=n_experts,
        top_k=read_top_k(fields, 8, n_experts, normalise),
        hidden=hidden,
        shared_hidden=hidden * fields.get("n_shared_experts", int, 1, above=-1),
        scoring="sigmoid",
        norm_topk_prob=normalise,
        scale=fields.get("routed_scaling_factor", float, 2.5, above=0),
        bias_balance=True,
        groups=None if groups[0] == groups[1] else groups,
        dense_layers=tuple(range(min(n_dense, shape["n_layers"]))),
    )
    return TransformerConfig(**shape, mixers={"latent": _read_mla(fields, n_heads)}, experts=experts)


def _read_mla(fields: ConfigReader, n_heads: int) -> MLAConfig:
    nope = fields.get("qk_nope_head_dim", int, 128, above=0)
    turning = fields.get("qk_rope_head_dim", int, 64, above=1)
    if turning % 2:
        raise fields.error("qk_rope_head_dim", "an even number")
    base, scaling, share, given = read_rope(fields, 10_000.0)
    if share != 1.0:
        raise fields.error("partial_rotary_factor", "1.0", share)
    scale = None
    if scaling is not None and given.get("mscale_all_dim"):
        scale = (nope + turning) ** -0.5 * yarn_mscale(scaling.factor, given["mscale_all_dim"]) ** 2
    layout: Layout = "interleaved" if fields.get("rope_interleave", bool, True) else "half"
    # An absent rank of the queries is DeepSeek-V3's; a null one is a plain matrix.
    rank = fields.optional("q_lora_rank", int, above=0) if "q_lora_rank" in fields.data else 1536
    return MLAConfig(
        n_heads=n_heads,
        q_rank=rank,
        kv_rank=fields.get("kv_lora_rank", int, 512, above=0),
        nope_dim=nope,
        rope_dim=turning,
        v_dim=fields.get("v_head_dim", int, 128, above=0),
        rope=Rope(base=base, scaling=scaling, layout=layout),
        scale=scale,
    )


def _mla_configs(config: TransformerConfig) -> list[MLAConfig]:
    latents = []
    for n, mixer in enumerate(config.layer_mixers()):
        if not isinstance(mixer, MLAConfig):
            raise unsupported_by_family(f"the mixer of layer {n} is {mixer.kind!r}", "'latent'")
        latents.append(mixer)
    return latents


def write_deepseek(config: TransformerConfig) -> dict[str, Any]:
    latent, experts = _mla_configs(config)[0], require_experts(config)
    rope = write_rope(latent.rope.base, latent.rope.scaling)
    if latent.scale is not None:
        stretch = latent.scale * math.sqrt(latent.nope_dim + latent.rope_dim)
        if latent.rope.scaling is None or latent.rope.scaling.factor <= 1 or stretch <= 1:
            raise unsupported_by_family(f"scale is {latent.scale}", "none, or one that YaRN explains")
        weight = (math.sqrt(stretch) - 1.0) / (0.1 * math.log(latent.rope.scaling.factor))
        rope["mscale_all_dim"] = round(weight, 9)  # inverse of a square root: 1.0, not 0.9999999999999998
        rope.setdefault("attention_factor", latent.rope.scaling.attention_scaling)
    n_groups, top_groups = experts.groups or (1, 1)
    if not experts.hidden or experts.shared_hidden % experts.hidden:
        raise unsupported_by_family(
            f"experts.shared_hidden is {experts.shared_hidden}", f"a multiple of {experts.hidden}"
        )
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layers,
        "max_position_embeddings": config.max_length,
        "intermediate_size": config.mlp_hidden,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
        "num_attention_heads": latent.n_heads,
        "num_key_value_heads": latent.n_heads,
        "q_lora_rank": latent.q_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.nope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.v_dim,
        "rope_interleave": latent.rope.layout == "interleaved",
        "rope_parameters": rope,
        "n_routed_experts": experts.n_experts,
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": experts.hidden,
        "n_shared_experts": experts.shared_hidden // experts.hidden,
        "norm_topk_prob": experts.norm_topk_prob,
        "routed_scaling_factor": experts.scale,
        "n_group": n_groups,
        "topk_group": top_groups,
        "first_k_dense_replace": len(experts.dense_layers),
    }


def deepseek_rules(config: TransformerConfig) -> list[ConversionRule]:
    rules, experts = embedding_and_head_rules(config), require_experts(config)
    for n, latent in enumerate(_mla_configs(config)):
        theirs, ours = f"model.layers.{n}.", f"blocks.{n}."
        rules += norm_rules(theirs, ours, config)
        parts = {
            "kv_a_proj_with_mqa": "kv_a",
            "kv_a_layernorm": "kv_a_norm",
            "kv_b_proj": "kv_b",
            "o_proj": "out",
        }
        if latent.q_rank is None:
            parts["q_proj"] = "q"
        else:
            parts |= {"q_a_proj": "q_a", "q_a_layernorm": "q_a_norm", "q_b_proj": "q_b"}
        rules += [
            unchanged(f"{theirs}self_attn.{a}.weight", f"{ours}mixer.{b}.weight") for a, b in parts.items()
        ]
        if not config.has_experts(n):
            rules += mlp_rules(f"{theirs}mlp.", f"{ours}mlp.", config)
            continue
        rules.append(unchanged(f"{theirs}mlp.gate.weight", f"{ours}mlp.router.weight"))
        rules.append(unchanged(f"{theirs}mlp.gate.e_score_correction_bias", f"{ours}mlp.router.balance_bias"))
        rules += expert_rules(f"{theirs}mlp.", f"{ours}mlp.", experts.n_experts, PROJECTIONS)
        if experts.shared_hidden:
            rules += mlp_rules(f"{theirs}mlp.shared_experts.", f"{ours}mlp.shared.", config, bias=False)
    return rules


DEEPSEEK = ModelFamily("deepseek_v3", "DeepseekV3ForCausalLM", read_deepseek, write_deepseek, deepseek_rules)
