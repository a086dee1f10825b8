"""Hashed n-grams of words: each text as counts of buckets, and the file of a model with one weight per bucket.

Words are those of `decontamination/words.py`: without case and punctuation, and one per character in Chinese, Japanese and
Thai. Single words and pairs share the buckets (Weinberger et al. 2009, Feature Hashing for Large Scale Multitask Learning).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whorl.corpus.decontamination.words import hash_words, ngram_hashes
from whorl.corpus.mapreduce.units import hash_file
from whorl.corpus.measures.run import text_batches
from whorl.data.files import expand_globs
from whorl.data.formats import read_strings
from whorl.errors import ConfigError, DataError
from whorl.files import write_atomic

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Buckets:
    """Counts of the buckets that occur in each text.

    text, bucket, count: [n] sorted by text, then bucket.
    n_texts: also texts without words count.
    """

    text: NDArray[np.int64]
    bucket: NDArray[np.int64]
    count: NDArray[np.int64]
    n_texts: int

    def sums(self, weights: NDArray[np.floating[Any]], *, counted: bool) -> Floats:
        """Return the sum of the weights of each text's buckets, times their counts if `counted`, [n_texts]."""
        values = weights[self.bucket] * (self.count if counted else 1)
        return np.bincount(self.text, values, minlength=self.n_texts).astype(np.float64, copy=False)

    @property
    def distinct(self) -> NDArray[np.int64]:
        """Number of buckets of each text, [n_texts]."""
        return np.bincount(self.text, minlength=self.n_texts)

    @property
    def total(self) -> Floats:
        """Number of n-grams of each text, [n_texts]."""
        return np.bincount(self.text, self.count, minlength=self.n_texts).astype(np.float64, copy=False)


def hash_ngrams(texts: Sequence[str], n_buckets: int) -> Buckets:
    """Return the buckets of the words and pairs of words of each text."""
    parts, done = [np.zeros((3, 0), np.int64)], 0
    for batch in text_batches(texts):
        words = hash_words(batch)
        of_word = np.repeat(np.arange(len(batch)), np.diff(words.first))
        pairs = ngram_hashes(words.hashes, 2)
        inside = of_word[1:] == of_word[:-1]
        hashes = np.concatenate([words.hashes, pairs[inside]])
        text = np.concatenate([of_word, of_word[1:][inside]])
        bucket = (hashes % np.uint64(n_buckets)).astype(np.int64)
        keys, counts = np.unique(text * n_buckets + bucket, return_counts=True)
        parts.append(np.stack([keys // n_buckets + done, keys % n_buckets, counts]))
        done += len(batch)
    text, bucket, count = np.concatenate(parts, axis=1)
    return Buckets(text, bucket, count, done)


def read_samples(files: Sequence[str], field: str, label: str) -> list[str]:
    """Return the distinct texts of JSONL, Parquet, Arrow or tar files, in their order.

    Args:
        files: patterns and URLs are allowed.
        field: the text's field in each record.
        label: name of the samples, for errors.

    Raises:
        DataError: a file is missing or damaged, a record has no text, or all texts are empty.
    """
    what = f"file of {label} samples"
    found = (text for name in expand_globs(files) for _, text in read_strings(name, field, what))
    texts = dict.fromkeys(text for text in found if text.strip())
    if not texts:
        raise DataError(
            f"there are no {label} samples in {', '.join(files) or 'no file'}",
            expected="at least one record with words",
        )
    return list(texts)


def check_training(first: Sequence[str], second: Sequence[str], names: tuple[str, str], out: Path) -> None:
    """Raise ConfigError if a file of the first samples is, or equals, one of the second, or `out` cannot be a model."""
    if out.is_dir() or not out.parent.is_dir():
        raise ConfigError(
            f"the model cannot be written to {out}", expected="the name of a file, in a folder that exists"
        )
    seen = {_content(name): name for name in expand_globs(first)}
    for name in expand_globs(second):
        if (other := seen.get(_content(name))) is not None:
            raise ConfigError(
                f"the {names[0]} samples {other} and the {names[1]} samples {name} are equal",
                expected="different files",
            )


def _content(name: str) -> str:
    return hash_file(Path(name)) if Path(name).is_file() else name


def save_model(path: Path, kind: str, arrays: Mapping[str, NDArray[Any]], summary: Mapping[str, Any]) -> None:
    """Write a model as one safetensors file; equal models give equal bytes.

    Args:
        summary: of the training, JSON values.
    """
    from safetensors.numpy import save

    about = {"kind": kind, "digest": _digest(arrays), "summary": dict(summary)}
    data = save(dict(arrays), {"whorl": json.dumps(about, sort_keys=True)})
    write_atomic(path, data)


def load_model(path: str | Path, kind: str) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Return the arrays and the summary of a model's file.

    Raises:
        DataError: it cannot be read, is a model of another kind, or its arrays differ from their digest.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np") as file:
            about = json.loads((file.metadata() or {}).get("whorl", "{}"))
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as error:
        raise DataError(f"the model {path} cannot be read: {error}", expected=f"a {kind} model") from error
    if about.get("kind") != kind:
        raise DataError(f"{path} is no {kind} model", expected=f"a file that trained a {kind}")
    if about["digest"] != _digest(arrays):
        raise DataError(
            f"the model {path} is damaged: its arrays differ from their digest", do="train it again"
        )
    return arrays, about["summary"]


def _digest(arrays: Mapping[str, NDArray[Any]]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype} {array.shape} ".encode())
        digest.update(array.data)
    return digest.hexdigest()
