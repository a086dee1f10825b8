"""Exchange with Hugging Face: the same logits whole and in pieces, after import and after export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.models.exchange_cases import CASES, IDS, hf_model, logits, save_hf_model, small

from whorl.errors import CheckpointError, ConfigError
from whorl.models.exchange import FAMILIES, export_model, find_family, import_model
from whorl.models.transformer_config import AttentionConfig, CustomMixer, MoEConfig, Rope, TransformerConfig

PARTIAL_ROPE = AttentionConfig(n_heads=4, n_kv_heads=2, head_dim=8, rope=Rope(rotary_dim=4))


@pytest.mark.parametrize("case", CASES)
def test_logits_match_whole_cached_and_after_export(case: str, tmp_path: Path) -> None:
    model = save_hf_model(case, tmp_path / "hf")
    with torch.no_grad():
        want = model(IDS).logits
    assert want.std() > 0.5  # otherwise agreement is trivial
    imported = import_model(tmp_path / "hf")
    torch.testing.assert_close(logits(imported), want, atol=1e-4, rtol=0)

    state = imported.new_state(2, 20)
    with torch.no_grad():
        pieces = [imported(ids, state=state) for ids in IDS.split([1, 3, 9, 1, 6], dim=1)]
        torch.testing.assert_close(imported.logits(torch.cat(pieces, 1)), want, atol=1e-4, rtol=0)

    export_model(
        imported, tmp_path / "whorl", model.config.model_type, source=tmp_path / "hf", shard_bytes=30_000
    )
    assert (tmp_path / "whorl" / "model.safetensors.index.json").exists()
    back, info = type(model).from_pretrained(tmp_path / "whorl", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    with torch.no_grad():
        torch.testing.assert_close(back.eval()(IDS).logits, want, atol=1e-6, rtol=0)
    again = import_model(tmp_path / "whorl")
    assert again.config == imported.config
    assert all(
        torch.equal(a, b)
        for a, b in zip(again.state_dict().values(), imported.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize("case", ["llama-3", "gemma3", "qwen3"])
def test_bf16_noise_matches_transformers(case: str, tmp_path: Path) -> None:
    model = save_hf_model(case, tmp_path / "hf")
    with torch.no_grad():
        exact = model(IDS).logits
        noise = (model.bfloat16()(IDS).logits.float() - exact).abs().mean()
    for to_train in (True, False):
        imported = import_model(tmp_path / "hf", dtype=torch.bfloat16, to_train=to_train)
        assert 0 < (logits(imported) - exact).abs().mean() < 1.5 * noise
        assert (imported.blocks[0].mlp.up.weight.dtype == torch.float32) == to_train
        assert imported.final_norm.weight.dtype == torch.float32


def test_import_every_weight_gets_a_gradient(tmp_path: Path) -> None:
    save_hf_model("deepseek", tmp_path / "hf")
    imported = import_model(tmp_path / "hf")
    imported.get_buffer(
        "blocks.1.mlp.router.balance_bias"
    ).zero_()  # random, it leaves experts without tokens
    imported.logits(imported(IDS)).square().mean().backward()
    no_gradient = [n for n, p in imported.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert not no_gradient


def test_import_reads_old_files(tmp_path: Path) -> None:
    save_hf_model("gpt2", tmp_path / "m")
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


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"logit_softcap": 30.0}, "logit_softcap is 30.0"),
        ("llama", {"mlp": "relu2"}, "mlp is 'relu2'"),
        ("llama", {"mixers": {"m": PARTIAL_ROPE}}, "rotary_dim"),
        ("mixtral", {"experts": MoEConfig(n_experts=4, top_k=2, hidden=24, scale=2.0)}, r": experts.scale is 2.0, not 1.0"),
        ("llama", {"sandwich": True}, "sandwich is True"),
        ("qwen3", {}, "qk_norm"),
        ("gpt2", {}, "."),
        ("mixtral", {}, "no experts"),
        ("deepseek_v3", {}, "mixer of layer 0 is 'heads'"),
        ("gemma2", {}, "."),
        ("bert", {}, "'model_type' is 'bert'"),
    ],
)  # fmt: skip
def test_export_rejects_unsupported_models(
    family: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        export_model(small(**changes), tmp_path / "out", family)
    assert not list(tmp_path.iterdir())


def test_whorl_family_supports_any_mixer_and_dtype(tmp_path: Path) -> None:
    mixers = {
        "a": AttentionConfig(n_heads=4, n_kv_heads=2, head_dim=8, alibi=True, rope=None),
        "b": CustomMixer(kind="linear", options={"n_heads": 4}),
    }
    experts = MoEConfig(n_experts=4, top_k=2, hidden=24, scoring="sigmoid", bias_balance=True)
    model = small(mixers=mixers, sandwich=True, logit_softcap=5.0, experts=experts)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2, generator=torch.Generator().manual_seed(p.numel()))
    export_model(model, tmp_path / "own")
    assert torch.equal(logits(import_model(tmp_path / "own")), logits(model))
    export_model(model, tmp_path / "low", dtype=torch.bfloat16)
    bf16 = load_file(tmp_path / "low" / "model.safetensors")
    full = {name for name, t in bf16.items() if t.dtype != torch.bfloat16}
    assert full == {f"blocks.{n}.mlp.router.balance_bias" for n in range(2)}
    with pytest.raises(ConfigError, match="is not empty"):
        export_model(model, tmp_path / "own")
    data = json.loads((tmp_path / "own" / "config.json").read_text())
    data["transformer"]["n_layers"] = 0
    (tmp_path / "own" / "config.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=r"config.json: TransformerConfig.n_layers is 0: .* equal to 1"):
        import_model(tmp_path / "own")


def test_import_skips_multi_token_layers_with_warning(tmp_path: Path) -> None:
    save_hf_model("deepseek", tmp_path / "m")
    path, want = tmp_path / "m" / "model.safetensors", logits(import_model(tmp_path / "m"))
    save_file({**load_file(path), "model.layers.2.eh_proj.weight": torch.ones(2, 2)}, path)
    with pytest.warns(UserWarning, match="1 tensors after the last layer"):
        assert torch.equal(logits(import_model(tmp_path / "m")), want)


def test_export_keeps_balance_bias_in_fp32(tmp_path: Path) -> None:
    model = save_hf_model("deepseek", tmp_path / "hf")
    export_model(import_model(tmp_path / "hf"), tmp_path / "low", "deepseek_v3", dtype=torch.bfloat16)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(
        load_file(tmp_path / "low" / "model.safetensors")[name], dict(model.named_buffers())[name]
    )
    back = type(model).from_pretrained(tmp_path / "low", dtype=torch.bfloat16)
    assert dict(back.named_buffers())[name].dtype == torch.float32  # transformers keeps it in fp32 too


def test_families_are_all_tested() -> None:
    types = {hf_model(case).config.model_type for case in CASES}
    assert types == set(FAMILIES) - {"whorl"}


def test_find_family_gives_a_reason_per_family() -> None:
    mamba = {"m": {"kind": "mamba"}}
    shape = {"vocab_size": 20, "d_model": 32, "n_layers": 1, "mlp_hidden": 32, "mixers": mamba}
    with pytest.raises(ConfigError, match="no family can express") as error:
        find_family(TransformerConfig.model_validate(shape))
    assert "\n    llama: " in str(error.value) and "\n    gpt2: " in str(error.value)
