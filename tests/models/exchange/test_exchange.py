"""Exchange with Hugging Face: the same logits after import and export, and errors that name damaged files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.models.exchange_cases import CASES, IDS, hf_model, hf_outputs, logits, save_hf_model, small

from whorl.embedding.embedder import load_encoder
from whorl.engine.config import EngineConfig
from whorl.engine.engine import Engine
from whorl.engine.sampling_params import SamplingParams
from whorl.errors import CheckpointError, ConfigError, DataError
from whorl.models import load_model
from whorl.models.exchange import FAMILIES, Shards, export_model, find_family, import_model
from whorl.models.exchange.safetensors_io import plan_shards
from whorl.models.transformer_config import AttentionConfig, CustomMixer, MoEConfig, Rope, TransformerConfig
from whorl.recipes.steps.import_model import ImportConfig
from whorl.recipes.steps.import_model import _with_file_hashes as complete_import
from whorl.tokens.chat import load_chat_template
from whorl.vision.load import load_vision

HEADS = AttentionConfig(n_heads=4, n_kv_heads=2, head_dim=8)
ALL_HEADS = HEADS.model_copy(update={"qk_norm": "all_heads"})
PARTIAL_ROPE = HEADS.model_copy(update={"rope": Rope(rotary_dim=4)})


def edit(path: Path, **changes: Any) -> None:
    """Change fields of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("case", CASES)
def test_logits_match_whole_cached_and_after_export(case: str, tmp_path: Path) -> None:
    model = save_hf_model(case, tmp_path / "hf")
    want = hf_outputs(model)
    assert want.std() > 0.5  # otherwise agreement is trivial
    imported = import_model(tmp_path / "hf")
    assert all(p.requires_grad for p in imported.parameters())
    torch.testing.assert_close(logits(imported), want, atol=1e-4, rtol=0)

    state = imported.new_state(2, 20)
    with torch.no_grad():
        pieces = [imported(ids, state=state) for ids in IDS.split([1, 3, 9, 1, 6], dim=1)]
        torch.testing.assert_close(imported.logits(torch.cat(pieces, 1)), want, atol=1e-4, rtol=0)

    out, family = tmp_path / "whorl", model.config.model_type
    export_model(imported, out, family, source=tmp_path / "hf", shard_bytes=30_000)
    assert (out / "model.safetensors.index.json").exists()
    back, info = type(model).from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    folded = case == "granite"  # multipliers are part of the weights, which are rounded once more
    torch.testing.assert_close(hf_outputs(back.eval()), want, atol=1e-5 if folded else 1e-6, rtol=0)
    again = import_model(out)
    assert again.config == imported.config
    torch.testing.assert_close(again.state_dict(), imported.state_dict(), atol=0, rtol=0)


@pytest.mark.parametrize(
    "case", ["phi3", "phi4-mini", "smollm3", "smollm3-sliding", "granite", "gemma", "olmo2", "olmoe"]
)
def test_engine_decodes_as_transformers(case: str, tmp_path: Path) -> None:
    model = save_hf_model(case, tmp_path)
    engine = Engine(
        import_model(tmp_path, to_train=False), EngineConfig(max_num_seqs=2, max_model_len=40, block_size=8)
    )
    found = engine.generate(IDS.tolist(), SamplingParams(temperature=0), max_tokens=12)
    with torch.no_grad():
        seen = torch.ones_like(IDS)
        want = model.generate(IDS, attention_mask=seen, do_sample=False, max_new_tokens=12, eos_token_id=None)
    assert [[token.id for token in generation.tokens] for generation in found] == want[:, 20:].tolist()


@pytest.mark.parametrize("case", ["llama-3", "gemma3", "qwen3"])
def test_bf16_noise_matches_transformers(case: str, tmp_path: Path) -> None:
    model = save_hf_model(case, tmp_path / "hf")
    exact = hf_outputs(model)
    noise = (hf_outputs(model.bfloat16()) - exact).abs().mean()
    for to_train in (True, False):
        imported = import_model(tmp_path / "hf", dtype=torch.bfloat16, to_train=to_train)
        assert 0 < (logits(imported) - exact).abs().mean() < 1.5 * noise
        assert (imported.blocks[0].mlp.up.weight.dtype == torch.float32) == to_train
        assert imported.final_norm.weight.dtype == torch.float32


