"""`whorl embed` as a user meets it: vectors, the nearest, and what is passed over or refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from whorl.cli import build_app
from whorl.embedding.embedder import Embedder
from whorl.models.encoder import Encoder, EncoderConfig
from whorl.store import Store
from whorl.tokens.tokenizer import Tokenizer
from whorl.tracking.seeds import generator


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts, and a store with an (untrained) embedder and something else."""
    folder = tmp_path_factory.mktemp("home")
    texts = {
        "cats.txt": "the cat sat on the mat",
        "long.txt": "all work and no play " * 30,
        "rain.txt": "rain falls",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "empty.txt").write_text(" \n")
    (folder / "odd.bin").write_bytes(b"\xff\xfe\x00odd")
    words = Tokenizer.train(texts.values(), 300)
    shape = EncoderConfig(
        vocab_size=words.vocab_size, d_model=32, n_layers=1, n_heads=2, mlp_hidden=32, max_length=16
    )
    store = Store(folder / ".whorl")
    store.make_folders()
    with store.build(kind="embedder", name="finder/embedder", parents={}, config={}, version=1) as build:
        Embedder(Encoder(shape, generator(0, "weights")), words).save(build.path)
    with store.build(kind="tokenizer", name="finder/tokenizer", parents={}, config={}, version=1) as build:
        words.save(build.path)
    return folder


def whorl(home: Path, *words: object, stdin: str | bytes = "") -> Result:
    monkey = pytest.MonkeyPatch()
    with monkey.context() as inside:
        inside.chdir(home)
        return CliRunner().invoke(build_app(), ["embed", *map(str, words)], input=stdin)


def vectors(home: Path, texts: list[str | bytes]) -> np.ndarray:
    path = Store(home / ".whorl").open("embedder").path
    return Embedder.load(path, Tokenizer.load(path)).embed(texts)


def test_files_become_lines_of_json_with_the_librarys_vectors(home: Path) -> None:
    names = ["cats.txt", "long.txt", "odd.bin"]
    found = whorl(home, "embedder", *names)
    assert found.exit_code == 0, found.output
    lines = [json.loads(line) for line in found.stdout.splitlines()]
    assert [line["file"] for line in lines] == names
    got = np.array([line["vector"] for line in lines], np.float32)
    np.testing.assert_allclose(got, vectors(home, [(home / n).read_bytes() for n in names]), atol=1e-6)


def test_lines_of_standard_input_are_numbered_and_empty_ones_counted(home: Path) -> None:
    found = whorl(home, "embedder", stdin="the cat\n\n  \nrain falls\r\n")
    lines = [json.loads(line) for line in found.stdout.splitlines()]
    assert [line["line"] for line in lines] == [1, 4]
    got = np.array([line["vector"] for line in lines], np.float32)
    np.testing.assert_allclose(got, vectors(home, ["the cat", "rain falls"]), atol=1e-6)
    assert "passed over line 2: empty" in found.stderr and "2 of 4 texts passed over" in found.stderr


def test_the_nearest_come_first_with_their_cosines(home: Path) -> None:
    found = whorl(
        home, "embedder", "long.txt", "rain.txt", "cats.txt", "--query", "the cat sat on the mat", "-k", 2
    )
    lines = found.stdout.splitlines()
    assert lines[0] == " 1.000  cats.txt" and len(lines) == 2
    texts = [(home / name).read_text() for name in ("long.txt", "rain.txt")]
    best = max(float(v @ vectors(home, ["the cat sat on the mat"])[0]) for v in vectors(home, texts))
    assert float(lines[1].split()[0]) == pytest.approx(best, abs=6e-4)
    lines = whorl(
        home, "embedder", "-q", "rain falls", stdin="a cat\n" + "rain " * 90 + "\nrain falls"
    ).stdout.splitlines()
    assert lines[0] == " 1.000  3: rain falls" and len(lines) == 3
    assert any(line.endswith("...") and len(line) < 130 for line in lines)


def test_what_cannot_be_read_is_named_and_counted(home: Path) -> None:
    found = whorl(home, "embedder", "none.txt", "cats.txt", ".", "empty.txt")
    assert found.exit_code == 0 and len(found.stdout.splitlines()) == 1
    assert "passed over file none.txt: No such file" in found.stderr
    assert "passed over file empty.txt: empty" in found.stderr and "3 of 4 texts passed over" in found.stderr


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["tokenizer", "cats.txt"], 2, "finder/tokenizer is a tokenizer"),
        (["nothing", "cats.txt"], 1, "no artifact 'nothing'"),
        (["embedder", "none.txt"], 1, "there is no text to embed"),
        (["embedder"], 1, "there is no text to embed"),
        (["embedder", "cats.txt", "--query", " "], 2, "--query is empty"),
    ],
)
def test_mendable_errors_are_messages(words: list[str], code: int, message: str, home: Path) -> None:
    found = whorl(home, *words)
    assert found.exit_code == code and message in found.stderr and found.stdout == ""


def test_it_is_a_verb_of_the_command_line(home: Path) -> None:
    command = [sys.executable, "-m", "whorl.cli", "embed", "embedder", "--query", "rain", "-k", "1"]
    done = subprocess.run(command, cwd=home, input="cat\nrain\n", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout == " 1.000  2: rain\n", done.stderr
