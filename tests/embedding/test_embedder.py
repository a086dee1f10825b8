"""The embedder against a loop over single windows, `nearest` against a sort, and rejected input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from whorl.embedding.embedder import Embedder, embed_ids, nearest, split_windows
from whorl.errors import CheckpointError, ConfigError, DataError
from whorl.models.encoder import Encoder, EncoderConfig
from whorl.tokens.tokenizer import Tokenizer

WORDS = Tokenizer.train(["to be or not to be, that is the question"] * 4, 280)
TEXTS = ["to", "to be or not", "x" * 31 + "the question " * 9, "<|eos|> is ordinary text", "a" * 16, "b" * 17]


def small(vocab_size: int = 280, n_layers: int = 2) -> Encoder:
    shape = EncoderConfig(
        vocab_size=vocab_size, d_model=16, n_layers=n_layers, n_heads=2, mlp_hidden=24, max_length=16
    )
    encoder = Encoder(shape, torch.Generator().manual_seed(3))
    with torch.no_grad():
        for p in encoder.parameters():  # blocks start as the identity and would hide errors
            p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    return encoder


def one_by_one(encoder: Encoder, text: str | bytes) -> torch.Tensor:
    """Reference: each window alone, without padding or mask."""
    ids = torch.from_numpy(WORDS.encode(text).astype("int64"))
    n = -(-len(ids) // 16)
    parts = [ids[len(ids) * i // n : len(ids) * (i + 1) // n] for i in range(n)]
    assert all(1 <= len(part) <= 16 for part in parts)
    total = sum((encoder.embed(part[None])[0] for part in parts), torch.zeros(16))
    return torch.nn.functional.normalize(total, dim=0).detach()


@pytest.mark.parametrize("batch", [1, 2, 64])
def test_embed_matches_single_windows_in_any_batch(batch: int) -> None:
    encoder = small()
    embedder = Embedder(encoder, WORDS)
    assert len(WORDS.encode(TEXTS[2])) > 2 * embedder.max_seq_length  # a text of several windows
    found = embedder.embed(TEXTS, batch)
    want = torch.stack([one_by_one(encoder, text) for text in TEXTS])
    assert found.dtype == np.float32 and found.shape == (len(TEXTS), embedder.dim)
    torch.testing.assert_close(torch.from_numpy(found), want, atol=2e-6, rtol=0)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)
    from_reversed = embedder.embed(TEXTS[::-1], batch)[::-1]
    np.testing.assert_allclose(from_reversed, found, atol=2e-6)
    assert np.abs(found - found[0]).max(axis=1)[1:].min() > 0.05  # the vectors differ


def test_embed_accepts_any_bytes_and_no_texts() -> None:
    embedder = Embedder(small(), WORDS)
    np.testing.assert_array_equal(embedder.embed(["tö be"]), embedder.embed(["tö be".encode()]))
    assert np.isfinite(embedder.embed([b"\xff\x00\xfe"])).all()
    assert embedder.embed([]).shape == (0, 16)


@pytest.mark.parametrize("max_length", [1, 2, 7, 64])
def test_split_windows_is_even_and_minimal(max_length: int) -> None:
    for length in range(200):
        found = split_windows(length, max_length)
        assert [i for start, stop in found for i in range(start, stop)] == list(range(length))
        sizes = [stop - start for start, stop in found]
        assert len(found) == -(-length // max_length) and max(sizes, default=0) <= max_length
        assert max(sizes, default=0) - min(sizes, default=0) <= 1


def test_nearest_matches_sort() -> None:
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((50, 8)).astype(np.float32)
    vectors[30] = vectors[10]  # a tie
    query = vectors[10]
    cosines = [float(np.dot(row, query)) for row in vectors]
    want = sorted(range(50), key=lambda i: (-round(cosines[i], 5), i))
    found = nearest(vectors, query, 7)
    assert [row for row, _ in found] == want[:7]
    np.testing.assert_allclose([cosine for _, cosine in found], [cosines[i] for i in want[:7]], atol=1e-5)
    assert len(nearest(vectors, query, 1000)) == 50 and nearest(vectors[:0], query, 3) == []


def test_saved_embedder_loads_bit_identical(tmp_path: Path) -> None:
    embedder = Embedder(small(), WORDS)
    embedder.save(tmp_path / "new" / "folder")
    folder = tmp_path / "new" / "folder"
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    again = Embedder.load(folder, Tokenizer.load(folder))
    np.testing.assert_array_equal(again.embed(TEXTS), embedder.embed(TEXTS))
    assert (again.dim, again.max_seq_length) == (16, 16)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda e: e.embed(["a", "", "b"]), DataError, "text 1 is empty"),
        (lambda e: e.embed("a text"), ConfigError, "one text"),
        (lambda e: e.embed(["a"], batch_size=0), ConfigError, "batch_size is 0"),
        (lambda e: embed_ids(e.encoder, [], batch_size=-1), ConfigError, "batch_size is -1"),
        (lambda e: Embedder(small(270), WORDS), ConfigError, "280 ids and the encoder 270"),
        (lambda e: nearest(np.ones((2, 8)), np.ones(7), 1), ConfigError, "d"),
        (lambda e: nearest(np.ones(8), np.ones(8), 1), ConfigError, "d"),
        (lambda e: nearest(np.ones((2, 8)), np.ones(8), 0), ConfigError, "at least 1"),
    ],
)
def test_embedder_rejects_invalid_input(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(Embedder(small(), WORDS))


def test_load_rejects_damaged_folders(tmp_path: Path) -> None:
    Embedder(small(), WORDS).save(tmp_path)
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    shape, whole, bits = config.read_text(), load_file(weights), weights.read_bytes()

    def refused(message: str) -> None:
        with pytest.raises(CheckpointError, match=message):
            Embedder.load(tmp_path, WORDS)
        config.write_text(shape)
        weights.write_bytes(bits)

    config.write_text(json.dumps({**json.loads(shape), "kind": "decoder"}))
    refused("not of an embedder")
    config.write_text("[1]")
    refused("not of an embedder")
    config.write_text("{")
    refused("cannot read an embedder")
    config.write_text(shape.replace('"n_heads": 2', '"n_heads": 3'))
    refused("multiple of n_heads")
    weights.write_bytes(bits[:-8])
    refused("cannot read an embedder")
    config.write_text(shape.replace('"mlp_hidden": 24', '"mlp_hidden": 32'))
    refused(r"'blocks\.0\.mlp")
    save_file({n: t for n, t in whole.items() if n != "embedding"}, weights)
    refused("'embedding' is missing")
    save_file({**whole, "head": torch.zeros(2)}, weights)
    refused("'head'")
    weights.unlink()
    refused("cannot read an embedder")
