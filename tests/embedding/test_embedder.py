"""The embedder against a loop over single windows, `nearest` against a sort, and rejected input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save
from tests.support.models.initialization import add_noise, generator
from tests.support.tiny import make_document

from whorl.embedding.embedder import Embedder, embed_ids, nearest, split_windows
from whorl.embedding.span_pairs import SpanPairs
from whorl.embedding.words import WordsSplit
from whorl.errors import CheckpointError, ConfigError, DataError
from whorl.models.encoder import Encoder, EncoderConfig
from whorl.tokens.shards import TokenSet, write_shards
from whorl.tokens.tokenizer import Tokenizer

WORDS = Tokenizer.train(["to be or not to be, that is the question"] * 4, 280)
TEXTS = ["to", "to be or not", "x" * 31 + "the question " * 9, "<|eos|> is ordinary text", "a" * 16, "b" * 17]


def small(vocab_size: int = 280) -> Encoder:
    shape = {"vocab_size": vocab_size, "d_model": 16, "n_layers": 2, "n_heads": 2, "mlp_hidden": 24}
    encoder = Encoder(EncoderConfig.model_validate({**shape, "max_length": 16}), generator(3))
    return add_noise(encoder, 0.3, generator(4))  # blocks start as the identity and would hide errors


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
    with pytest.raises(DataError, match="text 1 is empty"):
        embedder.embed(["a", "", "b"])


def test_words_give_identifiers_and_sentences_one_vector(tmp_path: Path) -> None:
    Embedder(small(), WORDS, words=True).save(tmp_path / "words")
    Embedder(small(), WORDS).save(tmp_path / "text")
    of = {
        name: Embedder.load(tmp_path / name, Tokenizer.load(tmp_path / name)).embed
        for name in ("words", "text")
    }
    same = ["toBeOrNot", "to_be_or_not", "To be, or not?", b"to be or not"]
    found = of["words"](same)
    assert np.abs(found - of["text"](["to be or not"])).max() < 1e-6
    assert np.abs(of["text"](same[:3]) - found[3]).max(axis=1).min() > 0.05
    assert np.isfinite(of["words"](["?!"])).all(), "a text without words"


def test_words_of_a_split_are_those_of_its_documents(tmp_path: Path) -> None:
    texts = ["toBe = or_not(toBe)", "?!", "THE question of questions"]
    write_shards([make_document(text, n) for n, text in enumerate(texts)], WORDS, tmp_path, "train")
    pairs = SpanPairs(found := WordsSplit(TokenSet(tmp_path).split("train"), WORDS), 16, 2)
    begin = found.starts + 1
    ids = [found[s : s + n - 2] for s, n in zip(begin.tolist(), found.lengths.tolist(), strict=True)]
    assert [WORDS.decode(each) for each in ids] == [
        b"to be or not to be",
        b"?!",
        b"the question of questions",
    ]
    spans = pairs.batch(0, 0, 2)
    whole = {n: WORDS.decode(ids[n]) for n in spans.documents.tolist()}
    for side in (spans.first, spans.second):
        assert all(WORDS.decode(s) in whole[n] for s, n in zip(side, spans.documents.tolist(), strict=True))


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
    folder = tmp_path / "new" / "folder"
    embedder.save(folder)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in folder.iterdir()}
    again = Embedder.load(folder, Tokenizer.load(folder))
    np.testing.assert_array_equal(again.embed(TEXTS), embedder.embed(TEXTS))
    assert (again.dim, again.max_seq_length) == (16, 16)


INVALID: list[tuple[Any, str]] = [
    (lambda e: e.embed("a text"), "one text"),
    (lambda e: e.embed(["a"], batch_size=0), "batch_size is 0"),
    (lambda e: embed_ids(e.encoder, [], batch_size=-1), "batch_size is -1"),
    (lambda e: Embedder(small(270), WORDS), "280 ids and the encoder 270"),
    (lambda e: nearest(np.ones((2, 8)), np.ones(7), 1), "d"),
    (lambda e: nearest(np.ones(8), np.ones(8), 1), "d"),
    (lambda e: nearest(np.ones((2, 8)), np.ones(8), 0), "at least 1"),
]


@pytest.mark.parametrize(("call", "message"), INVALID)
def test_embedder_rejects_invalid_arguments(call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call(Embedder(small(), WORDS))


def test_load_rejects_damaged_folders(tmp_path: Path) -> None:
    Embedder(small(), WORDS).save(tmp_path)
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    shape, tensors, whole = config.read_text(), load_file(weights), weights.read_bytes()
    partial = {n: t for n, t in tensors.items() if n != "embedding"}
    for message, text, content in (
        ("not of the kind embedder", json.dumps({**json.loads(shape), "kind": "decoder"}), whole),
        ("not of the kind embedder", "[1]", whole),
        ("cannot read a model of the kind embedder", "{", whole),
        ("multiple of n_heads", shape.replace('"n_heads": 2', '"n_heads": 3'), whole),
        ("cannot read a model of the kind embedder", shape, whole[:-8]),
        (r"'blocks\.0\.mlp", shape.replace('"mlp_hidden": 24', '"mlp_hidden": 32'), whole),
        ("'embedding' is missing", shape, save(partial)),
        ("'head'", shape, save({**tensors, "head": torch.zeros(2)})),
    ):
        config.write_text(text)
        weights.write_bytes(content)
        with pytest.raises(CheckpointError, match=message):
            Embedder.load(tmp_path, WORDS)
    config.write_text(shape)
    weights.unlink()
    with pytest.raises(CheckpointError, match="cannot read a model of the kind embedder"):
        Embedder.load(tmp_path, WORDS)
