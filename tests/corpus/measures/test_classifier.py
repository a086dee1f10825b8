"""Classifiers on hashed n-grams: features against a slow reference, the optimum against scikit-learn, files, addresses."""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from whorl.corpus import CurateConfig
from whorl.corpus.decontamination.words import hash_words, split_words
from whorl.corpus.measures.measure import MeasureConfig, measure_texts
from whorl.corpus.measures.trained.classifier import fit_logistic, roc_auc, train_classifier
from whorl.corpus.measures.trained.hashed_ngrams import hash_ngrams, load_model
from whorl.errors import ConfigError, DataError
from whorl.recipes.steps.corpus_inputs import with_file_hashes

COMMON = [f"common{i}" for i in range(200)]
OF_CLASS = ([f"good{i}" for i in range(30)], [f"bad{i}" for i in range(30)])


def sample_texts(seed: int, label: int, n: int) -> list[str]:
    """Texts of 30 common words and six, on average, that are five times as frequent in their class."""
    rng = np.random.default_rng([seed, label])
    texts = []
    for _ in range(n):
        words = rng.choice(COMMON, 30).tolist()
        for _ in range(rng.poisson(6)):
            words.insert(
                int(rng.integers(30)), str(rng.choice(OF_CLASS[label if rng.random() < 5 / 6 else 1 - label]))
            )
        texts.append(" ".join(words))
    return texts


def write_samples(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def train(folder: Path, seed: int = 0, n: int = 400, **options: Any) -> tuple[Path, dict[str, Any]]:
    files = [write_samples(folder / f"{name}.jsonl", sample_texts(seed, k, n)) for k, name in enumerate("pn")]
    model = folder / "model.safetensors"
    return model, train_classifier([files[0]], [files[1]], model, seed=seed, **options)


def bucket_of(words: list[str], n_buckets: int) -> Counter[int]:
    """The slow reference: each word and each pair is hashed alone."""
    hashes = [int(hash_words([word]).hashes[0]) for word in words]
    pairs = [int(hash_pair(a, b)) for a, b in pairwise(hashes)]
    return Counter(h % n_buckets for h in (*hashes, *pairs))


def hash_pair(first: int, second: int) -> int:
    """Polynomial of two hashes modulo 2^64, and the finalizer of splitmix64, in integers."""
    from whorl.corpus.deduplication.shingles import P

    mask = (1 << 64) - 1
    x = (first + second * int(P)) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


@given(
    st.lists(st.text(st.sampled_from("aAbB \n.,é語'ß1"), max_size=30), max_size=6),
    st.sampled_from([7, 64, 1 << 18]),
)
def test_buckets_equal_slow_reference(texts: list[str], n_buckets: int) -> None:
    found = hash_ngrams(texts, n_buckets)
    rows = [Counter[int]() for _ in texts]
    for text, bucket, count in zip(
        found.text.tolist(), found.bucket.tolist(), found.count.tolist(), strict=True
    ):
        rows[text][bucket] = count
    assert rows == [bucket_of(split_words(text), n_buckets) for text in texts]
    assert found.distinct.tolist() == [len(row) for row in rows]
    assert found.total.tolist() == [sum(row.values()) for row in rows]


def test_learns_a_synthetic_separation(tmp_path: Path) -> None:
    model, summary = train(tmp_path)
    held_out = summary["held_out"]
    assert (summary["positive"], summary["negative"], held_out["texts"]) == (400, 400, 160)
    assert held_out["accuracy"] > 0.8
    texts, labels = (
        [t for k in (0, 1) for t in sample_texts(100, k, 300)],
        np.repeat([True, False], 300),
    )
    scores = np.array([row["probability"] for row in measure_texts("classifier", texts, str(model))])
    optimal = np.array(
        [t.count("good") - t.count("bad") for t in texts], float
    )  # the log of the likelihood ratio
    assert min(roc_auc(scores, labels), held_out["auc"]) > 0.95
    assert roc_auc(scores, labels) > roc_auc(optimal, labels) - 0.025


def test_optimum_equals_scikit_learn() -> None:
    texts, labels = [t for k in (0, 1) for t in sample_texts(3, k, 60)], np.repeat([True, False], 60)
    n_buckets, l2 = 512, 1e-3
    buckets = hash_ngrams(texts, n_buckets)
    x = np.zeros((len(texts), n_buckets))
    x[buckets.text, buckets.bucket] = 1
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    weights, bias = fit_logistic(buckets, labels, l2=l2, n_buckets=n_buckets)
    peer = LogisticRegression(C=1 / (l2 * len(texts)), tol=1e-10, max_iter=10000).fit(x, labels)
    assert np.allclose(weights, peer.coef_[0], atol=1e-3) and math.isclose(
        bias, peer.intercept_[0], abs_tol=1e-3
    )


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=2, max_size=30))
def test_auc_equals_scikit_learn(pairs: list[tuple[int, bool]]) -> None:
    scores, labels = np.array([float(s) for s, _ in pairs]), np.array([label for _, label in pairs])
    if labels.any() and not labels.all():
        assert math.isclose(roc_auc(scores, labels), roc_auc_score(labels, scores))


