"""`whorl gen`: train, sample, compare, methods; the page in Chromium."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests.support.cli import invoke, refuse, succeed
from tests.support.images import encoded, half_dark, write_class_folders

from whorl.cli.jobs.gen import _recipe
from whorl.data.images import ImageShape, decode_image
from whorl.generative import measures
from whorl.generative.methods.registration import METHODS
from whorl.recipes import parse_recipe
from whorl.store import Store
from whorl.vision.config import ImagesConfig

QUICK = ("--steps", 20, "--set", "width=16", "--set", "depth=1", "--set", "batch_size=32")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose store has two models of a density, and one of digits."""
    pytest.importorskip("sklearn")
    folder = tmp_path_factory.mktemp("generative")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measures, "GROUP", 100)
        patch.setattr(measures, "LIKELIHOOD_ROWS", 20)
        succeed(folder, "gen", "train", "flow", "25-gaussians", *QUICK)
        succeed(folder, "gen", "train", "ddpm", "25-gaussians", *QUICK, "--set", "schedule=linear")
        succeed(folder, "gen", "train", "flow", "digits", *QUICK, "--set", "n_heads=2")
        succeed(folder, "gen", "train", "ae", "25-gaussians", *QUICK)
        succeed(folder, "gen", "train", "pix2pix", "digits", *QUICK, "--set", "n_heads=2")
    (folder / "grey.png").write_bytes(encoded(half_dark(0, np.random.default_rng(0), size=20)))
    (folder / "notes.png").write_text("no image")
    return folder


def test_model_of_digits_has_measures_and_a_lineage(trained: Path) -> None:
    store = Store(trained / ".whorl")
    found = store.open("flow-digits")
    saved = json.loads(found.file("measures.json").read_text())
    names = [m["name"] for m in saved["measures"]]
    assert {"Frechet", "classes held", "nearest"} <= {*names} and saved["data"] == "digits"
    frechet = saved["measures"][names.index("Frechet")]
    assert frechet["value"] > frechet["floor"] > 0 and "classifier" in frechet["note"]
    assert [store.find(a).kind for a in found.parents.values()] == ["images", "vision"]
    page = found.file("page.html").read_text()
    assert all(view in page for view in ("Samples by step", "Interpolations", "Guidance against diversity"))
    assert "Particles along the flow" in store.open("flow-25-gaussians").file("page.html").read_text()


@pytest.mark.parametrize("data", ["digits", "glyphs", "shapes", "scenes"])
def test_pictures_with_classes_get_a_classifier(data: str) -> None:
    recipe = parse_recipe(_recipe("flow", data), "test")
    assert recipe.steps[data].config == ImagesConfig.model_validate({"source": data})
    classifier = None if data == "scenes" else f"{data}-classifier"
    assert recipe.steps["flow"].parents.get("classifier") == classifier


