"""The sentence embedder at work: texts in, unit vectors out, and the nearest of many by an exact product.

    vector(text) = normalise(mean over windows w of encoder.embed(ids[w]))             [d], fp32
    cosine(a, b) = vector(a) . vector(b)

A text is what its bytes say: ids without bos and eos, as the spans that `embedding/train.py` learns from are. One that is longer
than the encoder's `max_length` is cut into as few windows as that takes, all of one length up to a token, so that no window
is a tail of three tokens that would count as much as a full one; the unit vectors of the windows are averaged, and the mean
is made a unit vector again. So a long text stands where most of it stands. What it says once, in one window of forty, is all
but gone: to find passages, embed passages.

The subtle part is what batches mean: nothing. Windows are sorted by length before they are batched, so that little is
padding, and the encoder shows no token any padding; a text has the same vector alone, among others and in any order, up to
the rounding of sums (a test).

The tokenizer is an argument (`Words` says what is asked of it): rooms on one floor do not know each other. Both live in one
folder, `Embedder.load(folder, Tokenizer.load(folder))`:

    config.json         the encoder's shape
    model.safetensors   its weights by name, fp32
    tokenizer.json      the words it was trained with
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from whorl.errors import CheckpointError, ConfigError, DataError
from whorl.models.encoder import Encoder, EncoderConfig

Vectors = NDArray[np.float32]
Ids = NDArray[np.unsignedinteger[Any]]
KIND = "embedder"


class TokenizerProtocol(Protocol):
    """What is asked of a tokenizer: `tokens.tokenizer.Tokenizer` is one."""

    @property
    def vocab_size(self) -> int: ...
    def encode(self, data: str | bytes) -> Ids: ...
    def save(self, folder: Path) -> Path: ...


class Embedder:
    """An encoder with its words.

    Args:
        encoder: computes where its weights are.
        words: the tokenizer that it was trained with.

    Raises:
        ConfigError: the tokenizer has ids that the encoder does not know.
    """

    def __init__(self, encoder: Encoder, tokenizer: TokenizerProtocol) -> None:
        if tokenizer.vocab_size > encoder.config.vocab_size:
            raise ConfigError(
                f"the tokenizer has {tokenizer.vocab_size:,} ids and the encoder {encoder.config.vocab_size:,}",
                expected="the tokenizer that the encoder was trained with",
            )
        self.encoder, self.tokenizer = encoder, tokenizer

    @property
    def dim(self) -> int:
        """The length of a vector."""
        return self.encoder.config.d_model

    @property
    def max_seq_length(self) -> int:
        """Ids that are seen together at most."""
        return self.encoder.config.max_length

    @classmethod
    def load(cls, folder: Path, tokenizer: TokenizerProtocol, device: str = "cpu") -> Embedder:
        """What `save` wrote.

        Raises:
            CheckpointError: a file is missing or damaged, or is of another kind of model.
        """
        return cls(load_encoder(folder).to(device), tokenizer)

    def save(self, folder: Path) -> None:
        """Writes the files that the top of this file names; the folder is made."""
        folder.mkdir(parents=True, exist_ok=True)
        shape = {"kind": KIND, "encoder": self.encoder.config.model_dump(mode="json")}
        (folder / "config.json").write_text(json.dumps(shape, indent=2) + "\n")
        weights = {name: p.detach().cpu().contiguous().clone() for name, p in self.encoder.named_parameters()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        self.tokenizer.save(folder)

    def embed(self, texts: Sequence[str | bytes], batch_size: int = 64) -> Vectors:
        """Unit vectors of `texts`: -> [n, d] fp32.

        Args:
            batch: windows that are computed together; the result does not depend on it.

        Raises:
            DataError: a text is empty; its number is named.
            ConfigError: one text instead of several, or an impossible batch.
        """
        if isinstance(texts, str | bytes):
            raise ConfigError("embed was given one text", expected="a sequence of texts", do="embed([text])")
        found = [self.tokenizer.encode(text) for text in texts]
        for number, ids in enumerate(found):
            if not len(ids):
                raise DataError(
                    f"text {number} is empty", expected="at least one character", do="leave it out"
                )
        return embed_ids(self.encoder, found, batch_size)


@torch.inference_mode()
def embed_ids(encoder: Encoder, texts: Sequence[Ids], batch_size: int = 64) -> Vectors:
    """Unit vectors of texts that are ids already, none of them empty: -> [n, d] fp32.

    Raises:
        ConfigError: batch below 1.
    """
    if batch_size < 1:
        raise ConfigError(f"batch is {batch_size}", expected="at least 1")
    most = encoder.config.max_length
    pieces = [
        (i, ids[start:stop]) for i, ids in enumerate(texts) for start, stop in split_windows(len(ids), most)
    ]
    pieces.sort(key=lambda piece: len(piece[1]))
    device = encoder.embedding.device
    total = torch.zeros(len(texts), encoder.config.d_model, device=device)
    for first in range(0, len(pieces), batch_size):
        taken = pieces[first : first + batch_size]
        ids, mask = pad([piece for _, piece in taken])
        owners = torch.tensor([i for i, _ in taken], device=device)
        total.index_add_(0, owners, encoder.embed(ids.to(device), mask.to(device)))
    return np.asarray(torch.nn.functional.normalize(total, dim=-1).cpu().numpy(), np.float32)


def split_windows(length: int, max_length: int) -> list[tuple[int, int]]:
    """(start, stop) of as few stretches of at most `most` as cover `length`, all of one length up to 1."""
    n = -(-length // max_length)
    ends = [length * i // n for i in range(n + 1)] if n else [0]
    return list(pairwise(ends))


def pad(sequences: Sequence[Ids]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of ids of several lengths as one rectangle: ids [n, T] int64 and mask [n, T], True = real."""
    lengths = np.array([len(piece) for piece in sequences])
    mask = np.arange(lengths.max(initial=0)) < lengths[:, None]
    ids = np.zeros(mask.shape, np.int64)  # what stands at padding means nothing
    if len(sequences):
        ids[mask] = np.concatenate(sequences)
    return torch.from_numpy(ids), torch.from_numpy(mask)


