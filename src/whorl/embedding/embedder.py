"""The sentence embedder: texts to unit vectors, and exact nearest neighbors.

    vector(text) = normalize(mean over windows w of encoder.embed(ids[w]))             [d], fp32
    cosine(a, b) = vector(a) . vector(b)

A text is its ids without bos and eos, as the spans in `embedding/span_pairs.py`. A text longer than the encoder's
`max_length` is split into the fewest windows, of equal length up to one token, so that no short tail counts as much as a
full window. The unit vectors of the windows are averaged and normalized again. A long text is thus represented by most of
its content; to find passages, embed passages.

The subtle point is batch invariance. Windows are sorted by length before batching, to reduce padding, and the encoder masks
padding. A text has the same vector alone and in any batch, up to the rounding of sums (tested).

Both live in one folder, `Embedder.load(folder, Tokenizer.load(folder))`:

    config.json         the encoder's configuration; words: texts are read as words (`embedding/words.py`)
    model.safetensors   its weights by name, fp32
    tokenizer.json      its tokenizer
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from whorl.embedding.words import WordsTokenizer
from whorl.errors import CheckpointError, ConfigError, DataError
from whorl.models.encoder import Encoder, EncoderConfig
from whorl.nn.compiler import meta_device
from whorl.store import Store
from whorl.store.files import load_json, require_regular
from whorl.tokens.tokenizer import Tokenizer

T = TypeVar("T")
Vectors = NDArray[np.float32]
Ids = NDArray[np.unsignedinteger[Any]]
KIND = "embedder"


class Embedder:
    """An encoder with its tokenizer.

    Args:
        encoder: computes on the device of its weights.
        tokenizer: the one that the encoder was trained with.
        words: texts are read as their words (`embedding/words.py`).

    Raises:
        ConfigError: the tokenizer has more ids than the encoder.
    """

    def __init__(self, encoder: Encoder, tokenizer: Tokenizer, words: bool = False) -> None:
        if tokenizer.vocab_size > encoder.config.vocab_size:
            raise ConfigError(
                f"the tokenizer has {tokenizer.vocab_size:,} ids and the encoder {encoder.config.vocab_size:,}",
                expected="the tokenizer of the encoder's training",
            )
        self.encoder, self.words = encoder, words
        self.tokenizer = WordsTokenizer(tokenizer) if words else tokenizer

    @property
    def dim(self) -> int:
        """Length of a vector."""
        return self.encoder.config.d_model

    @property
    def max_seq_length(self) -> int:
        """Maximum ids per window."""
        return self.encoder.config.max_length

    @classmethod
    def load(cls, folder: Path, tokenizer: Tokenizer, device: str = "cpu") -> Embedder:
        """Load an embedder that `save` wrote.

        Raises:
            CheckpointError: a file is missing or damaged, or is of another type of model.
        """
        encoder = load_encoder(folder).to(device)
        return cls(encoder, tokenizer, bool(load_json(folder / "config.json").get("words")))

    def save(self, folder: Path) -> None:
        """Write the files listed at the top of this file; creates the folder."""
        save_encoder(self.encoder, folder, KIND, words=self.words)
        self.tokenizer.save(folder)

    def embed(self, texts: Sequence[str | bytes], batch_size: int = 64) -> Vectors:
        """Return unit vectors of `texts`: [n, d] fp32.

        Args:
            batch_size: windows computed together; the result does not depend on it.

        Raises:
            DataError: a text is empty; the message has its number.
            ConfigError: one text instead of several, or an invalid batch size.
        """
        if isinstance(texts, str | bytes):
            raise ConfigError("embed received one text", expected="a sequence of texts", do="embed([text])")
        found = [self.tokenizer.encode(text) for text in texts]
        for number, ids in enumerate(found):
            if not len(ids):
                raise DataError(f"text {number} is empty", expected="at least one character", do="remove it")
        return embed_ids(self.encoder, found, batch_size)


def open_encoder(store: Store, ref: str) -> tuple[str, Callable[[list[str]], Vectors]]:
    """Return the address of an embedder of a store, and its function from texts to unit vectors [n, d].

    Raises:
        ConfigError: the artifact is no embedder. StoreError: it does not exist.
    """
    found = store.open(ref)
    if found.kind != KIND:
        raise ConfigError(f"{found.name} is of the kind {found.kind}", expected="an embedder", do="whorl ls")
    found.check()
    return found.address, Embedder.load(found.path, Tokenizer.load(found.path)).embed


def embed_ids(encoder: Encoder, texts: Sequence[Ids], batch_size: int = 64) -> Vectors:
    """Return unit vectors [n, d] fp32 of texts given as ids, none of them empty.

    Raises:
        ConfigError: batch_size below 1.
    """
    return result_of(embedding_pieces(encoder, texts, batch_size))


@torch.inference_mode()
def embedding_pieces(
    encoder: Encoder, texts: Sequence[Ids], batch_size: int
) -> Generator[None, None, Vectors]:
    """Return what `embed_ids` returns, as a generator that yields after each batch."""
    if batch_size < 1:
        raise ConfigError(f"batch_size is {batch_size}", expected="at least 1")
    max_length = encoder.config.max_length
    windows = [
        (i, ids[start:stop])
        for i, ids in enumerate(texts)
        for start, stop in split_windows(len(ids), max_length)
    ]
    windows.sort(key=lambda window: len(window[1]))
    device = encoder.embedding.device
    total = torch.zeros(len(texts), encoder.config.d_model, device=device)
    for first in range(0, len(windows), batch_size):
        batch = windows[first : first + batch_size]
        ids, mask = pad([window for _, window in batch])
        owners = torch.tensor([i for i, _ in batch], device=device)
        total.index_add_(0, owners, encoder.embed(ids.to(device), mask.to(device)))
        yield
    return np.asarray(torch.nn.functional.normalize(total, dim=-1).cpu().numpy(), np.float32)


def result_of(pieces: Generator[None, None, T]) -> T:
    """Run a generator to its end and return its value."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            found: T = end.value
            return found


