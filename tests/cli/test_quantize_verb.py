"""`whorl quantize` as a user meets it: a model of its own with lineage, read back by all; what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from whorl.cli import build_app
from whorl.corpus import Document
from whorl.models import Decoder, DecoderConfig, load_model, save_model
from whorl.models.quantization.weights import QuantizationConfig
from whorl.store import Store
from whorl.tokens.shards import write_shards
from whorl.tokens.tokenizer import Tokenizer

TEXT = "".join(f"def f{n}(x):\n    return x + {n * n}\n" for n in range(60))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with an untrained model, the token set it belongs to, and a model of nowhere."""
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


def whorl(home: Path, *words: object) -> Result:
    with pytest.MonkeyPatch().context() as inside:
        inside.chdir(home)
        return CliRunner().invoke(build_app(), [*map(str, words)])


def test_a_model_in_few_bits_is_a_model_with_lineage(home: Path) -> None:
    done = whorl(home, "quantize", "run/pretrain", "--scheme", "int4", "--calibrate", 4, "--head", "--ngram")
    assert done.exit_code == 0, done.output
    assert "int4, groups of 64, calibrated" in done.output
    store = Store(home / ".whorl")
    made, source = store.open("quantized/run-pretrain-int4-64"), store.open("run/pretrain")
    assert made.kind == "model" and made.parents["model"] == source.address
    assert made.parents["tokens"] == store.open("run/tokens").address
    assert made.files["model.safetensors"]["size"] < 0.4 * source.files["model.safetensors"]["size"]
    scheme = QuantizationConfig(format="int4", group_size=64, rounding="calibrated", head=True, ngram=True)
    assert load_model(made.path).quantization == scheme
    assert json.loads((made.path / "config.json").read_text())["quantization"]["group"] == 64
    assert "looked up" in whorl(
        home, "quantize", "run/pretrain", "--scheme", "int4", "--calibrate", 4, "--head", "--ngram"
    ).output  # fmt: skip
    written = whorl(home, "sample", made.name, "def ", "-n", 8, "--seed", 1)
    assert written.exit_code == 0 and "def " in written.output
    assert "tokens: run/tokens" in whorl(home, "lineage", made.name).output


def test_rounding_to_the_nearest_needs_no_text(home: Path) -> None:
    done = whorl(home, "quantize", "elsewhere/pretrain", "--dynamic", "--name", "small one")
    assert done.exit_code == 0, done.output
    model = load_model(Store(home / ".whorl").open("quantized/small-one").path)
    assert model.quantization == QuantizationConfig(dynamic=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run/tokens"], "run/tokens is a tokens"),
        (["run/pretrain", "--scheme", "int3"], "--scheme int3"),
        (["run/pretrain", "--scheme", "int4", "--dynamic"], "dynamic needs one scale a row"),
        (["run/pretrain", "--group", 48], "group 48 does not divide the 64 columns of blocks.0.attention.qkv.weight"),
        (["elsewhere/pretrain", "--calibrate", 4], "name one with --tokens"),
        (["run/pretrain", "--calibrate", 4, "--tokens", "elsewhere/pretrain"], "--tokens elsewhere/pretrain is a model"),
        (["quantized/again"], "no artifact 'quantized/again'"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said_in_one_message(home: Path, words: list[object], message: str) -> None:
    found = whorl(home, "quantize", *words)
    assert found.exit_code in (1, 2) and message in found.output
    assert "Traceback" not in found.output


def test_a_quantised_model_is_not_quantised_again(home: Path) -> None:
    assert whorl(home, "quantize", "run/pretrain", "--name", "once").exit_code == 0
    found = whorl(home, "quantize", "quantized/once", "--scheme", "int4")
    assert found.exit_code == 2 and "already quantized" in found.output
