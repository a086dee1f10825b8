"""Perplexity of texts under hashed words: the formula, separation of kinds of text, bounds of memory, bad input."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from whorl.corpus.decontamination.words import hash_words
from whorl.corpus.measures.measure import measure_texts
from whorl.corpus.measures.trained.hashed_ngrams import load_model
from whorl.corpus.measures.trained.kneser_ney import NGram
from whorl.corpus.measures.trained.perplexity import END, N_WORDS, train_perplexity
from whorl.errors import ConfigError, DataError


def write(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def sentences(rng: np.random.Generator, n: int, nouns: str) -> list[str]:
    words = nouns.split()
    return [
        " ".join(f"the {rng.choice(words)} sees a {rng.choice(words)}." for _ in range(8)) for _ in range(n)
    ]


def perplexity(model: Path, *texts: str) -> list[float]:
    return [row["perplexity"] for row in measure_texts("perplexity", texts, str(model))]


def test_perplexity_is_that_of_the_saved_model(tmp_path: Path) -> None:
    model = tmp_path / "model"
    found = train_perplexity([write(tmp_path / "a.jsonl", ["A cat sat.", "a cat ran", "The dog."])], model)
    assert found["texts"] == 3 and found["words"] == 8 and found["texts_left_out"] == 0
    ngram = NGram.from_arrays(load_model(model, "perplexity")[0])
    ids = [int(h) % N_WORDS for h in hash_words(["the cat"]).hashes]
    want = 2 ** -np.mean(ngram.log2_prob(np.array([*ids, END])))
    assert perplexity(model, "THE cat!")[0] == pytest.approx(want, rel=1e-9)
    assert np.isfinite(perplexity(model, "", "unseen words only")).all()


def test_texts_like_the_training_texts_have_low_perplexity(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    like = sentences(rng, 80, "cat dog bird fish horse cow")
    other = [
        " ".join(rng.permutation(text.split())) for text in sentences(rng, 30, "cat dog bird fish horse cow")
    ]
    model = tmp_path / "model"
    train_perplexity([write(tmp_path / "a.jsonl", like[:50])], model)
    low, high = perplexity(model, *like[50:]), perplexity(model, *other)
    assert max(low) < min(high) and np.median(high) > 2 * np.median(low)


def test_training_reads_at_most_max_words_and_counts_the_rest(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [f"text number {i} of many" for i in range(100)])
    found = train_perplexity([file], tmp_path / "model", max_words=50, min_count=1)
    assert (found["texts"], found["words"], found["texts_left_out"]) == (10, 50, 90)


def test_bad_settings_and_models_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", ["a text"])
    with pytest.raises(ConfigError, match="order is 9"):
        train_perplexity([file], tmp_path / "model", order=9)
    with pytest.raises(ConfigError, match="cannot be written"):
        train_perplexity([file], tmp_path)
    with pytest.raises(DataError, match="no training samples"):
        train_perplexity([write(tmp_path / "empty.jsonl", [" "])], tmp_path / "model")
    (tmp_path / "bad").write_bytes(b"not a model")
    with pytest.raises(DataError, match="cannot be read"):
        perplexity(tmp_path / "bad", "a text")
