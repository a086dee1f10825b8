"""Another network than the house's own, from a recipe to the libraries of others: trained, reported, exported, read back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RECIPE = """\
name = "small"

[steps.ingest]
sources = ["CODE"]
include = ["*.py", "**/*.py"]

[steps.curate]
parents = ["ingest"]
validation_bytes = 40000
test_bytes = 40000

[steps.plan]
parents = ["ingest", "curate"]
steps = 60
vocab_size = 400
seq_len = 128
replicas = 2
compile = false

[steps.plan.model]
d_model = 64
n_layers = 2
mlp_hidden = 64
experts = { n_experts = 4, top_k = 2, hidden = 64 }
mixers.attention = { n_heads = 2, n_kv_heads = 1, head_dim = 32 }

[steps.tokenizer]
parents = ["ingest", "curate", "plan"]

[steps.tokens]
parents = ["ingest", "curate", "tokenizer"]

[steps.pretrain]
parents = ["plan", "tokens", "tokenizer"]

[steps.evaluate]
parents = ["ingest", "curate", "tokenizer", "tokens", "pretrain"]
baselines = false
completions = 4
completion_tokens = 20
samples = 1
sample_tokens = 10

[steps.report]
parents = ["ingest", "curate", "plan", "tokenizer", "tokens", "pretrain", "evaluate"]
"""


def whorl(*words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "whorl.cli", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=300)


@pytest.mark.e2e
@pytest.mark.xdist_group("e2e")
def test_a_mixture_of_experts_is_trained_drawn_exported_and_read_by_others(
    code: Path, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    from whorl.models import load_model
    from whorl.store import Store

    (tmp_path / "small.toml").write_text(RECIPE.replace("CODE", str(code)))
    done = whorl("run", "small.toml", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 experts of which 2" in done.stdout
    store = Store(tmp_path / ".whorl")
    evaluation = store.open("small/evaluate").summary
    assert evaluation["bits_per_byte"] < 4.5  # a byte drawn evenly costs 8, by its frequency about 4.7
    page = store.open("small/report").file("report.html").read_text()
    assert "Gini coefficient" in page and "met by a token" in page
    done = whorl("sample", "small/pretrain", "def ", "-n", "12", "--temperature", "0", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("def"), done.stderr
    done = whorl("export", "small/pretrain", "theirs", "--to", "mixtral", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").eval()
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    ids = words("def f(self):\n    return", return_tensors="pt", add_special_tokens=False).input_ids
    ours = load_model(store.open("small/pretrain").path)
    torch.testing.assert_close(ours.logits(ours(ids)), theirs(ids).logits, atol=1e-4, rtol=1e-4)
    assert theirs.generation_config.eos_token_id == words.eos_token_id == theirs.config.eos_token_id
    done = whorl("export", "small/pretrain", "small.gguf", "--to", "gguf", cwd=tmp_path)
    assert done.returncode == 0 and "2 tokens in 100" in done.stderr, done.stderr
    assert (tmp_path / "small.gguf").read_bytes()[:4] == b"GGUF"
    done = whorl("import", "theirs", "--name", "back", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    again = whorl("sample", "imported/back", "def ", "-n", "12", "--temperature", "0", cwd=tmp_path)
    first = whorl("sample", "small/pretrain", "def ", "-n", "12", "--temperature", "0", cwd=tmp_path)
    assert again.stdout == first.stdout


@pytest.mark.e2e
@pytest.mark.xdist_group("e2e")
def test_an_impossible_network_is_refused_before_anything_runs(tmp_path: Path) -> None:
    text = RECIPE.replace("CODE", str(tmp_path))
    for wrong, words in (
        ("n_heads = 2, n_kv_heads = 1", "n_heads = 3, n_kv_heads = 2"),
        ("head_dim = 32", "head_dim = 33"),
        ("top_k = 2", "top_k = 5"),
        ("n_layers = 2", "n_layer = 2"),
    ):
        (tmp_path / "small.toml").write_text(text.replace(wrong, words))
        failed = whorl("run", "small.toml", cwd=tmp_path)
        assert failed.returncode == 2 and "Traceback" not in failed.stderr
        named = words.split(" = ")[0]
        assert named in failed.stderr and "plan" in failed.stderr, failed.stderr