def test_sample_writes_a_picture(trained: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    words = (
        "gen",
        "sample",
        "flow-digits",
        "-n",
        6,
        "--steps",
        2,
        "--label",
        "7",
        "--guidance",
        2,
        "--out",
        "a.png",
    )
    assert "wrote a.png: 6 samples" in succeed(trained, *words).stdout
    assert image.open(trained / "a.png").size == (3 * 34, 2 * 34)
    succeed(trained, *words[:-1], "b.png")
    assert (trained / "a.png").read_bytes() == (trained / "b.png").read_bytes(), "the seed decides"
    succeed(trained, *words[:-1], "c.png", "--seed", 1)
    assert (trained / "a.png").read_bytes() != (trained / "c.png").read_bytes()


def test_sample_decodes_a_picture(trained: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    words = ("gen", "sample", "pix2pix-digits", "--picture", "grey.png", "--out", "decoded.png")
    assert "wrote decoded.png: 1 sample in" in succeed(trained, *words).stdout
    found = np.asarray(image.open(trained / "decoded.png"))[:32, :64]
    assert (found[:, 16:32] == 127).all() or (found[:, 16:32] == 128).all()  # hidden
    shape = ImageShape(size=8, channels=1)
    given = decode_image((trained / "grey.png").read_bytes(), shape)[:, :4, 0]
    assert np.array_equal(found[::4, :16:4, 0], given)
    assert np.ptp(found[:, 32:]) > 0


def test_compare_prints_a_table_and_writes_a_page(trained: Path) -> None:
    printed = succeed(trained, "gen", "compare", "flow-25-gaussians", "ddpm-25-gaussians").stdout
    rows = [line.split()[0] for line in printed.splitlines() if line[:4] in ("flow", "ddpm", "real")]
    assert rows == ["flow-25-gaussians", "ddpm-25-gaussians", "real"] and "bits per dimension" in printed
    message = refuse(trained, "gen", "compare", "flow-25-gaussians", "flow-digits")
    assert "is a model of digits" in message and "models of the same data" in message


def test_model_without_samples_shows_reconstructions(trained: Path) -> None:
    found = Store(trained / ".whorl").open("ae-25-gaussians")
    page = found.file("page.html").read_text()
    assert "Reconstructions" in page and "reconstruction_mse" in found.summary["headline"]
    assert found.summary["measures"] == {} and "sliced Wasserstein" not in page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("train", "flow", "8-gausians"), "8-gaussians"),
        (("train", "flow", "glyph"), "did you mean 'glyphs'"),
        (("train", "flow", "photos"), "or a folder of pictures"),
        (("train", "ddpm", "8-gaussians", "--set", "prediction=w"), "ddpm: prediction is wrong: 'w'"),
        (("sample", "ae-25-gaussians"), "no distribution to draw from"),
        (("sample", "pix2pix-digits"), "give one with --picture"),
        (("sample", "flow-digits", "--picture", "grey.png"), "flow decodes no pictures"),
        (("sample", "ae-25-gaussians", "--picture", "grey.png"), "rows of 25-gaussians are no pictures"),
        (("sample", "pix2pix-digits", "--picture", "grey.png", "--label", "7"), "takes no --steps"),
        (("compare", "ae-25-gaussians"), "draws no samples"),
        (("train", "flwo", "8-gaussians"), "unknown method 'flwo'"),
        (("train", "flow", "8-gaussians", "--set", "widht=3"), "did you mean 'width'"),
        (("train", "flow", "8-gaussians", "--set", "width"), "--set FIELD=VALUE"),
        (("train", "flow", "8-gaussians", "--set", "seed=3"), "settings.seed has no effect"),
        (("sample", "flow-digits", "--label", "x"), "no class 'x'"),
        (("sample", "flow-digits", "--guidance", 3), "without a label"),
        (("sample", "flow-25-gaussians", "--label", "1"), "trained without"),
        (("sample", "flow-digits", "--sampler", "dimm"), "ddim"),
        (("sample", "digits"), "a generative model"),
        (("sample", "flow-digits", "--steps", 1, "-n", 1, "--out", "."), "cannot be written"),
        (("methods", "dppm"), "unknown method 'dppm'"),
    ],
)
def test_gen_refuses(trained: Path, words: tuple[object, ...], message: str) -> None:
    assert message in refuse(trained, "gen", *words)


def test_too_few_pictures_are_refused_before_training(tmp_path: Path) -> None:
    write_class_folders(tmp_path / "few", n=2)
    words = ("gen", "train", "flow", "few", *QUICK, "--set", "batch_size=2")
    result = invoke(tmp_path, *words, "--set", "patch=8", "--set", "n_heads=2")
    assert result.exit_code == 1 and "expected: at least 4 and 2" in result.stderr, result.stderr
    assert "loss" not in result.stdout + result.stderr


@pytest.mark.parametrize(("file", "message"), [("notes.png", "not_an_image"), ("none.png", "No such file")])
def test_broken_picture_is_named(trained: Path, file: str, message: str) -> None:
    error = refuse(trained, "gen", "sample", "pix2pix-digits", "--picture", file, code=1)
    assert file in error and message in error and "save the image again" in error


def test_methods_are_listed_with_their_settings(tmp_path: Path) -> None:
    listed = succeed(tmp_path, "gen", "methods").stdout.splitlines()
    assert [line.split()[0] for line in listed] == [*METHODS] and all(
        len(line.split()) > 3 for line in listed
    )
    assert "schedule" in succeed(tmp_path, "gen", "methods", "ddpm").stdout
