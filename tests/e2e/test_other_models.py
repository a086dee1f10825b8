"""A mixture of experts from a recipe to transformers and GGUF: trained, reported, exported, imported."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.support.cli import succeed

from whorl.store import Store

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("e2e")]


def test_mixture_of_experts_trains_and_exports(mixture: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    from whorl.models import load_model

    def sample(name: str) -> str:
        return succeed(tmp_path, "sample", name, "def ", "-n", 12, "--temperature", 0).stdout

    shutil.copytree(mixture / ".whorl", tmp_path / ".whorl")
    store = Store(tmp_path / ".whorl")
    evaluation = store.open("small/evaluate").summary
    assert evaluation["bits_per_byte"] < 4.5  # a uniform model has 8, a unigram model about 4.7
    page = store.open("small/report").file("report.html").read_text()
    assert "Gini coefficient" in page and "active parameters" in page
    succeed(tmp_path, "export", "small/pretrain", "exported", "--to", "mixtral")
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported").eval()
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    ids = words("def f(self):\n    return", return_tensors="pt", add_special_tokens=False).input_ids
    model = load_model(store.open("small/pretrain").path)
    torch.testing.assert_close(model.logits(model(ids)), reference(ids).logits, atol=1e-4, rtol=1e-4)
    assert reference.generation_config.eos_token_id == words.eos_token_id == reference.config.eos_token_id
    done = succeed(tmp_path, "export", "small/pretrain", "small.gguf", "--to", "gguf")
    assert "2 tokens in 100" in done.stderr
    assert (tmp_path / "small.gguf").read_bytes()[:4] == b"GGUF"
    succeed(tmp_path, "import", "exported", "--name", "back")
    first = sample("small/pretrain")
    assert first.startswith("def") and sample("imported/back") == first
