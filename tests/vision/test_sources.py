"""Sets of images from digits, drawn scenes, folders, JSONL and Parquet."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError
from tests.support.images import encoded, half_dark, write_class_folders
from tests.support.recipes.align_steps import write_jsonl

from whorl.data.images import ImageShape
from whorl.data.labelled import held_out
from whorl.data.quarantine import Quarantine
from whorl.errors import ConfigError, DataError
from whorl.vision.config import ImagesConfig
from whorl.vision.image_set import ImageSet, ImageSplit, write_image_set
from whorl.vision.scenes import CAPTIONS, draw_scenes
from whorl.vision.sources import content_hash, make_splits


def splits_of(**settings: Any) -> tuple[dict[str, ImageSplit], tuple[str, ...], Quarantine]:
    quarantine = Quarantine()
    return *make_splits(ImagesConfig(**{"size": 8, **settings}), quarantine), quarantine


def rows(split: ImageSplit) -> set[bytes]:
    return {image.tobytes() for image in split.images}


def test_digits_are_split_by_seed() -> None:
    pytest.importorskip("sklearn")
    splits, classes, _ = splits_of(source="digits")
    train, test = splits["train"], splits["test"]
    assert classes == tuple("0123456789") and (len(train), len(test)) == (1438, 359)
    assert train.images.shape[1:] == (8, 8, 1) and train.images.max() == 255 and train.labels is not None
    other = splits_of(source="digits", seed=1)[0]
    assert rows(other["test"]) != rows(test)
    np.testing.assert_array_equal(splits_of(source="digits")[0]["train"].images, train.images)


def test_scenes_hold_out_captions_and_match_their_words() -> None:
    splits, classes, _ = splits_of(source="scenes", size=32, train_scenes=200, test_scenes=40)
    texts = {name: set(split.captions or ()) for name, split in splits.items()}
    assert classes == () and len(texts["train"]) == 92 and texts["test"] <= texts["train"]
    assert len(texts["new_captions"]) == 20 and not texts["new_captions"] & texts["train"]
    assert len(set(CAPTIONS)) == 112
    number = CAPTIONS.index("a red circle left of a blue square")
    image = draw_scenes([number] * 50, 32, np.random.default_rng(0)).mean(axis=0)
    assert image[15, 8].argmax() == 0 and image[15, 23].argmax() == 2
    assert (
        image[10:12, 18:20, 2].mean() - image[10:12, 3:5, 0].mean() > 40
    )  # a corner, and outside of a circle


@pytest.mark.parametrize(("source", "n", "channels"), [("glyphs", 20, 1), ("shapes", 5, 3)])
def test_drawings_follow_the_seed_and_show_their_class(source: str, n: int, channels: int) -> None:
    settings = {"source": source, "size": 16, "channels": channels, "train_scenes": 1200, "test_scenes": 100}
    splits, classes, _ = splits_of(**settings)
    train, test = splits["train"], splits["test"]
    assert len({*classes}) == n and train.images.shape == (1200, 16, 16, channels)
    assert train.labels is not None and test.labels is not None and np.ptp(np.bincount(train.labels)) == 0
    np.testing.assert_array_equal(splits_of(**settings)[0]["test"].images, test.images)
    assert not rows(splits_of(**settings, seed=1)[0]["train"]) & rows(train) and not rows(test) & rows(train)
    centred = []  # without the random place: the middle of the ink, by its moments
    for images in (train.images, test.images):
        ink = np.maximum(images.astype(float).mean(-1) - np.median(images, (1, 2)).mean(-1)[:, None, None], 0)
        place = np.arange(16)
        middle = [(ink * p).sum((1, 2)) / ink.sum((1, 2)) for p in (place[:, None], place)]
        shifted = [
            np.roll(i, (8 - round(y), 8 - round(x)), (0, 1)) for i, y, x in zip(ink, *middle, strict=True)
        ]
        flat = np.stack(shifted).reshape(len(ink), -1)
        centred.append(flat / np.linalg.norm(flat, axis=1, keepdims=True))
    nearest = (centred[1] @ centred[0].T).argmax(1)
    accuracy = (train.labels[nearest] == test.labels).mean()
    assert accuracy > 0.7, accuracy  # by chance: 0.05 and 0.2


def test_folder_is_split_within_each_class(tmp_path: Path) -> None:
    folder = write_class_folders(tmp_path / "shapes", n=10)
    (folder / "top" / "copy.png").write_bytes((folder / "top" / "0.png").read_bytes())
    splits, classes, _ = splits_of(path=str(folder))
    assert classes == ("bottom", "left", "top")
    assert np.bincount(splits["test"].labels if splits["test"].labels is not None else []).min() >= 2
    assert len(splits["train"]) + len(splits["test"]) == 31
    assert not rows(splits["train"]) & rows(splits["test"])  # a copy is never in both


def test_bad_files_of_a_folder_are_quarantined_by_name(tmp_path: Path) -> None:
    folder = write_class_folders(tmp_path / "shapes")
    good = (folder / "top" / "0.png").read_bytes()
    (folder / "top" / "cut.png").write_bytes(good[:80])
    (folder / "left" / "notes.txt").write_text("left")
    _, _, quarantine = splits_of(path=str(folder))
    assert quarantine.summary() == {"accepted": 18, "damaged": 1, "not_an_image": 1}
    assert [r.file for r in quarantine] == [f"{folder}/left/notes.txt", f"{folder}/top/cut.png"]


def test_class_without_usable_images_is_named(tmp_path: Path) -> None:
    folder = write_class_folders(tmp_path / "shapes")
    (folder / "right").mkdir()
    (folder / "right" / "0.png").write_text("no image")
    with pytest.raises(
        DataError, match=r"(?s)class folder .*shapes/right is a usable image.*replace its files"
    ):
        splits_of(path=str(folder))


@pytest.mark.parametrize("folder", ["", "cats"])
def test_folder_without_classes_has_images_without_labels(tmp_path: Path, folder: str) -> None:
    (tmp_path / "photos" / folder).mkdir(parents=True)
    write_images(tmp_path / "photos" / folder)
    splits, classes, quarantine = splits_of(path=str(tmp_path / "photos"), test_fraction=0.34)
    assert classes == () and quarantine.accepted == 6 and splits["train"].labels is None
    assert (len(splits["train"]), len(splits["test"])) == (4, 2)
    images = write_image_set(tmp_path, splits, classes, ImageShape(size=8, channels=3))
    with pytest.raises(
        ConfigError, match="classifier needs labels, and the images have no labels of two classes"
    ):
        images.need("labels", "classifier")


def write_images(folder: Path, n: int = 6) -> list[str]:
    rng = np.random.default_rng(3)
    for i in range(n):
        (folder / f"{i}.png").write_bytes(encoded(half_dark(i % 3, rng)))
    return [f"{i}.png" for i in range(n)]


def test_jsonl_reads_paths_relative_to_the_file(tmp_path: Path) -> None:
    names = write_images(tmp_path)
    records: list[Any] = [{"image": name, "caption": f" image {name} "} for name in names]
    records += [{"image": "none.png", "caption": "x"}, {"image": "0.png"}, {"image": 3, "caption": "x"}]
    records += [{"image": "0.png", "caption": " "}, "not json", {"image": "pairs.jsonl", "caption": "x"}]
    write_jsonl(tmp_path / "pairs.jsonl", records)
    splits, classes, quarantine = splits_of(path=str(tmp_path / "pairs.jsonl"), test_fraction=0.34)
    assert classes == () and (len(splits["train"]), len(splits["test"])) == (4, 2)
    captions = [*(splits["train"].captions or ()), *(splits["test"].captions or ())]
    assert sorted(captions) == [f"image {name}" for name in names]
    reasons = ["unreadable", "unknown_shape", "bad_field", "empty", "bad_json", "not_an_image"]
    assert [(r.line, r.reason) for r in quarantine] == [*enumerate(reasons, 7)]
    assert (
        "none.png: No such file" in str(next(iter(quarantine)))
        and "pairs.jsonl: " in [*quarantine][-1].detail
    )


def test_parquet_reads_bytes_with_labels(tmp_path: Path) -> None:
    names = write_images(tmp_path, 12)
    images = [{"bytes": (tmp_path / name).read_bytes(), "path": name} for name in names]

    def write(path: Path, chosen: Iterable[int]) -> None:
        chosen = [*chosen]
        table = {"image": [images[i] for i in chosen], "label": [i % 3 for i in chosen]}
        pq.write_table(pa.table(table), path)

    write(tmp_path / "a.parquet", range(9))
    write(tmp_path / "b.parquet", range(9, 12))
    given = {"path": str(tmp_path / "a.parquet"), "test_path": str(tmp_path / "b.parquet")}
    splits, classes, _ = splits_of(**given)
    assert classes == ("0", "1", "2") and [len(s) for s in splits.values()] == [9, 3]
    assert splits["test"].labels is not None and splits["test"].labels.tolist() == [0, 1, 2]
    pq.write_table(pa.table({"image": [images[0]], "label": [7]}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"(?s)b.parquet has the class '7'.*0, 1, 2"):
        splits_of(**given)


def test_unusable_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"(?s)none does not exist.*\.jsonl or \.parquet"):
        splits_of(path=str(tmp_path / "none"))
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(DataError, match="holds no records of images"):
        splits_of(path=str(tmp_path / "a.txt"))
    write_jsonl(tmp_path / "a.jsonl", [{"image": "none.png", "label": "a"}])
    with pytest.raises(DataError, match=r"(?s)a.jsonl has no usable record: unreadable 1.*none.png"):
        splits_of(path=str(tmp_path / "a.jsonl"))
    write_jsonl(tmp_path / "a.jsonl", [{"image": "equal.png", "label": label} for label in "aab"])
    (tmp_path / "equal.png").write_bytes(encoded(np.full((8, 8, 3), 9)))
    with pytest.raises(DataError, match="equal ones are in one split"):
        splits_of(path=str(tmp_path / "a.jsonl"))
    write_images(tmp_path, 2)
    write_jsonl(tmp_path / "a.jsonl", [{"image": "0.png", "label": "a"}, {"image": "1.png", "caption": "b"}])
    with pytest.raises(DataError, match="only a label and others only a caption"):
        splits_of(path=str(tmp_path / "a.jsonl"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "must be given together"), ({"source": "scenes", "path": "x"}, "must be given together"),
        ({"source": "digits", "size": 16}, "grey images of 8 x 8"),
        ({"source": "scenes", "size": 8}, "too small"), ({"source": "glyphs", "size": 8}, "too small"),
        ({"source": "scenes", "channels": 2}, "channels"),
        ({"source": "scenes", "channels": 1}, "are coloured"), ({"source": "shape"}, "'scenes', 'glyphs' or 'shapes'"),
    ],
)  # fmt: skip
def test_contradictory_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ImagesConfig(**settings)


def test_content_hash_follows_the_bytes(tmp_path: Path) -> None:
    names = write_images(tmp_path)
    path = tmp_path / "pairs.jsonl"
    write_jsonl(path, [{"image": name, "caption": name} for name in names])
    config = ImagesConfig(path=str(path))
    before = content_hash(config)
    assert content_hash(config) == before
    (tmp_path / "0.png").write_bytes((tmp_path / "1.png").read_bytes())
    assert content_hash(config) != before


def test_image_set_is_read_back(tmp_path: Path) -> None:
    splits, classes, _ = splits_of(path=str(write_class_folders(tmp_path / "shapes")))
    found = write_image_set(tmp_path, splits, classes, ImageShape(size=8, channels=3))
    again = ImageSet(tmp_path)
    assert again.info == found.info and again.classes == classes
    np.testing.assert_array_equal(again.split("test").images, splits["test"].images)
    mean = splits["train"].images.reshape(-1, 3).mean(axis=0) / 255
    np.testing.assert_allclose(again.info.preprocessing.mean, mean, atol=1e-6)
    with pytest.raises(DataError, match=r"(?s)no split 'dev'.*train, test"):
        again.split("dev")
    with pytest.raises(
        ConfigError, match=r"(?s)clip needs captions, and the images have labels only.*caption_field"
    ):
        again.need("captions", "clip")
    with pytest.raises(DataError, match=r"image_set\.json"):
        ImageSet(tmp_path / "shapes")


@pytest.mark.parametrize(
    ("pixels", "label", "message"),
    [
        (np.uint8, 2, r"(?s)train has the label 2.*0 to 1, for a, b"), (np.uint8, -1, "has the label -1"),
        (np.float32, 0, r"(?s)train are float32.*uint8"),
    ],
)  # fmt: skip
def test_arrays_out_of_range_are_refused(pixels: Any, label: int, message: str, tmp_path: Path) -> None:
    split = ImageSplit(np.zeros((3, 8, 8, 1), pixels), labels=np.array([0, label, 1]))
    with pytest.raises(DataError, match=message):
        write_image_set(tmp_path, {"train": split}, ("a", "b"), ImageShape(size=8, channels=1))


def test_no_class_is_held_out_whole() -> None:
    labels = ["a"] * 20 + ["b"]
    contents = [bytes([n]) for n in range(20)]
    for copied in contents:  # the only row of "b" is a copy of a row of "a"
        found = held_out(labels, [*contents, copied], 0.5, 0, "images")
        assert not found[-1] and 8 <= found.sum() <= 10
