"""Fields of Hugging Face config.json files: meaning, defaults, and errors for unsupported ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.models.exchange_cases import (
    CASES,
    LLAMA3,
    PUBLISHED,
    SHAPE,
    YARN,
    hf_config,
    logits,
    small,
)

from whorl.errors import ConfigError
from whorl.models.exchange import export_model, find_family, import_model, read_config
from whorl.models.exchange.family import config_differences
from whorl.models.transformer import Transformer
from whorl.models.transformer_config import AttentionConfig, MoEConfig, Rope
from whorl.nn.compiler import meta_device

transformers = pytest.importorskip("transformers")


def test_read_config_supports_older_fields() -> None:
    base = {k: v for k, v in SHAPE.items() if v is not None} | {"rms_norm_eps": 1e-5, "hidden_act": "silu"}
    scaling = {k: v for k, v in LLAMA3.items() if k != "rope_theta"}
    old = base | {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": scaling}
    new = base | {"model_type": "llama", "rope_parameters": dict(LLAMA3)}
    assert read_config(old, "old") == read_config(new, "new")
    linear = {"rope_type": "linear", "factor": 8.0}
    rope = {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": linear}
    hf_old = transformers.Gemma3TextConfig(**{**rope, "rope_scaling": dict(linear)})
    gemma = base | rope | {"model_type": "gemma3_text", "sliding_window_pattern": 2}
    near, far = read_config(gemma, "gemma").layer_mixers()
    assert isinstance(near, AttentionConfig) and isinstance(far, AttentionConfig) and near.rope and far.rope
    assert near.rope.base == hf_old.rope_parameters["sliding_attention"]["rope_theta"]
    assert near.rope.scaling is None and near.window == hf_old.sliding_window
    assert far.rope.scaling and far.rope.base == 5e5 and far.window is None


SLIDING = {"use_sliding_window": True, "sliding_window": 5, "num_hidden_layers": 7}


WITH_WINDOWS: list[tuple[str, dict[str, Any]]] = [
    ("Qwen2Config", {**SLIDING, "max_window_layers": 3}),
    ("Qwen3Config", {**SLIDING, "max_window_layers": 3, "head_dim": 16}),
    ("Qwen2MoeConfig", {**SLIDING, "max_window_layers": 4}),
    ("Gemma2Config", {"num_hidden_layers": 7}),
    ("Gemma3TextConfig", {"num_hidden_layers": 7}),
    ("Gemma3TextConfig", {"num_hidden_layers": 7, "sliding_window_pattern": 2}),
]


@pytest.mark.parametrize(("stem", "fields"), WITH_WINDOWS)
def test_read_config_infers_sliding_layers(stem: str, fields: dict[str, Any]) -> None:
    given = {k: v for k, v in {**SHAPE, **fields}.items() if v is not None}
    data = json.loads(getattr(transformers, stem)(**given).to_json_string())
    listed = read_config(data, "config.json")
    assert {getattr(m, "window", 0) is None for m in listed.layer_mixers()} == {True, False}
    assert read_config({k: v for k, v in data.items() if k != "layer_types"}, "config.json") == listed


@pytest.mark.parametrize("name", PUBLISHED)
def test_read_config_of_published_models_counts_params(name: str) -> None:
    published = PUBLISHED[name]
    with meta_device():  # without initial weights, which take 20 s for DeepSeek-V3
        counted = Transformer(read_config(published["config"], name)).params()
    assert counted["total"] == published["total"]
    assert counted["active"] / 1e9 == pytest.approx(published["active"], rel=0.005)


ROTARY = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "mixtral",
    "qwen2-moe",
    "qwen3-moe",
    "deepseek",
    "smollm3",
    "granite",
    "gemma",
    "olmo2",
    "olmoe",
)
PARTIAL = {"partial_rotary_factor": 0.5, "rope_parameters": {"rope_theta": 1e4}}
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
    *((case, PARTIAL, "'partial_rotary_factor' is 0.5") for case in ROTARY),
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
    ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4}, "rope_parameters": None}, "'longrope'"),
    ("phi3", {"rope_parameters": dict(YARN)}, "rope_type 'default'"),
    ("smollm3", {"no_rope_layers": [1, 0]}, "(?s)'no_rope_layers' is .*each of 4 layers"),
    ("smollm3", {"no_rope_layers": [1, 0, 2, 1]}, "'no_rope_layers'"),
    ("granite", {"residual_multiplier": "x"}, "'residual_multiplier' is 'x'"),
    ("granite", {"logits_scaling": 0}, "'logits_scaling' is 0"),
    ("olmoe", {"clip_qkv": 8.0}, "'clip_qkv' is 8.0"),
    ("olmoe", {"num_experts_per_tok": 5}, r"'num_experts_per_tok' is 5\n  expected: at most"),
    ("gemma", {"hidden_activation": "relu"}, "'hidden_activation' is 'relu'"),
    ("gemma", {"use_bidirectional_attention": True}, "'use_bidirectional_attention' is True"),
    *((case, {"is_causal": False}, "'is_causal' is False") for case in CASES),
    ("llama", {"is_causal": None}, "'is_causal' is None"),
    *(
        (case, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "'rope_scaling' has rope_type = 'linear', .*'default'")
        for case in ROTARY
    ),
    ("gemma3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "'rope_scaling' is"),
    *((case, {"num_hidden_layers": 10**9}, "at most 10,000") for case in CASES if case != "gpt2"),
    ("gpt2", {"n_layer": 10**9}, "at most 10,000"),
    ("gpt2", {"n_positions": 10**12}, "at most 16,777,216"),
    ("qwen3-moe", {"num_experts": 10**9}, "at most 10,000"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "change", "message"), WRONG)
def test_read_config_names_unsupported_field(case: str, change: dict[str, Any], message: str) -> None:
    data = json.loads(hf_config(case).to_json_string())
    read_config(data, "config.json")
    with pytest.raises(ConfigError, match=message) as raised:
        read_config(data | change, "config.json")
    assert "config.json" in str(raised.value)


def test_read_config_ignores_fields_on_request() -> None:
    data = {**SHAPE, "model_type": "llama", "zeal": 0.5}
    with pytest.raises(ConfigError, match=r"'zeal' is 0\.5[^$]*pass ignore=\('zeal',\), or --ignore zeal"):
        read_config(data, "config.json")
    want = read_config(data | {"zeal": None}, "config.json")
    assert read_config(data, "config.json", ignore=("zeal",)) == want


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
    rope = {"scaling": {"kind": kind, "factor": 4.0, "original_length": 16}}
    heads = AttentionConfig.model_validate({"n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "rope": rope})
    model = small(mixers={"m": heads}, max_length=64)
    export_model(model, tmp_path / "out", find_family(model.config))
    torch.testing.assert_close(logits(import_model(tmp_path / "out")), logits(model))
