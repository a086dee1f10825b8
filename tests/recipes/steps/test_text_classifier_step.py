"""The step `text_classifier`: what it learns, the verb `classify`, padding, bad records, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from tests.support.cli import succeed
from tests.support.recipes.align_steps import run_text

from whorl.embedding.classifier import TextClassifier
from whorl.errors import ConfigError, DataError
from whorl.tokens.tokenizer import Tokenizer

RECIPE = """
name = "moods"
[steps.text_classifier]
path = "texts.jsonl"
vocab_size = 320
d_model = 16
n_layers = 1
n_heads = 2
mlp_hidden = 16
max_length = 48
steps = 120
batch_size = 24
lr = 1e-2
threads = 1
[steps.report]
parents = ["text_classifier"]
"""
MOODS = {"cold": ("frost", "snow", "ice"), "hot": ("sun", "fire", "desert"), "wet": ("rain", "river", "sea")}
OTHERS = ("the", "old", "road", "is", "near", "a", "house", "with", "stones")


def write_texts(path: Path) -> None:
    """Write 60 texts of 4 to 9 words per class, one word of which gives the class, and two bad records."""
    rng = Random(0)
    lines: list[dict[str, object]] = [{"text": "no class"}, {"text": " ", "label": "cold"}]
    for _ in range(60):
        for label, words in MOODS.items():
            found = [rng.choice(OTHERS) for _ in range(rng.randint(3, 8))]
            found.insert(rng.randint(0, len(found)), rng.choice(words))
            lines.append({"text": " ".join(found), "label": label})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(scope="module", autouse=True)
def _in_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("texts"))
        write_texts(Path("texts.jsonl"))
        yield


def load(folder: Path) -> TextClassifier:
    return TextClassifier.load(folder, Tokenizer.load(folder))


def test_text_classifier_learns() -> None:
    """Chance is 1 of 3."""
    made = run_text(RECIPE)["text_classifier"]
    before, after = (float(*made.summary["eval"][when].values()) for when in ("before", "after"))
    assert before < 0.6 and after >= 0.9
    assert made.summary["quarantine"] == {"accepted": 180, "unknown_shape": 1, "empty": 1}
    model = load(made.path)
    assert model.classes == ("cold", "hot", "wet")
    found = model.classify(["the old road is near snow", "a house with rain"]).argmax(dim=1)
    assert found.tolist() == [0, 2]


def test_report_and_verb_show_the_classes() -> None:
    made = run_text(RECIPE)
    page = made["report"].file("report.html").read_text()
    for text in ("Held-out texts", "text_classifier: classes", "Objective classification", "Text models"):
        assert text in page, text
    Path("one.txt").write_text("the fire is near a house")
    Path("empty.txt").write_text("")
    address = made["text_classifier"].address
    shown = succeed(
        Path.cwd(), "classify", address, "one.txt", "empty.txt", "-k", 1, "--store", "store"
    ).stdout
    assert shown.startswith("one.txt\n") and shown.rstrip().endswith("  hot"), shown


def test_logits_do_not_depend_on_neighbours() -> None:
    model = load(run_text(RECIPE)["text_classifier"].path)
    short, long = "ice is near", " ".join(OTHERS * 3)
    with torch.no_grad():
        alone = model.encoder(*model.encode([short]))
        beside = model.encoder(*model.encode([long, short]))[1:]
    assert model.encode([long, short])[0].shape[1] > model.encode([short])[0].shape[1]
    np.testing.assert_allclose(alone, beside, rtol=0, atol=1e-5)


def test_long_texts_are_cut_and_counted() -> None:
    made = run_text(RECIPE, "text_classifier.max_length=4", "text_classifier.lr=1e-3")["text_classifier"]
    assert made.summary["cut"] > 100 and "texts cut to 4 ids" in made.summary["headline"]


@pytest.mark.parametrize(
    ("setting", "kind", "message"),
    [
        ("path=none.jsonl", DataError, "none.jsonl does not exist"),
        ("label_field=mood", DataError, "mood"),
        ("n_heads=3", ConfigError, "multiple of n_heads"),
    ],
)
def test_step_refuses_invalid_settings(setting: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"(?s){message}"):
        run_text(RECIPE, f"text_classifier.{setting}")


def test_one_class_is_an_error() -> None:
    Path("one.jsonl").write_text('{"text": "a", "label": 1}\n{"text": "b", "label": 1}\n')
    with pytest.raises(DataError, match="texts of one class only: 1"):
        run_text(RECIPE, "text_classifier.path=one.jsonl")
