"""Importance weights of texts by hashed n-grams: DSIR (Xie et al. 2023, arXiv:2302.03169).

    train_importance(["target.jsonl"], ["raw.jsonl"], Path("dsir.safetensors"))
    CurateConfig(measures=[{"name": "dsir", "measure": "importance", "model": "dsir.safetensors"}])

Two bags of n-grams are estimated over 10,000 buckets, that of the target and that of the raw corpus. The weight of a text is

    log w = sum over its n-grams of log p_target(bucket) - log p_raw(bucket).

Documents with the highest log w + g, with independent g ~ Gumbel(0, 1), are a sample without replacement in proportion to w
(Xie et al. 2023, section 3.3). Here g is a function of the text, so equal texts have equal scores and a run can be repeated.

A bucket's count is increased by one, so that a bucket that one corpus lacks has a finite ratio.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from whorl.corpus.measures.measure import Columns, Measure, Texts
from whorl.corpus.measures.trained.hashed_ngrams import (
    Floats,
    check_training,
    hash_ngrams,
    load_model,
    read_samples,
    save_model,
)

N_BUCKETS = 10_000
KIND = "importance"


def train_importance(
    target: Sequence[str], raw: Sequence[str], out: Path, *, field: str = "text"
) -> dict[str, Any]:
    """Estimate the log ratios of target and raw n-grams, and write the model.

    Args:
        target, raw: JSONL, Parquet, Arrow or tar files; patterns and URLs are allowed.
        out: file of the model.
        field: the text's field in each record.

    Returns:
        `target`, `raw`: numbers of distinct texts; `divergence`: KL of target from raw n-grams, in nats.

    Raises:
        ConfigError: a file is in both, or `out` cannot be written.
        DataError: a file cannot be read, or has no text.
    """
    check_training(target, raw, ("target", "raw"), out)
    texts = [read_samples(files, field, label) for files, label in ((target, "target"), (raw, "raw"))]
    of_target, of_raw = (_log_frequencies(some) for some in texts)
    ratios = of_target - of_raw
    divergence = float(np.exp(of_target) @ ratios)
    summary = {"target": len(texts[0]), "raw": len(texts[1]), "divergence": divergence}
    save_model(out, KIND, {"log_ratios": ratios}, summary)
    return summary


def _log_frequencies(texts: Sequence[str]) -> Floats:
    buckets = hash_ngrams(texts, N_BUCKETS)
    counts = np.bincount(buckets.bucket, buckets.count, minlength=N_BUCKETS) + 1.0
    found: Floats = np.log(counts / counts.sum())
    return found


def open_importance(model: str) -> Callable[[Texts], Columns]:
    """Return the measure of a trained model. Raises DataError: the file is no importance model, or damaged."""
    ratios = load_model(model, KIND)[0]["log_ratios"]

    def measure(batch: Texts) -> Columns:
        weights = hash_ngrams(batch.texts, len(ratios)).sums(ratios, counted=True)
        return {"log_weight": weights, "resampling_score": weights + gumbel(batch.data)}

    return measure


def gumbel(texts: Sequence[bytes]) -> Floats:
    """Return a draw from Gumbel(0, 1) for each text, a function of its bytes, [n_texts]."""
    numbers = b"".join(hashlib.blake2b(text, digest_size=8, person=b"resample").digest() for text in texts)
    uniform = (np.frombuffer(numbers, np.uint64) >> np.uint64(11)).astype(np.float64)
    found: Floats = -np.log(-np.log((uniform + 0.5) / (1 << 53)))
    return found


IMPORTANCE = Measure(
    KIND,
    2,
    "Xie et al. 2023, Data Selection for Language Models via Importance Resampling, arXiv:2302.03169",
    {"log_weight": "float64", "resampling_score": "float64"},
    open_importance,
    needs_model=True,
)