def test_import_reads_old_files(tmp_path: Path) -> None:
    save_hf_model("gpt2", tmp_path)
    path, want = tmp_path / "model.safetensors", logits(import_model(tmp_path))
    weights = {name.removeprefix("transformer."): t for name, t in load_file(path).items()}
    weights["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    weights["lm_head.weight"] = weights["wte.weight"].clone()
    save_file(weights, path)
    assert torch.equal(logits(import_model(tmp_path)), want)
    weights["lm_head.weight"] += 1.0
    save_file(weights, path)
    with pytest.raises(CheckpointError, match=r"'lm_head.weight' differs"):
        import_model(tmp_path)


SCALED = MoEConfig(n_experts=4, top_k=2, hidden=24, scale=2.0)
UNSUPPORTED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"logit_softcap": 30.0}, "logit_softcap is 30.0"),
    ("llama", {"mlp": "relu2"}, "mlp is 'relu2'"),
    ("llama", {"mixers": {"m": PARTIAL_ROPE}}, "rotary_dim"),
    ("mixtral", {"experts": SCALED}, r": experts.scale is 2.0, not 1.0"),
    ("llama", {"sandwich": True}, "sandwich is True"),
    ("qwen3", {}, "qk_norm"),
    ("qwen3", {"mixers": {"m": ALL_HEADS}}, "qk_norm is 'all_heads', not True"),
    ("olmo2", {"mixers": {"m": ALL_HEADS.model_copy(update={"head_dim": 16})}}, "head_dim of layer 0 is 16"),
    ("olmo2", {"mixers": {"m": ALL_HEADS}}, "pre_norm is True, not False"),
    ("gpt2", {}, "."),
    ("mixtral", {}, "no experts"),
    ("deepseek_v3", {}, "mixer of layer 0 is 'heads'"),
    ("gemma2", {}, "."),
    ("bert", {}, "'model_type' is 'bert'"),
]


