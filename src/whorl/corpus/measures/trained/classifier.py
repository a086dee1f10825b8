"""A classifier of texts: logistic regression over hashed words and pairs of words, trained on named samples.

    summary = train_classifier(["good.jsonl"], ["bad.jsonl"], Path("quality.safetensors"))
    CurateConfig(measures=[{"name": "quality", "measure": "classifier", "model": "quality.safetensors"}])

It serves quality, toxicity or adult content, by the samples. With x the unit vector of a text's distinct buckets,

    p = sigmoid(w x + b),    minimizing    mean(-log p(label)) + l2 / 2 |w|^2.

The problem is convex, so L-BFGS (Liu and Nocedal 1989) finds the one optimum. `quality_probability` is relative to the
share of positive samples: with a quarter of them, an undecided text has 0.25.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whorl.corpus.measures.measure import Columns, Measure, Texts
from whorl.corpus.measures.trained.hashed_ngrams import (
    Buckets,
    Floats,
    check_training,
    hash_ngrams,
    load_model,
    read_samples,
    save_model,
)
from whorl.errors import ConfigError, DataError

N_BUCKETS = 1 << 18
MAX_ITERATIONS = 200
KIND = "classifier"


def train_classifier(
    positive: Sequence[str], negative: Sequence[str], out: Path, *, field: str = "text", l2: float = 1e-5,
    held_out: float = 0.2, seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Train a classifier on two classes of texts and write its model.

    Memory: about 50 bytes per distinct n-gram of each text.

    Args:
        positive, negative: JSONL, Parquet, Arrow or tar files; patterns and URLs are allowed.
        out: file of the model.
        field: the text's field in each record.
        l2: weight of the penalty.
        held_out: fraction of each class that is tested and not trained on.
        seed: of the choice of held-out texts.

    Returns:
        `positive`, `negative`: numbers of distinct texts; `in_both`: texts of both classes, which are left out.
        `held_out`: `texts`, `accuracy`, `auc`, `log_loss`.

    Raises:
        ConfigError: a file is in both classes, `out` cannot be written, or a setting is out of range.
        DataError: a file cannot be read, or a class has fewer than two texts.
    """
    if not 0 < held_out < 1 or l2 <= 0:
        raise ConfigError(f"held_out is {held_out} and l2 is {l2}", expected="0 < held_out < 1 and l2 > 0")
    check_training(positive, negative, ("positive", "negative"), out)
    classes = [
        read_samples(files, field, what) for files, what in ((positive, "positive"), (negative, "negative"))
    ]
    both = set(classes[0]) & set(classes[1])
    train: list[str] = []
    test: list[str] = []
    labels: tuple[list[bool], list[bool]] = ([], [])
    for texts, is_positive in zip(classes, (True, False), strict=True):
        chosen = sorted((t for t in texts if t not in both), key=lambda text: _order(text, seed))
        if len(chosen) < 2:
            raise DataError(
                f"the {'positive' if is_positive else 'negative'} class has {len(chosen)} texts"
                f" ({len(both)} are in both classes)",
                expected="at least two",
            )
        n_test = min(max(round(held_out * len(chosen)), 1), len(chosen) - 1)
        test += chosen[:n_test]
        train += chosen[n_test:]
        labels[0].extend([is_positive] * (len(chosen) - n_test))
        labels[1].extend([is_positive] * n_test)
    weights, bias = fit_logistic(
        hash_ngrams(train, N_BUCKETS), np.array(labels[0]), l2=l2, n_buckets=N_BUCKETS
    )
    arrays = {"weights": weights.astype(np.float32), "bias": np.array([bias])}
    probability, of_test = _probability(arrays, test), np.array(labels[1])
    likelihood = np.where(of_test, probability, 1 - probability)
    summary = {
        "positive": len(classes[0]),
        "negative": len(classes[1]),
        "in_both": len(both),
        "l2": l2,
        "seed": seed,
        "held_out": {
            "texts": len(test),
            "accuracy": float(np.mean((probability > 0.5) == of_test)),
            "auc": roc_auc(probability, of_test),
            "log_loss": float(-np.log(np.maximum(likelihood, 1e-300)).mean()),
        },
    }
    save_model(out, KIND, arrays, summary)
    return summary


def fit_logistic(
    buckets: Buckets, labels: NDArray[np.bool_], *, l2: float, n_buckets: int
) -> tuple[Floats, float]:
    """Return the weights [n_buckets] and the bias of the minimum of the penalized log loss."""
    import torch

    scale = _scale(buckets)
    n, target = buckets.n_texts, labels.astype(np.float64)

    def loss_and_gradient(parameters: Floats) -> tuple[float, Floats]:
        weights, bias = parameters[:-1], parameters[-1]
        logits = scale * buckets.sums(weights, counted=False) + bias
        loss = np.logaddexp(0, logits) - target * logits
        error = (_sigmoid(logits) - target) / n
        gradient = np.bincount(buckets.bucket, (scale * error)[buckets.text], minlength=n_buckets)
        return float(loss.mean() + l2 / 2 * weights @ weights), np.append(
            gradient + l2 * weights, error.sum()
        )

    parameters = torch.zeros(n_buckets + 1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [parameters], max_iter=MAX_ITERATIONS, tolerance_grad=1e-7, tolerance_change=1e-12,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure() -> float:
        loss, gradient = loss_and_gradient(parameters.detach().numpy())
        parameters.grad = torch.from_numpy(gradient)
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    found = parameters.detach().numpy()
    return found[:-1], float(found[-1])


def roc_auc(scores: Floats, labels: NDArray[np.bool_]) -> float:
    """Return the probability that a positive text has the higher score; equal scores count half."""
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    n = int(labels.sum())
    return float((ranks[labels].sum() - n * (n + 1) / 2) / (n * (len(labels) - n)))


def open_classifier(model: str) -> Callable[[Texts], Columns]:
    """Return the measure of a trained model. Raises DataError: the file is no classifier, or damaged."""
    arrays, _ = load_model(model, KIND)
    return lambda batch: {"probability": _probability(arrays, batch.texts)}


def _probability(arrays: dict[str, NDArray[Any]], texts: Sequence[str]) -> Floats:
    buckets = hash_ngrams(texts, len(arrays["weights"]))
    return _sigmoid(_scale(buckets) * buckets.sums(arrays["weights"], counted=False) + arrays["bias"][0])


def _scale(buckets: Buckets) -> Floats:
    scale: Floats = 1 / np.sqrt(np.maximum(buckets.distinct, 1))
    return scale


def _sigmoid(x: Floats) -> Floats:
    found: Floats = np.exp(-np.logaddexp(0, -x))
    return found


def _order(text: str, seed: int) -> bytes:
    salt = seed.to_bytes(8, "little")
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16, salt=salt).digest()


CLASSIFIER = Measure(
    KIND,
    1,
    "Joulin et al. 2017, Bag of Tricks for Efficient Text Classification; Liu and Nocedal 1989",
    {"probability": "float64"},
    open_classifier,
    needs_model=True,
)
