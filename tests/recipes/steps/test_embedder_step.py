"""The step `embedder`: content of the artifact, skipped documents, SIGKILL during training, errors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests.support.cli import kill_when, run_whorl

from whorl.embedding.embedder import Embedder
from whorl.errors import ConfigError, DataError
from whorl.recipes import parse_recipe, run_recipe
from whorl.store import Store
from whorl.tokens.tokenizer import Tokenizer
from whorl.tracking.progress import Progress

RECIPE = """
name = "finder"
about = "a small embedder"
[steps.ingest]
sources = ["notes"]
[steps.curate]
parents = ["ingest"]
query = "SELECT row, '' AS reason FROM attributes"
validation_bytes = 4000
test_bytes = 2000
max_held_out_fraction = 0.3
[steps.tokenizer]
parents = ["ingest", "curate"]
vocab_size = 400
[steps.tokens]
parents = ["ingest", "curate", "tokenizer"]
[steps.embedder]
parents = ["tokens", "tokenizer"]
d_model = 16
n_heads = 2
mlp_hidden = 16
max_length = 24
min_span = 4
batch_size = 16
steps = 30
evaluations = 3
threads = 1
checkpoint_seconds = 0.01
"""


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 60 notes of random words, and five notes too short for two spans."""
    folder = tmp_path_factory.mktemp("finder")
    (folder / "notes").mkdir()
    rng = np.random.default_rng(0)
    for number in range(60):
        words = ["".join(rng.choice(list("abcdefgh"), 4)) for _ in range(12)]
        text = f"Note {number}.\n" + " ".join(rng.choice(words, 80))
        (folder / "notes" / f"{number}.txt").write_text(text)
    for number, word in enumerate(("yes", "no", "so", "I", "we")):
        (folder / "notes" / f"short{number}.txt").write_text(word)
    (folder / "finder.toml").write_text(RECIPE)
    return folder


def run(recipe: str, store: Path) -> Store:
    run_recipe(parse_recipe(recipe, "finder.toml"), Store(store), Progress.silent())
    return Store(store)


def test_embedder_artifact_content(notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(notes)
    made = run(RECIPE, notes / "whole").open("finder/embedder")
    assert made.kind == "embedder" and 0 < made.summary["skipped"] <= 5
    assert made.summary["held_out"] > 3 and 0 <= made.summary["final"]["recall_at_1"] <= 1
    assert "recall@10" in made.summary["headline"] and "too short" in made.summary["headline"]
    page = made.file("curve.html").read_text()
    assert "recall@1" in page and "Finding the other span" in page
    embedder = Embedder.load(made.path, Tokenizer.load(made.path))
    vectors = embedder.embed([(notes / "notes" / f"{i}.txt").read_text() for i in range(3)])
    assert vectors.shape == (3, 16) and embedder.max_seq_length == 24
    metrics = [
        json.loads(line) for line in next((notes / "whole").glob("runs/*/metrics/embedder.jsonl")).open()
    ]
    assert [m["step"] for m in metrics] == list(range(1, 31))
    assert [m["step"] for m in metrics if "recall_at_1" in m] == [10, 20, 30]


def test_killed_run_ends_with_same_weights(notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(notes)
    whole = run(RECIPE, notes / "whole").open("finder/embedder")
    command = ("run", "finder.toml", "--store", "killed")
    assert kill_when(notes / "killed" / "scratch", "*/step-*", *command, cwd=notes)
    done = run_whorl(*command, cwd=notes)
    assert done.returncode == 0, done.stderr
    assert "continues at step" in done.stdout and "documents skipped" in done.stdout
    again = Store(notes / "killed").open("finder/embedder")
    assert again.file("model.safetensors").read_bytes() == whole.file("model.safetensors").read_bytes()
    assert again.summary["final"] == whole.summary["final"]


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ("min_span = 30", ConfigError, r"min_span \(30\) cannot be more than max_length \(24\)"),
        ("n_heads = 3", ConfigError, "multiple of n_heads"),
        ('optimizer = "sgd"', ConfigError, "optimizer cannot be 'sgd'"),
        ("batch_size = 500", DataError, "at least the 500 of a batch"),
    ],
)
def test_embedder_refuses_invalid_settings(
    change: str, kind: type[Exception], message: str, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(notes)
    field = change.split(" = ")[0]
    lines = [line for line in RECIPE.splitlines() if not line.startswith(field + " =")]
    with pytest.raises(kind, match=f"(?s){message}"):
        run("\n".join([*lines, change]), notes / "whole")
