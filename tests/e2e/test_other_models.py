"""A mixture of experts from a recipe to transformers and GGUF: trained, reported, exported, imported."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.cli import run_whorl
from tests.support.e2e_recipe import MOE_RECIPE


@pytest.mark.e2e
@pytest.mark.xdist_group("e2e")
def test_mixture_of_experts_trains_and_exports(code: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    from whorl.models import load_model
    from whorl.store import Store

    (tmp_path / "small.toml").write_text(MOE_RECIPE.replace("CODE", str(code)))
    done = run_whorl("run", "small.toml", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 experts, top 2" in done.stdout
    store = Store(tmp_path / ".whorl")
    evaluation = store.open("small/evaluate").summary
    assert evaluation["bits_per_byte"] < 4.5  # a uniform model has 8, a unigram model about 4.7
    page = store.open("small/report").file("report.html").read_text()
    assert "Gini coefficient" in page and "active parameters" in page
    done = run_whorl("sample", "small/pretrain", "def ", "-n", "12", "--temperature", "0", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("def"), done.stderr
    done = run_whorl("export", "small/pretrain", "exported", "--to", "mixtral", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported").eval()
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    ids = words("def f(self):\n    return", return_tensors="pt", add_special_tokens=False).input_ids
    model = load_model(store.open("small/pretrain").path)
    torch.testing.assert_close(model.logits(model(ids)), reference(ids).logits, atol=1e-4, rtol=1e-4)
    assert reference.generation_config.eos_token_id == words.eos_token_id == reference.config.eos_token_id
    done = run_whorl("export", "small/pretrain", "small.gguf", "--to", "gguf", cwd=tmp_path)
    assert done.returncode == 0 and "2 tokens in 100" in done.stderr, done.stderr
    assert (tmp_path / "small.gguf").read_bytes()[:4] == b"GGUF"
    done = run_whorl("import", "exported", "--name", "back", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    second = run_whorl("sample", "imported/back", "def ", "-n", "12", "--temperature", "0", cwd=tmp_path)
    first = run_whorl("sample", "small/pretrain", "def ", "-n", "12", "--temperature", "0", cwd=tmp_path)
    assert second.stdout == first.stdout


@pytest.mark.e2e
@pytest.mark.xdist_group("e2e")
def test_impossible_model_is_refused_before_work(tmp_path: Path) -> None:
    text = MOE_RECIPE.replace("CODE", str(tmp_path))
    for old, new in (
        ("n_heads = 2, n_kv_heads = 1", "n_heads = 3, n_kv_heads = 2"),
        ("head_dim = 32", "head_dim = 33"),
        ("top_k = 2", "top_k = 5"),
        ("n_layers = 2", "n_layer = 2"),
    ):
        (tmp_path / "small.toml").write_text(text.replace(old, new))
        failed = run_whorl("run", "small.toml", cwd=tmp_path)
        assert failed.returncode == 2 and "Traceback" not in failed.stderr
        field = new.split(" = ")[0]
        assert field in failed.stderr and "plan" in failed.stderr, failed.stderr
