"""The Python API: `whorl.load`, `whorl.run`, `whorl.train`."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.notes import write_notes

import whorl
from whorl.api.data import _documents
from whorl.api.jobs import _fields, _toml
from whorl.errors import ConfigError, DataError, StoreError

TEXTS = [f"def add_{n}(a, b):\n    return a + b + {n}\n" * 3 for n in range(30)]
SMALL: dict[str, Any] = {"width": 32, "depth": 1, "steps": 12, "batch_size": 4, "seq_len": 32, "quiet": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> whorl.Model:
    folder = tmp_path_factory.mktemp("api") / "model"
    trained = whorl.train(TEXTS, out=folder, vocab_size=300, **SMALL)
    assert isinstance(trained, whorl.Model)
    return trained


def test_import_loads_no_dependency() -> None:
    code = "import sys, whorl; print({'torch', 'numpy', 'pydantic', 'typer'} & sys.modules.keys())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "set()"


def test_train_is_a_package_and_a_function() -> None:
    import whorl.train.config

    assert callable(whorl.train)
    assert whorl.train.config.OptimConfig


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'tarin'"):
        whorl.tarin  # noqa: B018


def test_train_writes_a_folder_that_load_opens(model: whorl.Model, tmp_path: Path) -> None:
    whorl.train(TEXTS, out=tmp_path / "m", vocab_size=300, **SMALL)
    again = whorl.load(tmp_path / "m", context=np.int64(64))
    assert isinstance(again, whorl.Model) and again.log_probs("").shape == (0,)
    first, second = (m.network.state_dict() for m in (model, again))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert (tmp_path / "m" / "metrics.jsonl").read_text().count("\n") >= 2


def test_generate_same_seed_same_text(model: whorl.Model) -> None:
    first = model.generate("def add_", max_tokens=12, seed=3)
    assert first == model.generate("def add_", max_tokens=12, seed=3)
    assert first == "".join(model.stream("def add_", max_tokens=12, seed=3))
    others = model.generate(["def add_", "return"], max_tokens=12, seed=3)
    assert others[0] == first and len(others) == 2


def test_generate_leaves_out_stop_text(model: whorl.Model) -> None:
    whole = model.generate("def add_", max_tokens=40, temperature=0)
    stop = whole[3:5]
    assert model.generate("def add_", max_tokens=40, temperature=0, stop=stop) == whole[: whole.index(stop)]


def test_abandoned_stream_frees_the_engine(model: whorl.Model) -> None:
    pieces = model.stream("def", max_tokens=50, seed=1)
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    model.engine.step()
    assert not model.engine.busy


def test_log_probs_match_a_plain_forward(model: whorl.Model) -> None:
    text = TEXTS[3]
    found = model.log_probs(text)
    ids = torch.tensor([[model.tokenizer.bos_id, *model.tokenizer.encode(text).tolist()]])
    with torch.inference_mode():
        logits = model.network.logits(model.network(ids)).float()[0, :-1]
    wanted = torch.log(torch.softmax(logits.double(), -1))[torch.arange(len(ids[0]) - 1), ids[0, 1:]]
    assert found.shape == (len(ids[0]) - 1,)
    torch.testing.assert_close(found.double(), wanted, atol=1e-3, rtol=0)
    assert -found.sum().item() / math.log(2) / len(text) < 8
    assert [len(x) for x in model.log_probs([text, "a"])] == [len(found), 1]


def test_embed_returns_unit_vectors(model: whorl.Model) -> None:
    vectors = model.embed(["def a", "return b"])
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(2), atol=1e-5, rtol=0)
    torch.testing.assert_close(model.embed("def a"), vectors[0])


def test_chat_answers_text_and_messages(model: whorl.Model) -> None:
    options = {"max_tokens": 8, "seed": 2}
    assert model.chat("hello", **options) == model.chat([{"role": "user", "content": "hello"}], **options)


def test_train_on_files_and_on_ids(tmp_path: Path) -> None:
    for n, text in enumerate(TEXTS):
        (tmp_path / f"{n}.py").write_text(text)
    trained = whorl.train(f"{tmp_path}/*.py", out=tmp_path / "files", vocab_size=300, **SMALL)
    assert isinstance(trained, whorl.Model)
    ids, sizes = np.arange(2000) % 7, {"vocab_size": np.int32(7), "steps": np.int64(60), "seed": np.int64(0)}
    network = whorl.train(ids, out=tmp_path / "ids", **{**SMALL, **sizes})
    row = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0, 1, 2]])
    guess = network.logits(network(row))[0, -1].argmax()
    assert guess == 3  # the sequence counts modulo 7


def test_run_returns_artifacts(tmp_path: Path) -> None:
    recipe = write_notes(tmp_path, 12) / "tiny.toml"
    recipe.write_text(f'about = "a small corpus"\nsteps.ingest = {{ sources = ["{tmp_path}/notes"] }}')
    result = whorl.run(recipe, store=str(tmp_path / "store"), quiet=True, ingest={"include": ["1*.txt"]})
    assert result.artifacts["ingest"].kind == "documents"
    assert result.artifacts["ingest"].config["include"] == ["1*.txt"]


IDS = torch.tensor([1, 9] * 20)
LONG = "a long text without an end " * 30
REFUSED: list[tuple[Any, type[Exception], str]] = [
    (lambda m, p: m.generate("a", max_token=3), ConfigError, "max_token is not an option of generation"),
    (lambda m, p: m.generate("a", temperature=-1), ConfigError, "temperature is -1"),
    (lambda m, p: m.generate("a", max_tokens=0), ConfigError, "max_tokens is 0"),
    (lambda m, p: m.generate("a", max_tokens="many"), ConfigError, "max_tokens is 'many'"),
    (lambda m, p: m.generate("a", seed="x"), ConfigError, "seed is 'x'"),
    (lambda m, p: m.generate("a", stop=3), ConfigError, "stop is 3"),
    (lambda m, p: m.generate("a", stop=""), ConfigError, "an empty string would end"),
    (lambda m, p: m.generate("\ud800"), ConfigError, "prompts is '.+ud800'"),
    (lambda m, p: m.embed("\ud800"), ConfigError, "texts is '.+ud800'"),
    (lambda m, p: m.generate(3), ConfigError, "prompts is 3"),
    (lambda m, p: m.generate(["a", None]), ConfigError, "prompts is None"),
    (lambda m, p: next(m.stream(b"a")), ConfigError, "prompt is b'a'"),
    (lambda m, p: m.embed(5), ConfigError, "texts is 5"),
    (lambda m, p: m.embed(["a", ""]), ConfigError, "texts is ''"),
    (lambda m, p: m.embed("word " * 400), ConfigError, "at most 128, the model's context"),
    (lambda m, p: m.log_probs([3]), ConfigError, "texts is 3"),
    (lambda m, p: m.log_probs("word " * 400), ConfigError, "at most 128"),
    (lambda m, p: m.chat([]), ConfigError, "messages is \\[\\]"),
    (lambda m, p: m.chat(["hello"]), ConfigError, "a message is 'hello'"),
    (lambda m, p: m.chat([{"role": "user"}]), ConfigError, "a mapping with role and content"),
    (lambda m, p: whorl.load(p / "none", store=str(p)), StoreError, "none"),
    (lambda m, p: whorl.load("x" * 5000), ConfigError, "name_or_path is 'xxx"),
    (lambda m, p: whorl.load(3), ConfigError, "name_or_path is 3"),
    (lambda m, p: whorl.load(""), ConfigError, "name_or_path is ''"),
    (lambda m, p: whorl.load(p, max_sequences=3), ConfigError, "max_sequences is not a setting of"),
    (lambda m, p: whorl.load(p, max_num_seqs=0), ConfigError, "max_num_seqs is 0"),
    (lambda m, p: whorl.load(p, context="long"), ConfigError, "context is 'long'"),
    (lambda m, p: whorl.load(p, context=True), ConfigError, "context is True"),
    (lambda m, p: whorl.load("x/y", store="x" * 5000), ConfigError, "store is 'xxx"),
    (lambda m, p: whorl.run("quickstart", store=3), ConfigError, "store is 3"),
    (lambda m, p: whorl.run("quickstart", until=3), ConfigError, "until is 3"),
    (lambda m, p: whorl.run("x" * 300), ConfigError, "recipe is 'xxx"),
    (lambda m, p: whorl.run(5), ConfigError, "recipe is 5"),
    (lambda m, p: whorl.run("quickstart", pretrain=3), ConfigError, "pretrain is 3"),
    (lambda m, p: whorl.run("quickstart", pretrain={"seed": object()}), ConfigError, "a setting of pretrain"),
    (lambda m, p: whorl.train([], out=p), DataError, "holds no text"),
    (lambda m, p: whorl.train([""], out=p), DataError, "holds no text"),
    (lambda m, p: whorl.train("nots", out=p), DataError, "unknown source 'nots'"),
    (lambda m, p: whorl.train(p / "nots", out=p), DataError, "unknown source .*nots"),
    (lambda m, p: whorl.train(Path("x" * 300), out=p), ConfigError, "data is"),
    (lambda m, p: whorl.train(["\ud800"], out=p), ConfigError, "data is '.+ud800'"),
    (lambda m, p: whorl.train(LONG, out="\ud800"), ConfigError, "out is '.+ud800'"),
    (lambda m, p: whorl.train(None, out=p), ConfigError, "data is None"),
    (lambda m, p: whorl.train([1, 2], out=p), ConfigError, "data is 1"),
    (lambda m, p: whorl.train(IDS / 2, vocab_size=9, out=p), ConfigError, "a tensor of torch.float32"),
    (lambda m, p: whorl.train(IDS[:0], vocab_size=9, out=p), DataError, "fewer than 2 token ids"),
    (lambda m, p: whorl.train(LONG, out=3), ConfigError, "out is 3"),
    (lambda m, p: whorl.train(LONG, out=__file__), ConfigError, "out is .*a folder that can be made"),
    (lambda m, p: whorl.train(LONG, out=p, width="w"), ConfigError, "width is 'w'"),
    (lambda m, p: whorl.train(LONG, out=p, width=16), ConfigError, "width is 16"),
    (lambda m, p: whorl.train(LONG, out=p, steps=0), ConfigError, "steps is 0"),
    (lambda m, p: whorl.train(LONG, out=p, tokenizer=3), ConfigError, "tokenizer is 3"),
    (lambda m, p: whorl.train(LONG, out=p, tokenizer=p / "none"), DataError, "cannot be read as a tokenizer"),
    (lambda m, p: whorl.train(["text " * 50], out=p, step=3), ConfigError, "did you mean 'steps'"),
    (lambda m, p: whorl.train(["text " * 50], out=p, seq_len="x"), ConfigError, "x"),
    (lambda m, p: whorl.train(IDS, vocab_size=5, out=p), DataError, "ids from 1 to 9.*0 to 4"),
]


@pytest.mark.parametrize(("call", "error", "words"), REFUSED, ids=[words[:20] for *_, words in REFUSED])
def test_wrong_argument_is_refused(
    model: whorl.Model, tmp_path: Path, call: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=f"(?s){words}"):
        call(model, tmp_path)


def test_train_tells_texts_from_paths(tmp_path: Path) -> None:
    (tmp_path / "my notes").mkdir()
    (tmp_path / "my notes" / "a.txt").write_text("words of a file " * 9)
    named = [f"{tmp_path}/my notes", f"{tmp_path}/my n*/*.txt", tmp_path / "my notes" / "a.txt"]
    texts = [LONG, "word", "How are you?", "[a] * b"]  # the first is longer than a file's name
    found = [document.text for document in _documents([*named, *texts])]
    assert found == ["words of a file " * 9] * 3 + texts
    assert [document.text for document in _documents(LONG)] == [LONG]
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    (tmp_path / "b.csv").write_text("text,y\none,2\ntwo,3\n")
    assert [document.text for document in _documents(tmp_path / "a.csv")] == ["x,y\n1,2\n"]
    assert [document.text for document in _documents(tmp_path / "b.csv")] == ["one", "two"]


def test_nested_settings_and_paths_reach_a_recipe(tmp_path: Path) -> None:
    given = {"sources": [str(tmp_path)], "licences": {}, "data": {"seq_len": 5, "deep": {"x": [1]}}}
    flat = {"sources": [str(tmp_path)], "licences": {}, "data.seq_len": 5, "data.deep.x": [1]}
    assert _fields("plan", given) == flat
    assert [_toml("plan", v) for v in (np.int64(3), np.float64(0.5), np.arange(2))] == ["3", "0.5", "[0, 1]"]
    with pytest.raises(ConfigError, match=r"plam"):
        whorl.run("quickstart", store=str(tmp_path), plam={"data": {"seq_len": 5}})
