"""Files of exchange: shards, copied tokenizers, and errors that name damaged files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.models.exchange_cases import logits, save_hf_model

from whorl.errors import CheckpointError, ConfigError
from whorl.models.exchange import Shards, export_model, import_model
from whorl.models.exchange.safetensors_io import plan_shards


def test_shards_split_by_size_and_load(tmp_path: Path) -> None:
    assert plan_shards({"a": 4, "b": 4, "c": 9, "d": 1}, 8) == [["a", "b"], ["c"], ["d"]]
    model = save_hf_model("llama", tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="10KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    torch.testing.assert_close(
        logits(import_model(tmp_path / "many")), logits(import_model(tmp_path / "one"))
    )
    assert Shards(tmp_path / "many").names() == Shards(tmp_path / "one").names()


def test_import_names_damaged_tensor(tmp_path: Path) -> None:
    save_hf_model("qwen2", tmp_path / "good")
    weights = load_file(tmp_path / "good" / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"

    def damaged(change: dict[str, Any], drop: str = "") -> Path:
        folder = tmp_path / "bad"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "good", folder)
        kept = {k: v for k, v in {**weights, **change}.items() if k != drop}
        save_file(kept, folder / "model.safetensors")
        return folder

    for folder, message in (
        (lambda: damaged({}, drop=name), rf"tensor '{name}' is missing"),
        (
            lambda: damaged({"model.extra": torch.ones(2)}),
            r"model.safetensors: tensor 'model.extra' is unknown",
        ),
        (lambda: damaged({name: torch.ones(48, 31)}), rf"tensor '{name}' has the shape \[48, 31\]"),
        (
            lambda: damaged({name: weights[name].t().contiguous()}),
            rf"tensor '{name}' has the shape \[32, 48\]",
        ),
        (lambda: damaged({name: torch.ones(48, 32, dtype=torch.int8)}), rf"tensor '{name}' is of type I8"),
    ):
        with pytest.raises(CheckpointError, match=message):
            import_model(folder())


def test_import_names_truncated_and_missing_files(tmp_path: Path) -> None:
    model = save_hf_model("qwen2", tmp_path / "m")
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


def test_export_copies_tokenizer_and_special_ids(tmp_path: Path) -> None:
    save_hf_model("llama", tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_bytes(b'{"a": 1}')
    export_model(import_model(tmp_path / "hf"), tmp_path / "whorl", "llama", source=tmp_path / "hf")
    assert (tmp_path / "whorl" / "tokenizer.json").read_bytes() == b'{"a": 1}'
    assert json.loads((tmp_path / "whorl" / "config.json").read_text())["eos_token_id"] == 2
    assert (tmp_path / "whorl" / "generation_config.json").exists()


def test_import_names_file_of_impossible_network(tmp_path: Path) -> None:
    save_hf_model("deepseek", tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"n_group": 3}))
    with pytest.raises(ConfigError, match=r"m/config.json: .*groups"):
        import_model(tmp_path / "m")