def split_windows(length: int, max_length: int) -> list[tuple[int, int]]:
    """Return (start, stop) of the fewest spans of at most `max_length` that cover `length`, of equal length up to 1."""
    n = -(-length // max_length)
    ends = [length * i // n for i in range(n + 1)] if n else [0]
    return list(pairwise(ends))


def pad(sequences: Sequence[Ids]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad rows of ids to one length: ids [n, T] int64 and mask [n, T], True = real."""
    lengths = np.array([len(ids) for ids in sequences])
    mask = np.arange(lengths.max(initial=0)) < lengths[:, None]
    ids = np.zeros(mask.shape, np.int64)  # values at padding are unused
    if len(sequences):
        ids[mask] = np.concatenate(sequences)
    return torch.from_numpy(ids), torch.from_numpy(mask)


def nearest(vectors: Vectors, query: Vectors, k: int) -> list[tuple[int, float]]:
    """Return the `k` rows of `vectors` with the largest product with `query`, best first: (row, cosine of unit vectors).

    Exact: every row is compared. Of equal rows the earlier one comes first; with fewer than k rows, all.

    Args:
        vectors: [n, d]; query: [d].

    Raises:
        ConfigError: shapes that do not fit, k below 1.
    """
    if vectors.ndim != 2 or query.shape != vectors.shape[1:]:
        raise ConfigError(
            f"vectors is {list(vectors.shape)} and query {list(query.shape)}", expected="[n, d] and [d]"
        )
    if k < 1:
        raise ConfigError(f"k is {k}", expected="at least 1")
    cosines = vectors @ query
    best = np.argsort(-cosines, kind="stable")[:k]
    return [(int(row), float(cosines[row])) for row in best]


def save_encoder(encoder: Encoder, folder: Path, kind: str, **more: Any) -> None:
    """Write `config.json`, with further fields, and the weights; creates the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = {"kind": kind, "encoder": encoder.config.model_dump(mode="json"), **more}
    (folder / "config.json").write_text(json.dumps(shape, indent=2) + "\n")
    weights = {name: p.detach().cpu().contiguous().clone() for name, p in encoder.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def load_encoder(folder: Path, kind: str = KIND) -> Encoder:
    """Load the encoder that `save_encoder` wrote as a model of `kind`, fp32.

    Raises:
        CheckpointError: as `Embedder.load`.
    """
    try:
        shape = load_json(folder / "config.json")
        if not isinstance(shape, dict) or shape.get("kind") != kind:
            raise ValueError(f"config.json is not of the kind {kind}")
        config = EncoderConfig.model_validate(shape["encoder"])
        weights = load_file(require_regular(folder / "model.safetensors"))
    except (OSError, ValueError, KeyError, ValidationError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot read a model of the kind {kind} from {folder}: {error}",
            expected=f"config.json and model.safetensors of the step `{kind}`",
            do=f"use a model of the kind {kind} that `whorl ls` lists",
        ) from error
    with meta_device():  # without memory until the shapes are those of the file
        expected_shapes = {name: tuple(p.shape) for name, p in Encoder(config).named_parameters()}
    found = {name: tuple(t.shape) for name, t in weights.items()}
    if expected_shapes != found:
        name = min(n for n in expected_shapes.keys() | found.keys() if expected_shapes.get(n) != found.get(n))
        raise CheckpointError(
            f"{folder / 'model.safetensors'}: tensor {name!r} is {found.get(name, 'missing')}",
            expected=f"{expected_shapes.get(name, 'no such tensor')} by config.json",
        )
    encoder = Encoder(config)
    encoder.load_state_dict(weights, strict=False)  # buffers that a layer computes are in no file
    return encoder.eval()
