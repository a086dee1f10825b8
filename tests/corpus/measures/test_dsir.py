"""Importance weights against a plain implementation, and quantile buckets against ranks and SQL."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pytest

from whorl.corpus.decontamination.words import hash_words, ngram_hashes, split_words
from whorl.corpus.measures.measure import measure_texts
from whorl.corpus.measures.trained.importance import N_BUCKETS, gumbel, train_importance
from whorl.errors import ConfigError

DOCS = Path(__file__).parents[3] / "docs" / "corpus.md"
TARGET = ["The proof follows from the lemma.", "By induction, the lemma holds."]
RAW = ["Buy the best shoes here!", "The lemma of shoes", "best price, buy now"]


def buckets_of(text: str) -> list[int]:
    hashes = np.array([hash_words([word]).hashes[0] for word in split_words(text)], np.uint64)
    return [int(h) % N_BUCKETS for h in (*hashes, *ngram_hashes(hashes, 2))]


def write(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def test_log_weight_equals_plain_formula(tmp_path: Path) -> None:
    model = tmp_path / "model"
    found = train_importance([write(tmp_path / "t.jsonl", TARGET)], [write(tmp_path / "r.jsonl", RAW)], model)
    assert (found["target"], found["raw"]) == (2, 3) and found["divergence"] > 0
    counts = [Counter(b for text in texts for b in buckets_of(text)) for texts in (TARGET, RAW)]
    texts = ["the lemma holds, the lemma follows", "buy best shoes", "unseen", ""]
    for text, row in zip(texts, measure_texts("importance", texts, str(model)), strict=True):
        logs = [[math.log((c[b] + 1) / (c.total() + N_BUCKETS)) for b in buckets_of(text)] for c in counts]
        assert math.isclose(row["log_weight"], sum(logs[0]) - sum(logs[1]), abs_tol=1e-9)


def test_equal_target_and_raw_are_refused(tmp_path: Path) -> None:
    files = [write(tmp_path / name, TARGET) for name in ("t.jsonl", "r.jsonl")]
    with pytest.raises(
        ConfigError, match=r"target samples .*t.jsonl and the raw samples .*r.jsonl are equal"
    ):
        train_importance([files[0]], [files[1]], tmp_path / "model")


def test_sql_of_the_docs_takes_the_highest_bucket() -> None:
    rng = np.random.default_rng(1)
    columns = {name: rng.integers(0, 60, 500) / 60 for name in ("edu_probability", "quality_probability")}
    (query,) = re.findall(r"```sql\n(SELECT row, greatest.*?)```", DOCS.read_text(), re.DOTALL)
    attributes = pa.table({"row": range(500), **columns})
    with duckdb.connect() as database:
        database.register("attributes", attributes)
        rows = database.execute(f"SELECT bucket FROM ({query}) ORDER BY row").fetchall()
    lower = [(values[:, None] > values).sum(axis=1) for values in columns.values()]
    assert [bucket for (bucket,) in rows] == np.max([20 * each // 500 for each in lower], axis=0).tolist()


def test_resampling_scores_sample_in_proportion_to_weights(tmp_path: Path) -> None:
    texts = [f"text {i}".encode() for i in range(20_000)]
    noise = gumbel(texts)
    assert abs(noise.mean() - 0.5772) < 0.03 and abs(noise.var() - math.pi**2 / 6) < 0.08
    assert list(gumbel(texts[:3])) == list(noise[:3])
    weights = np.tile([0.0, math.log(3.0)], 10_000)
    firsts = (
        (weights + noise).reshape(-1, 2).argmax(1)
    )  # of two texts, the heavier one is drawn three times in four
    assert abs(firsts.mean() - 0.75) < 0.02
    model = tmp_path / "model"
    train_importance([write(tmp_path / "t.jsonl", TARGET)], [write(tmp_path / "r.jsonl", RAW)], model)
    for text, row in zip(["a", "b"], measure_texts("importance", ["a", "b"], str(model)), strict=True):
        assert row["resampling_score"] == row["log_weight"] + gumbel([text.encode()])[0]
