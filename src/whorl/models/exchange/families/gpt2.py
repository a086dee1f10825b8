"""GPT-2 (Radford et al. 2019, Language Models are Unsupervised Multitask Learners).

Differences from Llama: layer norms with biases, learned positions, biases on every matrix, a plain MLP with the tanh
form of GELU, tied embeddings. The subtle part is the layout: its matrices are stored [d_in, d_out], and queries, keys and
values are one matrix. A square matrix read without transposing has the right shape and gives wrong results, so the test
compares logits, not shapes.
"""

from __future__ import annotations

from typing import Any

from whorl.models.exchange.family import ModelFamily, require_attention
from whorl.models.exchange.fields import ConfigReader
from whorl.models.exchange.rules import ConversionRule, split, transposed, unchanged
from whorl.models.transformer_config import AttentionConfig, TransformerConfig
from whorl.nn.mlp import Activation

GELU: dict[str, Activation] = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}


def read_gpt2(fields: ConfigReader) -> TransformerConfig:
    width, n_heads = fields.get("n_embd", int, above=0), fields.get("n_head", int, above=0)
    fields.divides("n_head", n_heads, "n_embd", width)
    fields.must_be("scale_attn_weights", True)
    fields.must_be("scale_attn_by_inverse_layer_idx", False)
    fields.must_be("add_cross_attention", False)
    heads = AttentionConfig(
        n_heads=n_heads, n_kv_heads=n_heads, head_dim=width // n_heads, rope=None, bias=True, out_bias=True
    )
    return TransformerConfig(
        vocab_size=fields.get("vocab_size", int, above=1),
        d_model=width,
        n_layers=fields.get("n_layer", int, above=0),
        max_length=fields.get("n_positions", int, 1024, above=0),
        mixers={"full": heads},
        mlp=fields.choose("activation_function", GELU, "gelu_new"),
        mlp_hidden=fields.get("n_inner", int, 4 * width, above=0),
        mlp_bias=True,
        norm="layer",
        norm_eps=fields.get("layer_norm_epsilon", float, 1e-5, above=0),
        learned_positions=True,
        tie_embeddings=fields.get("tie_word_embeddings", bool, True),
    )


def write_gpt2(config: TransformerConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "n_embd": config.d_model,
        "n_head": require_attention(config)[0].n_heads,
        "n_layer": config.n_layers,
        "n_positions": config.max_length,
        "activation_function": "gelu" if config.mlp == "gelu" else "gelu_new",
        "n_inner": config.mlp_hidden,
        "layer_norm_epsilon": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
    }


def gpt2_rules(config: TransformerConfig) -> list[ConversionRule]:
    rules = [
        unchanged("transformer.wte.weight", "embedding"),
        unchanged("transformer.wpe.weight", "positions"),
        *(unchanged(f"transformer.ln_f.{kind}", f"final_norm.{kind}") for kind in ("weight", "bias")),
    ]
    if not config.tie_embeddings:
        rules.append(unchanged("lm_head.weight", "head"))
    for n in range(config.n_layers):
        theirs, ours = f"transformer.h.{n}.", f"blocks.{n}."
        for kind in ("weight", "bias"):
            matrix = transposed if kind == "weight" else unchanged
            parts = tuple(f"{ours}mixer.{part}.{kind}" for part in "qkv")
            rules += [
                unchanged(f"{theirs}ln_1.{kind}", f"{ours}mixer_norm.{kind}"),
                split(f"{theirs}attn.c_attn.{kind}", parts, transpose=kind == "weight"),
                matrix(f"{theirs}attn.c_proj.{kind}", f"{ours}mixer.out.{kind}"),
                unchanged(f"{theirs}ln_2.{kind}", f"{ours}mlp_norm.{kind}"),
                matrix(f"{theirs}mlp.c_fc.{kind}", f"{ours}mlp.up.{kind}"),
                matrix(f"{theirs}mlp.c_proj.{kind}", f"{ours}mlp.down.{kind}"),
            ]
    return rules


GPT2 = ModelFamily(
    "gpt2",
    "GPT2LMHeadModel",
    read_gpt2,
    write_gpt2,
    gpt2_rules,
    prefix="transformer.",
    embedding="transformer.wte.weight",
    ignored_tensors=r".*\.attn\.(bias|masked_bias)",  # causal masks in old files
)
