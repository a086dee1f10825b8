"""`whorl embed`: vectors, nearest texts, skipped inputs, errors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests.support.cli import invoke, succeed

from whorl.embedding.embedder import Embedder
from whorl.models.encoder import Encoder, EncoderConfig
from whorl.store import Build, Store
from whorl.tokens.tokenizer import Tokenizer
from whorl.tracking.seeds import generator


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts, and a store with an untrained embedder and a tokenizer."""
    folder = tmp_path_factory.mktemp("home")
    long = "all work and no play " * 30
    texts = {"cats.txt": "the cat sat on the mat", "long.txt": long, "rain.txt": "rain falls"}
    for name, text in {**texts, "empty.txt": " \n"}.items():
        (folder / name).write_text(text)
    (folder / "odd.bin").write_bytes(b"\xff\xfe\x00odd")
    words = Tokenizer.train(texts.values(), 300)
    sizes = {"d_model": 32, "n_layers": 1, "n_heads": 2, "mlp_hidden": 32, "max_length": 16}
    shape = EncoderConfig(vocab_size=words.vocab_size, **sizes)
    store = Store(folder / ".whorl")
    store.make_folders()
    made = {"embedder": Embedder(Encoder(shape, generator(0, "weights")), words), "tokenizer": words}
    for kind, found in made.items():
        with Build(store, kind=kind, name=f"finder/{kind}", parents={}, config={}, version=1) as build:
            found.save(build.path)
    return folder


def vectors(home: Path, texts: list[str | bytes]) -> np.ndarray:
    path = Store(home / ".whorl").open("embedder").path
    return Embedder.load(path, Tokenizer.load(path)).embed(texts)


def test_embed_files_prints_vectors(home: Path) -> None:
    names = ["cats.txt", "long.txt", "odd.bin"]
    lines = [json.loads(line) for line in succeed(home, "embed", "embedder", *names).stdout.splitlines()]
    assert [line["file"] for line in lines] == names
    got = np.array([line["vector"] for line in lines], np.float32)
    np.testing.assert_allclose(got, vectors(home, [(home / n).read_bytes() for n in names]), atol=1e-6)


def test_embed_stdin_numbers_lines(home: Path) -> None:
    found = succeed(home, "embed", "embedder", stdin="the cat\n\n  \nrain falls\r\n")
    lines = [json.loads(line) for line in found.stdout.splitlines()]
    assert [line["line"] for line in lines] == [1, 4]
    got = np.array([line["vector"] for line in lines], np.float32)
    np.testing.assert_allclose(got, vectors(home, ["the cat", "rain falls"]), atol=1e-6)
    assert "skipped line 2: empty" in found.stderr and "2 of 4 texts skipped" in found.stderr


def test_query_prints_nearest_with_cosine(home: Path) -> None:
    names, query = ("long.txt", "rain.txt", "cats.txt"), "the cat sat on the mat"
    lines = succeed(home, "embed", "embedder", *names, "--query", query, "-k", 2).stdout.splitlines()
    assert lines[0] == " 1.000  cats.txt" and len(lines) == 2
    texts = [(home / name).read_text() for name in names[:2]]
    best = (vectors(home, texts) @ vectors(home, [query])[0]).max()
    assert float(lines[1].split()[0]) == pytest.approx(float(best), abs=6e-4)
    stdin = "a cat\n" + "rain " * 90 + "\nrain falls"
    lines = succeed(home, "embed", "embedder", "-q", "rain falls", stdin=stdin).stdout.splitlines()
    assert lines[0] == " 1.000  3: rain falls" and len(lines) == 3
    assert any(line.endswith("...") and len(line) < 130 for line in lines)


def test_unreadable_files_are_listed_and_counted(home: Path) -> None:
    found = succeed(home, "embed", "embedder", "none.txt", "cats.txt", ".", "empty.txt")
    assert len(found.stdout.splitlines()) == 1
    assert "skipped file none.txt: No such file" in found.stderr
    assert "skipped file empty.txt: empty" in found.stderr and "3 of 4 texts skipped" in found.stderr


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["tokenizer", "cats.txt"], 2, "finder/tokenizer is of the kind tokenizer"),
        (["nothing", "cats.txt"], 1, "no artifact 'nothing'"),
        (["embedder", "none.txt"], 1, "no text to embed"),
        (["embedder"], 1, "no text to embed"),
        (["embedder", "cats.txt", "--query", " "], 2, "--query is empty"),
    ],
)
def test_embed_errors(words: list[str], code: int, message: str, home: Path) -> None:
    found = invoke(home, "embed", *words)
    assert found.exit_code == code and message in found.stderr and found.stdout == ""
