"""The step `embedder`: content of the artifact, skipped documents, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.support.notes import write_notes
from tests.support.recipes.align_steps import run_text

from whorl.embedding.embedder import Embedder
from whorl.errors import ConfigError, DataError
from whorl.tokens.tokenizer import Tokenizer

RECIPE = """
name = "finder"
[steps]
ingest = { sources = ["notes"] }
tokenizer = { parents = ["ingest", "curate"], vocab_size = 400 }
tokens = { parents = ["ingest", "curate", "tokenizer"] }
[steps.curate]
parents = ["ingest"]
query = "SELECT row, '' AS reason FROM attributes"
validation_bytes = 4000
test_bytes = 2000
max_held_out_fraction = 0.3
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
run.checkpoint_seconds = 0.01
"""


@pytest.fixture(scope="module", autouse=True)
def _in_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Work in a folder with 60 notes of random words, and five notes too short for two spans."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(write_notes(tmp_path_factory.mktemp("finder")))
        for number, word in enumerate(("yes", "no", "so", "I", "we")):
            Path(f"notes/short{number}.txt").write_text(word)
        yield


def test_embedder_artifact_content() -> None:
    made = run_text(RECIPE)["embedder"]
    assert made.kind == "embedder" and 0 < made.summary["skipped"] <= 5
    assert made.summary["held_out"] > 3 and 0 <= made.summary["final"]["recall_at_1"] <= 1
    assert "recall@10" in made.summary["headline"] and "too short" in made.summary["headline"]
    page = made.file("curve.html").read_text()
    assert "recall@1" in page and "Finding the other span" in page
    embedder = Embedder.load(made.path, Tokenizer.load(made.path))
    vectors = embedder.embed([Path(f"notes/{i}.txt").read_text() for i in range(3)])
    assert vectors.shape == (3, 16) and embedder.max_seq_length == 24
    file = next(Path("store").glob("runs/*/metrics/embedder.jsonl"))
    metrics = [json.loads(line) for line in file.open()]
    assert [m["step"] for m in metrics] == list(range(1, 31))
    assert [m["step"] for m in metrics if "recall_at_1" in m] == [10, 20, 30]


def test_embedder_of_words_is_trained_and_asked_on_words() -> None:
    made = run_text(RECIPE, "embedder.words=true")["embedder"]
    embed = Embedder.load(made.path, Tokenizer.load(made.path)).embed
    one, two = embed(["parseDate(text)", "Parse date, text?"])
    np.testing.assert_allclose(one, two, atol=1e-6)
    plain = run_text(RECIPE)["embedder"]
    weights = [found.file("model.safetensors").read_bytes() for found in (made, plain)]
    assert weights[0] != weights[1], "the notes have line ends, which are no words"


@pytest.mark.parametrize(
    ("setting", "kind", "message"),
    [
        ("min_span=30", ConfigError, r"min_span \(30\) cannot be more than max_length \(24\)"),
        ("n_heads=3", ConfigError, "multiple of n_heads"),
        ("optimizer=sgd", ConfigError, "optimizer cannot be 'sgd'"),
        ("batch_size=500", DataError, "at least the 500 of a batch"),
    ],
)
def test_embedder_refuses_invalid_settings(setting: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"(?s){message}"):
        run_text(RECIPE, f"embedder.{setting}")
