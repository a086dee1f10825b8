"""Fields of Hugging Face config.json files: meaning, defaults, and errors for unsupported ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.models.exchange_cases import CASES, LLAMA3, SHAPE, YARN, logits, small, transformers

from whorl.errors import ConfigError
from whorl.models.exchange import export_model, find_family, import_model, read_config
from whorl.models.exchange.family import config_differences
from whorl.models.transformer import Transformer
from whorl.models.transformer_config import AttentionConfig, MoEConfig, Rope, TransformerConfig


def test_read_config_supports_older_fields(tmp_path: Path) -> None:
    base = {k: v for k, v in SHAPE.items() if v is not None} | {"rms_norm_eps": 1e-5, "hidden_act": "silu"}
    old = base | {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": dict(LLAMA3)}
    old["rope_scaling"].pop("rope_theta")
    new = base | {"model_type": "llama", "rope_parameters": dict(LLAMA3)}
    assert read_config(old, "old") == read_config(new, "new")
    hf_old = transformers.Gemma3TextConfig(
        rope_theta=5e5, rope_local_base_freq=2e4, rope_scaling={"rope_type": "linear", "factor": 8.0}
    )
    gemma = base | {
        "model_type": "gemma3_text",
        "rope_theta": 5e5,
        "rope_local_base_freq": 2e4,
        "sliding_window_pattern": 2,
    }
    gemma |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    near, far = read_config(gemma, "gemma").layer_mixers()
    assert isinstance(near, AttentionConfig) and isinstance(far, AttentionConfig) and near.rope and far.rope
    assert near.rope.base == hf_old.rope_parameters["sliding_attention"]["rope_theta"]
    assert near.rope.scaling is None and near.window == hf_old.sliding_window
    assert far.rope.scaling and far.rope.base == 5e5 and far.window is None


SLIDING = {"use_sliding_window": True, "sliding_window": 5, "num_hidden_layers": 7}


@pytest.mark.parametrize(
    ("stem", "fields"),
    [
        ("Qwen2Config", {**SLIDING, "max_window_layers": 3}),
        ("Qwen3Config", {**SLIDING, "max_window_layers": 3, "head_dim": 16}),
        ("Qwen2MoeConfig", {**SLIDING, "max_window_layers": 4}),
        ("Gemma2Config", {"num_hidden_layers": 7}),
        ("Gemma3TextConfig", {"num_hidden_layers": 7}),
        ("Gemma3TextConfig", {"num_hidden_layers": 7, "sliding_window_pattern": 2}),
    ],
)
def test_read_config_infers_sliding_layers(stem: str, fields: dict[str, Any], tmp_path: Path) -> None:
    given = {k: v for k, v in {**SHAPE, **fields}.items() if v is not None}
    getattr(transformers, stem)(**given).save_pretrained(tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    listed = read_config(data, "config.json")
    assert {getattr(m, "window", 0) is None for m in listed.layer_mixers()} == {True, False}
    assert read_config({k: v for k, v in data.items() if k != "layer_types"}, "config.json") == listed


def published(
    vocab: int, width: int, hidden: int, layers: int, heads: int, kv: int, **others: Any
) -> dict[str, Any]:
    return {
        "vocab_size": vocab, "hidden_size": width, "intermediate_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv, "hidden_act": "silu", "rms_norm_eps": 1e-6, **others,
    }  # fmt: skip


GEMMA = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "cache_implementation": "hybrid",
    "query_pre_attn_scalar": 256,
}
QWEN = {"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 21, "rope_theta": 1e6}
# Published config.json files: (fields, total parameters, active parameters in billions).
PUBLISHED: dict[str, tuple[dict[str, Any], int, float]] = {
    "GPT-2": (
        {"model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
         "vocab_size": 50257, "task_specific_params": {"text-generation": {"do_sample": True}}},
        124_439_808, 0.124,
    ),
    "Llama 3.1 8B": (
        published(128256, 4096, 14336, 32, 32, 8, model_type="llama", rope_theta=5e5, eos_token_id=[128001, 128008],
                  rope_scaling={"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                "original_max_position_embeddings": 8192, "rope_type": "llama3"}),
        8_030_261_248, 8.03,
    ),
    "Mistral 7B": (published(32000, 4096, 14336, 32, 32, 8, model_type="mistral", sliding_window=4096), 7_241_732_096, 7.24),
    "Mixtral 8x7B": (
        published(32000, 4096, 14336, 32, 32, 8, model_type="mixtral", num_local_experts=8, num_experts_per_tok=2,
                  router_aux_loss_coef=0.02, sliding_window=None),
        46_702_792_704, 12.9,
    ),
    "Qwen2.5 0.5B": (
        published(151936, 896, 4864, 24, 14, 2, model_type="qwen2", tie_word_embeddings=True, use_mrope=False, **QWEN),
        494_032_768, 0.494,
    ),
    "Qwen3 0.6B": (
        published(151936, 1024, 3072, 28, 16, 8, model_type="qwen3", head_dim=128, tie_word_embeddings=True, **QWEN),
        596_049_920, 0.596,
    ),
    "Qwen1.5 MoE A2.7B": (
        published(151936, 2048, 5632, 24, 16, 16, model_type="qwen2_moe", num_experts=60, num_experts_per_tok=4,
                  moe_intermediate_size=1408, shared_expert_intermediate_size=5632, **QWEN),
        14_315_784_192, 2.69,
    ),
    "Gemma 2 2B": (
        published(256000, 2304, 9216, 26, 8, 4, model_type="gemma2", sliding_window=4096, **GEMMA), 2_614_341_888, 2.61,
    ),
    "Gemma 3 1B": (
        published(262144, 1152, 6912, 26, 4, 1, model_type="gemma3_text", sliding_window=512, sliding_window_pattern=6,
                  rope_theta=1_000_000, rope_local_base_freq=10_000, rope_scaling=None, **GEMMA),
        999_885_952, 1.0,
    ),
    "DeepSeek-V3": (
        published(129280, 7168, 18432, 61, 128, 128, model_type="deepseek_v3", moe_intermediate_size=2048, ep_size=1,
                  n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, n_group=8, topk_group=4,
                  first_k_dense_replace=3, moe_layer_freq=1, topk_method="noaux_tc", scoring_func="sigmoid",
                  routed_scaling_factor=2.5, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
                  v_head_dim=128, num_nextn_predict_layers=1,
                  rope_scaling={"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                                "original_max_position_embeddings": 4096, "type": "yarn"}),
        671_026_404_352, 37.55,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_read_config_of_published_models_counts_params(name: str) -> None:
    fields, total, active = PUBLISHED[name]
    with torch.device("meta"):
        counted = Transformer(read_config(fields, name)).params()
    assert counted["total"] == total
    assert counted["active"] / 1e9 == pytest.approx(active, rel=0.005)


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"model_type": "lama"}, "'model_type' is 'lama'"),
    ("llama", {"model_type": "gemma3"}, "'model_type' is 'gemma3'"),
    ("llama", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "'rope_type' is 'longrope'"),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "warp": 3}}, "'warp' is 3"),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "'factor' is missing"),
    ("llama", {"hidden_act": "gelu"}, "'hidden_act' is 'gelu'"),
    ("llama", {"hidden_size": "32"}, "'hidden_size' is '32'"),
    ("llama", {"vocab_size": None}, "'vocab_size' is missing"),
    ("llama", {"model_type": None}, "'model_type' is missing"),
    ("llama", {"model_type": ["llama"]}, r"'model_type' is \['llama'\]"),
    ("llama", {"num_key_value_heads": 3}, r"'num_key_value_heads' is 3\n  expected: a divisor of num_attention_heads"),
    ("llama", {"num_attention_heads": 3, "head_dim": None}, r"'num_attention_heads' is 3\n.* divisor of hidden_size"),
    ("llama", {"num_attention_heads": 0}, "'num_attention_heads' is 0"),
    ("llama", {"num_attention_heads": -4}, "'num_attention_heads' is -4"),
    ("llama", {"num_key_value_heads": 0}, "'num_key_value_heads' is 0"),
    ("llama", {"head_dim": 0}, "'head_dim' is 0"),
    ("llama", {"head_dim": 7}, "'head_dim' is 7"),
    ("llama", {"num_hidden_layers": 0}, "'num_hidden_layers' is 0"),
    ("llama", {"vocab_size": 0}, "'vocab_size' is 0"),
    ("llama", {"intermediate_size": 0}, "'intermediate_size' is 0"),
    ("llama", {"max_position_embeddings": 0}, "'max_position_embeddings' is 0"),
    ("llama", {"rms_norm_eps": 0}, "'rms_norm_eps' is 0"),
    ("llama", {"rms_norm_eps": float("nan")}, "'rms_norm_eps' is nan"),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 0.5}}, "'rope_theta' is 0.5"),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0}}, "'factor' is 0"),
    ("llama", {"rope_parameters": {**LLAMA3, "high_freq_factor": 0.5}}, r"'high_freq_factor' is 0.5\n.*low_freq_factor"),
    ("llama", {"rope_parameters": {**YARN, "beta_slow": 40}}, r"'beta_fast' is missing\n.*above beta_slow"),
    *(
        (case, {"partial_rotary_factor": 0.5, "rope_parameters": {"rope_theta": 1e4}}, "'partial_rotary_factor' is 0.5")
        for case in ("llama", "mistral", "qwen2", "qwen3", "gemma2", "mixtral", "qwen2-moe", "qwen3-moe", "deepseek")
    ),
    ("llama", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "'partial_rotary_factor' is 0.5"),
    ("gemma3", {"rope_parameters": {"full_attention": {"partial_rotary_factor": 0.5}}}, "partial_rotary_factor"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "'query_pre_attn_scalar' is 0"),
    ("gpt2", {"n_head": 0}, "'n_head' is 0"),
    ("gpt2", {"n_head": 5}, r"'n_head' is 5\n  expected: a divisor of n_embd \(32\)"),
    ("mixtral", {"num_experts_per_tok": 1}, r"'num_experts_per_tok' is 1\n  expected: at least 2"),
    ("mixtral", {"num_experts_per_tok": 5}, r"'num_experts_per_tok' is 5\n  expected: at most"),
    ("qwen2-moe", {"decoder_sparse_step": 0}, "'decoder_sparse_step' is 0"),
    ("deepseek", {"qk_rope_head_dim": 7}, "'qk_rope_head_dim' is 7"),
    ("llama", {"quantization_config": {"bits": 4}}, "'quantization_config'"),
    ("llama", {"layer_types": ["sliding_attention"] * 2}, "'layer_types'"),
    ("qwen3", {"layer_types": ["chunked_attention", "full_attention"]}, "'layer_types'"),
    ("qwen3", {"layer_types": ["sliding_attention", "full_attention"]}, "'layer_types'"),
    ("gemma3", {"layer_types": ["full_attention"]}, "'layer_types'"),
    ("gemma3", {"use_bidirectional_attention": True}, "'use_bidirectional_attention' is True"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "'scale_attn_by_inverse_layer_idx' is True"),
    ("deepseek", {"scoring_func": "softmax"}, "'scoring_func' is 'softmax'"),
    ("deepseek", {"attention_bias": True}, "'attention_bias' is True"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "change", "message"), WRONG)
def test_read_config_names_unsupported_field(
    case: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    stem, fields = CASES[case]
    config_name = "Gemma3TextConfig" if stem == "Gemma3" else f"{stem}Config"
    getattr(transformers, config_name)(**{**({} if stem == "GPT2" else SHAPE), **fields}).save_pretrained(
        tmp_path
    )
    data = json.loads((tmp_path / "config.json").read_text())
    read_config(data, "config.json")
    with pytest.raises(ConfigError, match=message) as raised:
        read_config(data | change, "config.json")
    assert "config.json" in str(raised.value)


def test_read_config_ignores_fields_on_request() -> None:
    data = {**SHAPE, "model_type": "llama", "zeal": 0.5}
    with pytest.raises(ConfigError, match=r"'zeal' is 0\.5[^$]*pass ignore=\('zeal',\), or --ignore zeal"):
        read_config(data, "config.json")
    assert read_config(data, "config.json", ignore=("zeal",)) == read_config(
        data | {"zeal": None}, "config.json"
    )


def test_unused_mlp_width_is_no_config_difference(tmp_path: Path) -> None:
    experts = MoEConfig(n_experts=4, top_k=2, hidden=24)
    model = small(experts=experts, mlp_hidden=100)
    assert find_family(model.config) == "mixtral"
    export_model(model, tmp_path / "out", "mixtral")
    torch.testing.assert_close(logits(import_model(tmp_path / "out")), logits(model))
    some = [small(experts=experts.model_copy(update={"dense_layers": (0,)}), mlp_hidden=n) for n in (40, 48)]
    assert config_differences(some[0].config, some[1].config) == ["mlp_hidden is 40, not 48"]
    with pytest.raises(ConfigError, match=r"mlp_hidden|dense_layers"):
        export_model(some[0], tmp_path / "no", "mixtral")


def test_full_rotary_dim_is_no_config_difference() -> None:
    whole = small(mixers={"m": AttentionConfig(n_heads=4, n_kv_heads=2, head_dim=8, rope=Rope(rotary_dim=8))})
    assert find_family(whole.config) == "llama"


@pytest.mark.parametrize("kind", ["yarn", "llama3"])
def test_default_scaling_bounds_are_no_difference(kind: str, tmp_path: Path) -> None:
    heads = {"n_heads": 2, "n_kv_heads": 2, "head_dim": 16}
    scaling = {"kind": kind, "factor": 4.0, "original_length": 16}
    shape = {"vocab_size": 20, "d_model": 32, "n_layers": 1, "mlp_hidden": 32, "max_length": 64,
             "mixers": {"m": {**heads, "rope": {"scaling": scaling}}}}  # fmt: skip
    model = Transformer(TransformerConfig.model_validate(shape), torch.Generator().manual_seed(0))
    export_model(model, tmp_path / "out", find_family(model.config))
    ids = torch.arange(20)[None]
    back = import_model(tmp_path / "out")
    torch.testing.assert_close(back.logits(back(ids)), model.logits(model(ids)))