def test_probability_equals_plain_formula_and_is_calibrated(tmp_path: Path) -> None:
    model, _ = train(tmp_path, 1, 1000)
    arrays, _ = load_model(model, "classifier")
    weights, bias = arrays["weights"], arrays["bias"][0]
    texts = [t for k in (0, 1) for t in sample_texts(50, k, 500)]
    found = np.array([row["probability"] for row in measure_texts("classifier", ["", *texts], str(model))])
    assert math.isclose(found[0], 1 / (1 + math.exp(-bias)))
    for text, p in zip(texts[:40], found[1:41], strict=True):
        row = bucket_of(split_words(text), len(weights))
        logit = sum(float(weights[b]) for b in row) / math.sqrt(len(row)) + bias
        assert math.isclose(p, 1 / (1 + math.exp(-logit)), rel_tol=1e-6)
    is_positive, probability = np.repeat([True, False], 500), found[1:]
    for low in (0, 0.25, 0.5, 0.75):
        inside = (probability >= low) & (probability <= low + 0.25)
        assert inside.sum() > 20 and abs(probability[inside].mean() - is_positive[inside].mean()) < 0.15


def test_equal_samples_give_equal_bytes(tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()
    first, second = train(tmp_path, n=40), train(tmp_path / "again", n=40)
    assert first[0].read_bytes() == second[0].read_bytes() and first[1] == second[1]


def test_texts_of_both_classes_are_left_out(tmp_path: Path) -> None:
    both = ["in both classes", "and this"]
    files = [write_samples(tmp_path / f"{k}.jsonl", [*both, *sample_texts(0, k, 10), *both]) for k in (0, 1)]
    found = train_classifier([files[0]], [files[1]], tmp_path / "model")
    assert (found["positive"], found["negative"], found["in_both"]) == (12, 12, 2)
    assert found["held_out"]["texts"] == 4


def test_bad_samples_are_named(tmp_path: Path) -> None:
    good, empty = (
        write_samples(tmp_path / "good.jsonl", ["a b", "c d"]),
        write_samples(tmp_path / "empty.jsonl", []),
    )
    copy = write_samples(tmp_path / "copy.jsonl", ["a b", "c d"])
    one = write_samples(tmp_path / "one.jsonl", ["e", "e", " "])
    out = tmp_path / "model"
    with pytest.raises(ConfigError, match=r"good.jsonl and the negative samples .*copy.jsonl are equal"):
        train_classifier([good], [copy], out)
    with pytest.raises(DataError, match=r"no negative samples in .*empty.jsonl"):
        train_classifier([good], [empty], out)
    with pytest.raises(DataError, match="negative class has 1 texts"):
        train_classifier([good], [one], out)
    with pytest.raises(
        DataError, match=r"positive samples .*good.jsonl, record 1, has no text in the field 'body'"
    ):
        train_classifier([good], [one], out, field="body")
    with pytest.raises(DataError, match=r"negative samples absent.jsonl cannot be read: No such file"):
        train_classifier([good], ["absent.jsonl"], out)
    for impossible in (tmp_path, tmp_path / "absent" / "model"):
        with pytest.raises(ConfigError, match="cannot be written to"):
            train_classifier([good], [one], impossible)
    with pytest.raises(ConfigError, match="held_out is 1"):
        train_classifier([good], [one], out, held_out=1)
    assert not out.exists()


def test_damaged_and_foreign_models_are_refused(tmp_path: Path) -> None:
    model, _ = train(tmp_path, n=20)
    data = bytearray(model.read_bytes())
    data[-1] ^= 1
    (tmp_path / "flipped").write_bytes(data)
    (tmp_path / "cut").write_bytes(data[:1000])
    for name, message in (
        ("flipped", "differ from their digest"),
        ("cut", "cannot be read"),
        ("absent", "cannot be"),
    ):
        with pytest.raises(DataError, match=message):
            measure_texts("classifier", ["a"], str(tmp_path / name))
    with pytest.raises(DataError, match="is no importance model"):
        load_model(model, "importance")


def test_retrained_model_changes_the_address(tmp_path: Path) -> None:
    model, _ = train(tmp_path, 0, 20)
    quality = MeasureConfig(name="quality", measure="classifier", model=model)
    given = CurateConfig(measures=["rules", quality])
    first = with_file_hashes(given)
    assert with_file_hashes(first) == first != given
    train(tmp_path, 1, 20)
    second = with_file_hashes(first)
    assert first.model_dump(mode="json") != second.model_dump(mode="json")
    assert second.measures[0] == "rules"
    model.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        with_file_hashes(second)