def nearest(vectors: Vectors, query: Vectors, k: int) -> list[tuple[int, float]]:
    """The `k` rows of `vectors` with the largest product with `query`, best first: (row, cosine of unit vectors).

    Exact: every row is looked at. Of equal ones the earlier row comes first; with fewer than k rows, all.

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


def load_encoder(folder: Path) -> Encoder:
    """The encoder of an embedder's folder, fp32.

    Raises:
        CheckpointError: as `Embedder.load`.
    """
    try:
        shape = json.loads((folder / "config.json").read_text())
        if not isinstance(shape, dict) or shape.get("kind") != KIND:
            raise ValueError(f"config.json is of no {KIND}")
        config = EncoderConfig.model_validate(shape["encoder"])
        weights = load_file(folder / "model.safetensors")
    except (OSError, ValueError, KeyError, ValidationError, SafetensorError) as error:
        raise CheckpointError(
            f"no embedder could be read from {folder}: {error}",
            expected="config.json and model.safetensors as `Embedder.save` writes them",
            do="name an embedder that `whorl ls` lists",
        ) from error
    encoder = Encoder(config)
    wanted = {name: tuple(p.shape) for name, p in encoder.named_parameters()}
    found = {name: tuple(t.shape) for name, t in weights.items()}
    if wanted != found:
        name = min(n for n in wanted.keys() | found.keys() if wanted.get(n) != found.get(n))
        raise CheckpointError(
            f"{folder / 'model.safetensors'}: tensor {name!r} is {found.get(name, 'missing')}",
            expected=f"{wanted.get(name, 'no such tensor')} by config.json",
        )
    encoder.load_state_dict(weights, strict=False)  # what a layer can compute for itself is in no file
    return encoder.eval()
