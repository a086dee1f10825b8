"""Models of others in and out, held against their own library: the same logits, whole and piece by piece, there and back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from whorl.errors import CheckpointError, ConfigError
from whorl.models.exchange import (
    FAMILIES,
    Shards,
    export_model,
    fitting_family,
    import_model,
    read_config,
)
from whorl.models.exchange.family import differences
from whorl.models.exchange.files import plan_shards
from whorl.models.transformer import Transformer
from whorl.models.transformer_config import Experts, Heads, Member, Rope, TransformerConfig

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

SHAPE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
EVERY_THIRD = {"sliding_window_pattern": 3}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LATENT = {
    "num_key_value_heads": 4, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 4, "topk_group": 2,
    "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12,
    "v_head_dim": 10,
}  # fmt: skip
# name -> (their classes' stem, the fields that differ from SHAPE)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "llama": ("Llama", {}),
    "llama-3": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "mistral": ("Mistral", {"sliding_window": 6, "head_dim": 16}),
    "qwen2": ("Qwen2", {}),
    "qwen2-sliding": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 24}),
    "gemma3": (
        "Gemma3",
        {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 24, "num_hidden_layers": 4, **EVERY_THIRD},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2-moe": ("Qwen2Moe", {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 40}),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "num_experts": 4, "head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [0]}),
    "deepseek": ("DeepseekV3", {**EXPERTS, **LATENT}),
    "deepseek-yarn": (
        "DeepseekV3",
        {**EXPERTS, **LATENT, "q_lora_rank": None, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}},
    ),
}  # fmt: skip


def theirs(case: str) -> Any:
    """A tiny model of theirs, every weight drawn: norms too, so that a swapped one is seen."""
    stem, fields = CASES[case]
    config_name = "Gemma3TextConfig" if stem == "Gemma3" else f"{stem}Config"
    base = {"vocab_size": 96} if stem == "GPT2" else SHAPE
    config = getattr(transformers, config_name)(**{**base, **fields})
    cls = getattr(transformers, "GPT2LMHeadModel" if stem == "GPT2" else f"{stem}ForCausalLM")
    torch.manual_seed(0)
    model = cls(config).eval()
    for p in model.parameters():
        p.data = torch.randn_like(p) * 0.2 + (p.data if p.dim() == 1 else 0)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn_like(buffer) * 0.3)
    return model


def saved(case: str, folder: Path, **options: Any) -> Any:
    model = theirs(case)
    model.save_pretrained(folder, **options)
    return model


IDS = torch.randint(0, 96, (2, 20), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model: Transformer) -> torch.Tensor:
    return model.logits(model(IDS))


@pytest.mark.parametrize("case", CASES)
def test_logits_are_theirs_whole_cached_and_after_export(case: str, tmp_path: Path) -> None:
    model = saved(case, tmp_path / "theirs")
    with torch.no_grad():
        want = model(IDS).logits
    assert want.std() > 0.5  # else an agreement would say nothing
    ours = import_model(tmp_path / "theirs")
    torch.testing.assert_close(logits(ours), want, atol=1e-4, rtol=0)

    state = ours.new_state(2, 20)
    with torch.no_grad():
        pieces = [ours(ids, state=state) for ids in IDS.split([1, 3, 9, 1, 6], dim=1)]
        torch.testing.assert_close(ours.logits(torch.cat(pieces, 1)), want, atol=1e-4, rtol=0)

    export_model(
        ours, tmp_path / "ours", model.config.model_type, source=tmp_path / "theirs", shard_bytes=30_000
    )
    assert (tmp_path / "ours" / "model.safetensors.index.json").exists()
    back, info = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    with torch.no_grad():
        torch.testing.assert_close(back.eval()(IDS).logits, want, atol=1e-6, rtol=0)
    again = import_model(tmp_path / "ours")
    assert again.config == ours.config
    assert all(
        torch.equal(a, b)
        for a, b in zip(again.state_dict().values(), ours.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize("case", ["llama-3", "gemma3", "qwen3"])
def test_bf16_differs_from_fp32_no_more_than_theirs_does(case: str, tmp_path: Path) -> None:
    model = saved(case, tmp_path / "theirs")
    with torch.no_grad():
        exact = model(IDS).logits
        noise = (model.bfloat16()(IDS).logits.float() - exact).abs().mean()
    for to_train in (True, False):
        ours = import_model(tmp_path / "theirs", dtype=torch.bfloat16, to_train=to_train)
        assert 0 < (logits(ours) - exact).abs().mean() < 1.5 * noise
        assert (ours.blocks[0].mlp.up.weight.dtype == torch.float32) == to_train
        assert ours.final_norm.weight.dtype == torch.float32


def test_every_weight_of_an_import_receives_a_gradient(tmp_path: Path) -> None:
    saved("deepseek", tmp_path / "theirs")
    ours = import_model(tmp_path / "theirs")
    ours.get_buffer(
        "blocks.1.mlp.router.balance_bias"
    ).zero_()  # drawn so strong that some experts see no token
    ours.logits(ours(IDS)).square().mean().backward()
    silent = [n for n, p in ours.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert not silent


def test_shards_are_cut_by_size_and_read_back(tmp_path: Path) -> None:
    assert plan_shards({"a": 4, "b": 4, "c": 9, "d": 1}, 8) == [["a", "b"], ["c"], ["d"]]
    model = saved("llama", tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="10KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    torch.testing.assert_close(
        logits(import_model(tmp_path / "many")), logits(import_model(tmp_path / "one"))
    )
    assert Shards(tmp_path / "many").names() == Shards(tmp_path / "one").names()


def test_old_files_without_prefix_with_masks_and_with_a_stored_tied_head(tmp_path: Path) -> None:
    saved("gpt2", tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    want = logits(import_model(tmp_path / "m"))
    weights = {name.removeprefix("transformer."): t for name, t in load_file(path).items()}
    weights["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    weights["lm_head.weight"] = weights["wte.weight"].clone()
    save_file(weights, path)
    assert torch.equal(logits(import_model(tmp_path / "m")), want)
    weights["lm_head.weight"] += 1.0
    save_file(weights, path)
    with pytest.raises(CheckpointError, match=r"'lm_head.weight' differs"):
        import_model(tmp_path / "m")


def test_fields_of_older_files_mean_what_they_meant(tmp_path: Path) -> None:
    base = {k: v for k, v in SHAPE.items() if v is not None} | {"rms_norm_eps": 1e-5, "hidden_act": "silu"}
    old = base | {
        "model_type": "llama",
        "rope_theta": 5e5,
        "rope_scaling": dict(LLAMA3),
    }
    old["rope_scaling"].pop("rope_theta")
    new = base | {
        "model_type": "llama",
        "rope_parameters": dict(LLAMA3),
    }
    assert read_config(old, "old") == read_config(new, "new")
    theirs_old = transformers.Gemma3TextConfig(
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
    assert (
        isinstance(near, Heads)
        and near.rope
        and near.rope.base == theirs_old.rope_parameters["sliding_attention"]["rope_theta"]
    )
    assert near.rope.scaling is None and near.window == theirs_old.sliding_window
    assert (
        isinstance(far, Heads)
        and far.rope
        and far.rope.scaling
        and far.rope.base == 5e5
        and far.window is None
    )


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
def test_which_layers_slide_is_known_without_their_list(
    stem: str, fields: dict[str, Any], tmp_path: Path
) -> None:
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
# The fields of published files, with which these models have just so many parameters: (fields, total, active in billions).
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
def test_published_files_are_read_and_have_the_published_number_of_parameters(name: str) -> None:
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
def test_a_field_that_would_change_the_result_is_named(
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


def test_an_unknown_field_can_be_vouched_for() -> None:
    data = {**SHAPE, "model_type": "llama", "zeal": 0.5}
    with pytest.raises(ConfigError, match=r"'zeal' is 0\.5[^$]*pass ignore=\('zeal',\), or --ignore zeal"):
        read_config(data, "config.json")
    assert read_config(data, "config.json", ignore=("zeal",)) == read_config(
        data | {"zeal": None}, "config.json"
    )


def test_what_is_wrong_with_the_files_is_named(tmp_path: Path) -> None:
    saved("qwen2", tmp_path / "good")
    weights = load_file(tmp_path / "good" / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"

    def broken(change: dict[str, Any], drop: str = "") -> Path:
        folder = tmp_path / "bad"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "good", folder)
        kept = {k: v for k, v in {**weights, **change}.items() if k != drop}
        save_file(kept, folder / "model.safetensors")
        return folder

    for folder, message in (
        (lambda: broken({}, drop=name), rf"tensor '{name}' is missing"),
        (
            lambda: broken({"model.extra": torch.ones(2)}),
            r"model.safetensors: tensor 'model.extra' is not known",
        ),
        (lambda: broken({name: torch.ones(48, 31)}), rf"tensor '{name}' has the shape \[48, 31\]"),
        (
            lambda: broken({name: weights[name].t().contiguous()}),
            rf"tensor '{name}' has the shape \[32, 48\]",
        ),
        (lambda: broken({name: torch.ones(48, 32, dtype=torch.int8)}), rf"tensor '{name}' is of type I8"),
    ):
        with pytest.raises(CheckpointError, match=message):
            import_model(folder())


def test_truncated_missing_and_unfitting_files_are_named(tmp_path: Path) -> None:
    model = saved("qwen2", tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    whole = path.read_bytes()
    for cut in (len(whole) - 1, len(whole) // 2, 20, 0):
        path.write_bytes(whole[:cut])
        with pytest.raises(CheckpointError, match=r"model.safetensors.* cannot be read"):
            import_model(tmp_path / "m")
    path.unlink()
    with pytest.raises(CheckpointError, match="holds neither"):
        import_model(tmp_path / "m")
    (tmp_path / "m" / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(CheckpointError, match="a pickle can run any code"):
        import_model(tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json cannot be read"):
        import_model(tmp_path / "m")

    model.save_pretrained(tmp_path / "s", max_shard_size="10KB")
    index = tmp_path / "s" / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    first = sorted(set(listed["weight_map"].values()))[0]
    for changed, message in (
        ({"model.norm.weight": "../x.safetensors"}, r"names '../x.safetensors'"),
        (
            {"model.ghost": first},
            rf"{first}: tensor 'model.ghost' is listed in the index but not in the file",
        ),
    ):
        index.write_text(json.dumps({"weight_map": listed["weight_map"] | changed}))
        with pytest.raises(CheckpointError, match=message):
            import_model(tmp_path / "s")
    index.write_text(json.dumps(listed))
    (tmp_path / "s" / first).unlink()
    with pytest.raises(CheckpointError, match=rf"{first} cannot be read"):
        import_model(tmp_path / "s")


def small(**changes: Any) -> Transformer:
    heads = Heads(n_heads=4, n_kv_heads=2, head_dim=8)
    shape = {"vocab_size": 96, "d_model": 32, "n_layers": 2, "mlp_hidden": 40, "mixers": {"full": heads}}
    return Transformer(TransformerConfig(**(shape | changes)), torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"logit_softcap": 30.0}, "logit_softcap is 30.0"),
        ("llama", {"mlp": "relu2"}, "mlp is 'relu2'"),
        ("llama", {"mixers": {"m": Heads(n_heads=4, n_kv_heads=2, head_dim=8, rope=Rope(rotary_dim=4))}}, "rotary_dim"),
        ("mixtral", {"experts": Experts(n_experts=4, top_k=2, hidden=24, scale=2.0)}, r": experts.scale is 2.0, not 1.0"),
        ("llama", {"sandwich": True}, "sandwich is True"),
        ("qwen3", {}, "qk_norm"),
        ("gpt2", {}, "."),
        ("mixtral", {}, "no experts"),
        ("deepseek_v3", {}, "mixer of layer 0 is 'heads'"),
        ("gemma2", {}, "."),
        ("bert", {}, "'model_type' is 'bert'"),
    ],
)  # fmt: skip
def test_a_model_that_a_family_cannot_express_is_refused(
    family: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        export_model(small(**changes), tmp_path / "out", family)
    assert not list(tmp_path.iterdir())


def test_our_own_family_carries_any_mixer_and_other_types(tmp_path: Path) -> None:
    mixers = {
        "a": Heads(n_heads=4, n_kv_heads=2, head_dim=8, alibi=True, rope=None),
        "b": Member(kind="linear", options={"n_heads": 4}),
    }
    experts = Experts(n_experts=4, top_k=2, hidden=24, scoring="sigmoid", bias_balance=True)
    model = small(mixers=mixers, sandwich=True, logit_softcap=5.0, experts=experts)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2, generator=torch.Generator().manual_seed(p.numel()))
    export_model(model, tmp_path / "own")
    assert torch.equal(logits(import_model(tmp_path / "own")), logits(model))
    export_model(model, tmp_path / "low", dtype=torch.bfloat16)
    low = load_file(tmp_path / "low" / "model.safetensors")
    full = {name for name, t in low.items() if t.dtype != torch.bfloat16}
    assert full == {f"blocks.{n}.mlp.router.balance_bias" for n in range(2)}
    with pytest.raises(ConfigError, match="is not empty"):
        export_model(model, tmp_path / "own")
    data = json.loads((tmp_path / "own" / "config.json").read_text())
    data["transformer"]["n_layers"] = 0
    (tmp_path / "own" / "config.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=r"config.json: TransformerConfig.n_layers is 0: .* equal to 1"):
        import_model(tmp_path / "own")


def test_tokenizer_files_and_special_ids_are_carried_over(tmp_path: Path) -> None:
    saved("llama", tmp_path / "theirs")
    (tmp_path / "theirs" / "tokenizer.json").write_bytes(b'{"a": 1}')
    export_model(import_model(tmp_path / "theirs"), tmp_path / "ours", "llama", source=tmp_path / "theirs")
    assert (tmp_path / "ours" / "tokenizer.json").read_bytes() == b'{"a": 1}'
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["eos_token_id"] == 2
    assert (tmp_path / "ours" / "generation_config.json").exists()


def test_layers_that_predict_further_tokens_are_left_out_with_a_warning(tmp_path: Path) -> None:
    saved("deepseek", tmp_path / "m")
    path, want = tmp_path / "m" / "model.safetensors", logits(import_model(tmp_path / "m"))
    save_file({**load_file(path), "model.layers.2.eh_proj.weight": torch.ones(2, 2)}, path)
    with pytest.warns(UserWarning, match="1 tensors behind the last layer"):
        assert torch.equal(logits(import_model(tmp_path / "m")), want)


def test_the_balancing_bias_is_never_rounded(tmp_path: Path) -> None:
    model = saved("deepseek", tmp_path / "theirs")
    export_model(import_model(tmp_path / "theirs"), tmp_path / "low", "deepseek_v3", dtype=torch.bfloat16)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(
        load_file(tmp_path / "low" / "model.safetensors")[name], dict(model.named_buffers())[name]
    )
    back = type(model).from_pretrained(tmp_path / "low", dtype=torch.bfloat16)
    assert dict(back.named_buffers())[name].dtype == torch.float32  # so they keep it too


def test_a_width_that_nothing_has_is_no_difference(tmp_path: Path) -> None:
    experts = Experts(n_experts=4, top_k=2, hidden=24)
    model = small(experts=experts, mlp_hidden=100)
    assert fitting_family(model.config) == "mixtral"
    export_model(model, tmp_path / "out", "mixtral")
    torch.testing.assert_close(logits(import_model(tmp_path / "out")), logits(model))
    some = [small(experts=experts.model_copy(update={"dense_layers": (0,)}), mlp_hidden=n) for n in (40, 48)]
    assert differences(some[0].config, some[1].config) == ["mlp_hidden is 40, not 48"]
    with pytest.raises(ConfigError, match=r"mlp_hidden|dense_layers"):
        export_model(some[0], tmp_path / "no", "mixtral")


def test_all_features_turning_is_no_share_of_them() -> None:
    whole = small(mixers={"m": Heads(n_heads=4, n_kv_heads=2, head_dim=8, rope=Rope(rotary_dim=8))})
    assert fitting_family(whole.config) == "llama"


def test_what_the_network_itself_finds_impossible_names_the_file(tmp_path: Path) -> None:
    saved("deepseek", tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"n_group": 3}))
    with pytest.raises(ConfigError, match=r"m/config.json: .*groups"):
        import_model(tmp_path / "m")


def test_every_family_is_tested() -> None:
    types = {theirs(case).config.model_type for case in CASES}
    assert types == set(FAMILIES) - {"whorl"}


@pytest.mark.parametrize("kind", ["yarn", "llama3"])
def test_bounds_that_a_scaling_leaves_to_its_kind_are_no_difference(kind: str, tmp_path: Path) -> None:
    heads = {"n_heads": 2, "n_kv_heads": 2, "head_dim": 16}
    scaling = {"kind": kind, "factor": 4.0, "original_length": 16}
    shape = {"vocab_size": 20, "d_model": 32, "n_layers": 1, "mlp_hidden": 32, "max_length": 64,
             "mixers": {"m": {**heads, "rope": {"scaling": scaling}}}}  # fmt: skip
    model = Transformer(TransformerConfig.model_validate(shape), torch.Generator().manual_seed(0))
    export_model(model, tmp_path / "out", fitting_family(model.config))
    ids = torch.arange(20)[None]
    back = import_model(tmp_path / "out")
    torch.testing.assert_close(back.logits(back(ids)), model.logits(model(ids)))


def test_a_model_that_no_family_can_express_says_why_for_each() -> None:
    shape = {
        "vocab_size": 20,
        "d_model": 32,
        "n_layers": 1,
        "mlp_hidden": 32,
        "mixers": {"m": {"kind": "mamba"}},
    }
    with pytest.raises(ConfigError, match="no family of others") as error:
        fitting_family(TransformerConfig.model_validate(shape))
    assert "\n    llama: " in str(error.value) and "\n    gpt2: " in str(error.value)
