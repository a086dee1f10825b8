"""`whorl quantize`: the artifact, its lineage, and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.cli import invoke, refuse, succeed
from tests.support.tiny import make_decoder, make_document

from whorl.models import load_model, save_model
from whorl.models.compression.quantize import QuantizationConfig
from whorl.store import Build, Store
from whorl.tokens.shards import write_shards
from whorl.tokens.tokenizer import Tokenizer

TEXT = "".join(f"def f{n}(x):\n    return x + {n * n}\n" for n in range(60))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with an untrained model and its token set, and a model without one."""
    folder = tmp_path_factory.mktemp("home")
    words = Tokenizer.train([TEXT], 300)
    store = Store(folder / ".whorl")
    store.make_folders()
    with Build(store, kind="tokens", name="run/tokens", parents={}, config={}, version=1) as build:
        write_shards([make_document(TEXT)], words, build.path, "train")
    tokens = build.artifact
    assert tokens is not None
    other = Tokenizer.train(["all other words"], 300)
    with Build(store, kind="tokenizer", name="other/tokenizer", parents={}, config={}, version=1) as build:
        other.save(build.path)
    parents = {"tokenizer": store.open("other/tokenizer")}
    with Build(store, kind="tokens", name="other/tokens", parents=parents, config={}, version=1) as build:
        write_shards([make_document(TEXT)], other, build.path, "train")
    model = make_decoder(vocab_size=words.vocab_size, d_model=64, n_kv_heads=2, head_dim=32, mlp_hidden=128)
    for name, parents in (("run/pretrain", {"tokens": tokens}), ("elsewhere/pretrain", {})):
        with Build(store, kind="model", name=name, parents=parents, config={}, version=1) as build:
            save_model(model, build.path)
            words.save(build.path)
    return folder


def test_quantize_makes_model_with_lineage(home: Path) -> None:
    words = ("quantize", "run/pretrain", "--scheme", "int4", "--calibrate", 4, "--head", "--ngram")
    assert "int4, groups of 64, calibrated" in succeed(home, *words).output
    store = Store(home / ".whorl")
    made, source = store.open("quantized/run-pretrain-int4-64"), store.open("run/pretrain")
    assert made.kind == "model" and made.parents["model"] == source.address
    assert made.parents["tokens"] == store.open("run/tokens").address
    assert made.files["model.safetensors"]["size"] < 0.4 * source.files["model.safetensors"]["size"]
    scheme = QuantizationConfig(format="int4", group_size=64, rounding="calibrated", head=True, ngram=True)
    assert load_model(made.path).quantization == scheme
    assert json.loads((made.path / "config.json").read_text())["quantization"]["group_size"] == 64
    assert "looked up" in succeed(home, *words).output
    assert "def " in succeed(home, "sample", made.name, "def ", "-n", 8, "--seed", 1).output
    assert "tokens: run/tokens" in succeed(home, "lineage", made.name).output


def test_quantize_to_nearest_needs_no_tokens(home: Path) -> None:
    succeed(home, "quantize", "elsewhere/pretrain", "--dynamic", "--name", "small one")
    model = load_model(Store(home / ".whorl").open("quantized/small-one").path)
    assert model.quantization == QuantizationConfig(dynamic=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run/tokens"], "run/tokens is of the kind tokens"),
        (["run/pretrain", "--scheme", "int3"], "--scheme int3"),
        (["run/pretrain", "--scheme", "int4", "--group", 7], "--group 7 --rounding nearest\n  expected: group"),
        (["run/pretrain", "--scheme", "int4", "--dynamic"], "dynamic needs one scale"),
        (["run/pretrain", "--group", 48], "group 48 does not divide the 64 columns of blocks.0.mixer.qkv.weight"),
        (["elsewhere/pretrain", "--calibrate", 4], "give one with --tokens"),
        (["run/pretrain", "--calibrate", 4, "--tokens", "elsewhere/pretrain"], "elsewhere/pretrain is of the kind model"),
        (["run/pretrain", "--calibrate", 4, "--tokens", "other/tokens"], "one tokenizer for both"),
        (["quantized/again"], "no artifact 'quantized/again'"),
    ],
)  # fmt: skip
def test_quantize_refuses_invalid_requests(home: Path, words: list[object], message: str) -> None:
    found = invoke(home, "quantize", *words)
    assert found.exit_code in (1, 2) and isinstance(found.exception, SystemExit) and message in found.output


def test_quantize_refuses_quantized_model(home: Path) -> None:
    succeed(home, "quantize", "run/pretrain", "--name", "once")
    assert "already quantized" in refuse(home, "quantize", "quantized/once", "--scheme", "int4")
