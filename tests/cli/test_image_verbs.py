"""`whorl classify`, `whorl caption`, `whorl embed` on images: results, skipped files, errors that name the remedy."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.cli import invoke, refuse, succeed
from tests.support.images import CAPTIONS, encoded, half_dark, write_half_dark
from tests.support.tiny import make_byte_tokenizer, make_decoder
from tests.support.vision_tasks import caption_task, classifier_task, contrastive_task

from whorl.models import save_model
from whorl.store import Build, Store
from whorl.train.rows import train_rows
from whorl.vision.load import load_vision
from whorl.vision.model import VisionModel

LABELS = ",".join(CAPTIONS)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images, and a store with trained image models and a text model."""
    folder = tmp_path_factory.mktemp("home")
    torch.set_num_threads(1)
    labelled, captioned = (
        write_half_dark(folder / n, captions=n == "captioned", n=240) for n in ("labelled", "captioned")
    )
    made: dict[str, VisionModel] = {}
    for name, (task, model) in {
        "classifier": classifier_task(labelled, steps=120, lr=1e-2),
        "clip": contrastive_task(captioned, steps=80, lr=5e-3),
        "captioner": caption_task(captioned, steps=300, lr=5e-3),
    }.items():
        train_rows(task)
        made[name] = model
    store = Store(folder / ".whorl")
    store.make_folders()
    for name, model in made.items():
        with Build(
            store, kind="vision", name=f"pics/{name}", parents={}, config={"n": name}, version=1
        ) as build:
            model.save(build.path)
    with Build(store, kind="model", name="pics/words", parents={}, config={}, version=1) as build:
        save_model(make_decoder(), build.path)
        make_byte_tokenizer().save(build.path)
    rng = np.random.default_rng(9)
    for kind, name in enumerate(("top", "bottom", "left")):
        (folder / f"{name}.png").write_bytes(encoded(half_dark(kind, rng)))
        # 4 times as large, with transparency
        large = np.kron(half_dark(kind, rng), np.ones((4, 4, 1), np.uint8))
        (folder / f"{name}-large.png").write_bytes(encoded(np.dstack([large, np.full((32, 32), 255)])))
    good = (folder / "top.png").read_bytes()
    (folder / "cut.png").write_bytes(good[: len(good) // 2])
    (folder / "notes.png").write_text("no image")
    return folder


def test_classify_prints_classes_with_probabilities(home: Path) -> None:
    names = ["top.png", "bottom.png", "left-large.png"]
    lines = succeed(home, "classify", "classifier", *names).stdout.splitlines()
    assert lines[::4] == names
    assert [line.split()[1] for line in lines[1::4]] == ["top", "bottom", "left"]
    probabilities = np.array([float(line.split()[0]) for line in lines if line.startswith(" ")]).reshape(3, 3)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, atol=2e-3)
    assert (np.diff(probabilities, axis=1) <= 0).all()
    assert len(succeed(home, "classify", "classifier", "top.png", "-k", 1).stdout.splitlines()) == 2


def test_classify_is_zero_shot_with_labels(home: Path) -> None:
    names = ["top.png", "bottom.png", "left.png"]
    lines = succeed(home, "classify", "clip", *names, "--labels", LABELS, "--top", 1).stdout.splitlines()
    assert [line[9:] for line in lines[1::2]] == list(CAPTIONS)
    words = ",".join(text.removeprefix("a dark ") for text in CAPTIONS)
    lines = succeed(
        home, "classify", "clip", *names, "--labels", words, "--template", "a dark {}", "-k", 1
    ).stdout.splitlines()
    assert [f"a dark {line[9:]}" for line in lines[1::2]] == list(CAPTIONS)


def test_caption_prints_one_line_per_image(home: Path) -> None:
    assert succeed(home, "caption", "captioner", "top.png").stdout == f"{CAPTIONS[0]}\n"
    lines = succeed(home, "caption", "captioner", "bottom.png", "left-large.png").stdout.splitlines()
    assert lines == [f"bottom.png: {CAPTIONS[1]}", f"left-large.png: {CAPTIONS[2]}"]


def test_embed_writes_vectors_and_finds_images(home: Path) -> None:
    names = ["top.png", "cut.png", "left.png"]
    done = succeed(home, "embed", "clip", *names, "--out", "vectors.npy")
    sources = [json.loads(line) for line in done.stdout.splitlines()]
    assert sources == [{"row": 0, "file": "top.png"}, {"row": 1, "file": "left.png"}]
    assert "skipped cut.png: " in done.stderr and "1 of 3 files skipped" in done.stderr
    saved = np.load(home / "vectors.npy")
    assert saved.shape == (2, 8) and saved.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(saved, axis=1), 1, atol=1e-5)
    lines = succeed(home, "embed", "clip", "top.png", "left.png").stdout.splitlines()
    np.testing.assert_allclose([json.loads(line)["vector"] for line in lines], saved, atol=1e-6)
    query = succeed(home, "embed", "clip", "top.png", "bottom.png", "left.png", "-q", CAPTIONS[1], "-k", 1)
    assert query.stdout.split()[1] == "bottom.png"
    for name in ("classifier", "captioner"):
        succeed(home, "embed", name, "top.png", "--out", f"{name}.npy")
        assert np.load(home / f"{name}.npy").shape == (1, 16)