@pytest.mark.parametrize(("family", "changes", "message"), UNSUPPORTED)
def test_export_rejects_unsupported_models(family: str, changes: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        export_model(small(**changes), tmp_path / "out", family)
    assert not list(tmp_path.iterdir())


def test_whorl_family_supports_any_mixer_and_dtype(tmp_path: Path) -> None:
    alibi = HEADS.model_copy(update={"alibi": True, "rope": None})
    mixers = {"a": alibi, "b": CustomMixer(kind="linear", options={"n_heads": 4})}
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
    path = tmp_path / "own" / "config.json"
    edit(path, transformer=json.loads(path.read_text())["transformer"] | {"n_layers": 0})
    with pytest.raises(ConfigError, match=r"config.json: TransformerConfig.n_layers is 0: .* equal to 1"):
        import_model(tmp_path / "own")


def test_import_skips_multi_token_layers_with_warning(tmp_path: Path) -> None:
    save_hf_model("deepseek", tmp_path)
    path, want = tmp_path / "model.safetensors", logits(import_model(tmp_path))
    save_file({**load_file(path), "model.layers.2.eh_proj.weight": torch.ones(2, 2)}, path)
    with pytest.warns(UserWarning, match="1 tensors after the last layer"):
        assert torch.equal(logits(import_model(tmp_path)), want)


def test_export_keeps_balance_bias_in_fp32(tmp_path: Path) -> None:
    model = save_hf_model("deepseek", tmp_path / "hf")
    export_model(import_model(tmp_path / "hf"), tmp_path / "low", "deepseek_v3", dtype=torch.bfloat16)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    exported = load_file(tmp_path / "low" / "model.safetensors")[name]
    assert torch.equal(exported, model.get_buffer(name))
    back = type(model).from_pretrained(tmp_path / "low", dtype=torch.bfloat16)
    assert back.get_buffer(name).dtype == torch.float32  # transformers keeps it in fp32 too


def test_families_are_all_tested() -> None:
    types = {hf_model(case).config.model_type for case in CASES}
    assert types == set(FAMILIES) - {"whorl", "whorl_decoder"}  # test_hf_decoder.py


def test_find_family_gives_a_reason_per_family() -> None:
    mamba = {"m": {"kind": "mamba"}}
    shape = {"vocab_size": 20, "d_model": 32, "n_layers": 1, "mlp_hidden": 32, "mixers": mamba}
    with pytest.raises(ConfigError, match="no family can express") as error:
        find_family(TransformerConfig.model_validate(shape))
    assert "\n    llama: " in str(error.value) and "\n    gpt2: " in str(error.value)


def test_shards_split_by_size_and_load(tmp_path: Path) -> None:
    assert plan_shards({"a": 4, "b": 4, "c": 9, "d": 1}, 8) == [["a", "b"], ["c"], ["d"]]
    one, many = tmp_path / "one", tmp_path / "many"
    save_hf_model("llama", one).save_pretrained(many, max_shard_size="10KB")
    assert len(list(many.glob("*.safetensors"))) > 3
    torch.testing.assert_close(logits(import_model(many)), logits(import_model(one)))
    assert Shards(many).names() == Shards(one).names()


def test_import_names_damaged_tensor(tmp_path: Path) -> None:
    save_hf_model("qwen2", tmp_path)
    path, name = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    weights = load_file(path)
    for change, message in (
        ({name: None}, rf"tensor '{name}' is missing"),
        ({"model.extra": torch.ones(2)}, r"model.safetensors: tensor 'model.extra' is unknown"),
        ({name: torch.ones(48, 31)}, rf"tensor '{name}' has the shape \[48, 31\]"),
        ({name: weights[name].t().contiguous()}, rf"tensor '{name}' has the shape \[32, 48\]"),
        ({name: torch.ones(48, 32, dtype=torch.int8)}, rf"tensor '{name}' is of type I8"),
    ):
        save_file({k: t for k, t in {**weights, **change}.items() if t is not None}, path)
        with pytest.raises(CheckpointError, match=message):
            import_model(tmp_path)


def test_import_names_truncated_and_missing_files(tmp_path: Path) -> None:
    save_hf_model("qwen2", tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()

    def rejects(message: str) -> None:
        with pytest.raises(CheckpointError, match=message):
            import_model(tmp_path)

    for cut in (len(whole) - 1, len(whole) // 2, 20, 0):
        path.write_bytes(whole[:cut])
        rejects(r"model.safetensors.* cannot be read")
    path.unlink()
    rejects("holds neither")
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    rejects("a pickle can run any code")
    (tmp_path / "config.json").write_text("{")
    rejects("config.json cannot be read")


def test_import_names_damaged_shard_index(tmp_path: Path) -> None:
    save_hf_model("qwen2", tmp_path, max_shard_size="10KB")
    index = tmp_path / "model.safetensors.index.json"
    listed = json.loads(index.read_text())["weight_map"]
    first = min(listed.values())
    for changed, message in (
        ({"model.norm.weight": "../x.safetensors"}, r"names '../x.safetensors'"),
        ({"model.new": first}, rf"{first}: tensor 'model.new' is listed in the index but not in the file"),
    ):
        edit(index, weight_map=listed | changed)
        with pytest.raises(CheckpointError, match=message):
            import_model(tmp_path)
    edit(index, weight_map=listed)
    (tmp_path / first).unlink()
    with pytest.raises(CheckpointError, match=rf"{first} cannot be read"):
        import_model(tmp_path)


def test_export_copies_tokenizer_and_special_ids(tmp_path: Path) -> None:
    source, out = tmp_path / "hf", tmp_path / "whorl"
    save_hf_model("llama", source)
    (source / "tokenizer.json").write_bytes(b'{"a": 1}')
    export_model(import_model(source), out, "llama", source=source)
    assert (out / "tokenizer.json").read_bytes() == b'{"a": 1}'
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == 2
    assert (out / "generation_config.json").exists()


def test_import_names_file_of_impossible_network(tmp_path: Path) -> None:
    save_hf_model("deepseek", tmp_path / "m")
    edit(tmp_path / "m" / "config.json", n_group=3)
    with pytest.raises(ConfigError, match=r"m/config.json: .*groups"):
        import_model(tmp_path / "m")


def test_hostile_folder_is_refused_before_its_cost(tmp_path: Path) -> None:
    """Many layers for few tensors, deep JSON, and links to a device without end: an error, in every reader."""
    save_hf_model("llama", tmp_path / "a")
    layers = tmp_path / "a" / "config.json"
    edit(layers, num_hidden_layers=9_000)
    with pytest.raises(CheckpointError, match="9,000 layers, and its files 21 tensors"):
        import_model(tmp_path / "a")
    layers.write_text('{"model_type": ' + "[" * 100_000)
    for read in (import_model, load_model, load_vision, load_encoder):
        with pytest.raises(CheckpointError, match="nested too deeply"):
            read(tmp_path / "a")
    with pytest.raises(DataError, match="nested too deeply"):
        layers.rename(tmp_path / "a" / "tokenizer_config.json")
        load_chat_template(tmp_path / "a", None)  # type: ignore[arg-type]
    weights = tmp_path / "b" / "model-1.safetensors"
    save_hf_model("llama", tmp_path / "b")
    (tmp_path / "b" / "model.safetensors").unlink()
    weights.symlink_to("/dev/zero")
    index = {"weight_map": {"a": weights.name}}
    (tmp_path / "b" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="no regular file"):
        import_model(tmp_path / "b")
    with pytest.raises(ConfigError, match="no regular file"):
        complete_import(ImportConfig(folder=str(tmp_path / "b")), None)  # type: ignore[arg-type]
    (tmp_path / "b" / "config.json").unlink()
    (tmp_path / "b" / "config.json").symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match="no regular file"):
        load_model(tmp_path / "b")
    shape = {"vocab_size": 10**12, "d_model": 8, "n_layers": 1, "n_heads": 1, "mlp_hidden": 8}
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "config.json").write_text(json.dumps({"kind": "embedder", "encoder": shape}))
    save_file({"a": torch.ones(1)}, tmp_path / "c" / "model.safetensors")
    with pytest.raises(CheckpointError, match="tensor 'a' is"):
        load_encoder(tmp_path / "c")
