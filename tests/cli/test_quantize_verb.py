"""`whorl quantize`: the artifact, its lineage, and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.support.cli import invoke

from whorl.corpus import Document
from whorl.models import Decoder, DecoderConfig, load_model, save_model
from whorl.models.quantization.weights import QuantizationConfig
from whorl.store import Store
from whorl.tokens.shards import write_shards
from whorl.tokens.tokenizer import Tokenizer

TEXT = "".join(f"def f{n}(x):\n    return x + {n * n}\n" for n in range(60))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with an untrained model and its token set, and a model without one."""
    folder = tmp_path_factory.mktemp("home")
    words = Tokenizer.train([TEXT], 300)
    document = Document("a", "here", "a.py", None, 0, TEXT, len(TEXT), None)
    store = Store(folder / ".whorl")
    store.make_folders()
    with store.build(kind="tokens", name="run/tokens", parents={}, config={}, version=1) as build:
        write_shards([document], words, build.path, "train")
    tokens = build.artifact
    assert tokens is not None
    shape = DecoderConfig(
        vocab_size=words.vocab_size, d_model=64, n_layers=2, n_heads=2, n_kv_heads=2, head_dim=32, mlp_hidden=128,
        ngram_buckets=64,
    )  # fmt: skip
    model = Decoder(shape, torch.Generator().manual_seed(0))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    for name, parents in (("run/pretrain", {"tokens": tokens}), ("elsewhere/pretrain", {})):
        with store.build(kind="model", name=name, parents=parents, config={}, version=1) as build:
            save_model(model, build.path)
            words.save(build.path)
    return folder


def test_quantize_makes_model_with_lineage(home: Path) -> None:
    done = invoke(home, "quantize", "run/pretrain", "--scheme", "int4", "--calibrate", 4, "--head", "--ngram")
    assert done.exit_code == 0, done.output
    assert "int4, groups of 64, calibrated" in done.output
    store = Store(home / ".whorl")
    made, source = store.open("quantized/run-pretrain-int4-64"), store.open("run/pretrain")
    assert made.kind == "model" and made.parents["model"] == source.address
    assert made.parents["tokens"] == store.open("run/tokens").address
    assert made.files["model.safetensors"]["size"] < 0.4 * source.files["model.safetensors"]["size"]
    scheme = QuantizationConfig(format="int4", group_size=64, rounding="calibrated", head=True, ngram=True)
    assert load_model(made.path).quantization == scheme
    assert json.loads((made.path / "config.json").read_text())["quantization"]["group_size"] == 64
    assert "looked up" in invoke(
        home, "quantize", "run/pretrain", "--scheme", "int4", "--calibrate", 4, "--head", "--ngram"
    ).output  # fmt: skip
    written = invoke(home, "sample", made.name, "def ", "-n", 8, "--seed", 1)
    assert written.exit_code == 0 and "def " in written.output
    assert "tokens: run/tokens" in invoke(home, "lineage", made.name).output


def test_quantize_to_nearest_needs_no_tokens(home: Path) -> None:
    done = invoke(home, "quantize", "elsewhere/pretrain", "--dynamic", "--name", "small one")
    assert done.exit_code == 0, done.output
    model = load_model(Store(home / ".whorl").open("quantized/small-one").path)
    assert model.quantization == QuantizationConfig(dynamic=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run/tokens"], "run/tokens is a tokens"),
        (["run/pretrain", "--scheme", "int3"], "--scheme int3"),
        (["run/pretrain", "--scheme", "int4", "--dynamic"], "dynamic needs one scale"),
        (["run/pretrain", "--group", 48], "group 48 does not divide the 64 columns of blocks.0.attention.qkv.weight"),
        (["elsewhere/pretrain", "--calibrate", 4], "give one with --tokens"),
        (["run/pretrain", "--calibrate", 4, "--tokens", "elsewhere/pretrain"], "--tokens elsewhere/pretrain is a model"),
        (["quantized/again"], "no artifact 'quantized/again'"),
    ],
)  # fmt: skip
def test_quantize_refuses_invalid_requests(home: Path, words: list[object], message: str) -> None:
    found = invoke(home, "quantize", *words)
    assert found.exit_code in (1, 2) and message in found.output
    assert "Traceback" not in found.output


def test_quantize_refuses_quantized_model(home: Path) -> None:
    assert invoke(home, "quantize", "run/pretrain", "--name", "once").exit_code == 0
    found = invoke(home, "quantize", "quantized/once", "--scheme", "int4")
    assert found.exit_code == 2 and "already quantized" in found.output