def test_saved_model_gives_equal_results(home: Path, tmp_path: Path) -> None:
    images = np.stack([half_dark(kind, np.random.default_rng(kind)) for kind in range(3)])
    for name in ("classifier", "clip", "captioner"):
        model = load_vision(Store(home / ".whorl").open(name).path)
        model.save(tmp_path / name)
        again = load_vision(tmp_path / name)
        np.testing.assert_array_equal(again.embed(images), model.embed(images))
        assert not again.network.training
    assert again.caption(images) == model.caption(images)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["classify", "words", "top.png"], 2, "pics/words is of the kind model"),
        (["caption", "words", "top.png"], 2, "whorl run classify-digits"),
        (["embed", "words", "top.png"], 2, "pics/words is of the kind model"),
        (["caption", "classifier", "top.png"], 2, "a classifier writes no captions"),
        (["classify", "captioner", "top.png"], 2, "the captioner has no classes"),
        (["classify", "clip", "top.png"], 2, '--labels "a cat,a dog"'),
        (["classify", "clip", "top.png", "--labels", "one"], 2, "and 1 are given"),
        (["classify", "clip", "top.png", "--labels", "a,,b"], 2, "has an empty label"),
        (["classify", "classifier", "top.png", "--labels", "a,b"], 2, "leave --labels out"),
        (["classify", "clip", "top.png", "--labels", "a,b", "--template", "x"], 2, "no place for the label"),
        (["embed", "classifier", "top.png", "--query", "x"], 2, "a classifier embeds no texts"),
        (["embed", "clip"], 2, "no file is given"),
        (["export", "clip", "new"], 2, "pics/clip was trained by Whorl"),
        (["embed", "clip", "top.png", "--out", "vectors.txt"], 2, "ends in .npy"),
        (["embed", "clip", "top.png", "--out", "v.npy", "-q", "x"], 2, "both given"),
    ],
)
def test_wrong_models_and_options_are_refused(words: list[str], code: int, message: str, home: Path) -> None:
    assert message in refuse(home, *words, code=code)


@pytest.mark.parametrize(
    ("verb", "model", "file", "message"),
    [
        ("classify", "classifier", "notes.png", "(not_an_image)"), ("caption", "captioner", "cut.png", "(damaged)"),
        ("embed", "clip", "none.png", "No such file"), ("embed", "clip", ".", "Is a directory"),
    ],
)  # fmt: skip
def test_file_that_is_no_image_is_named(verb: str, model: str, file: str, message: str, home: Path) -> None:
    error = refuse(home, verb, model, file, code=1)
    assert file in error and message in error and "save the image again" in error
    both = invoke(home, verb, model, file, "top.png")
    assert both.exit_code == 0 and f"skipped {file}" in both.stderr and "1 of 2 files skipped" in both.stderr


def test_damaged_model_is_refused(home: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from whorl.errors import CheckpointError

    model = load_vision(Store(home / ".whorl").open("classifier").path)
    model.save(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({n: t for n, t in weights.items() if n != "head.bias"}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"(?s)tensor 'head.bias' is missing.*\(3,\) by config.json"):
        load_vision(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot read an image model"):
        load_vision(tmp_path)
