"""Splits of images from scikit-learn's digits, from drawn scenes, letters or shapes, or from files.

Files are a folder, with a subfolder per class if there are classes, or a JSONL or Parquet file whose records have an image
and a caption or a label. The image is a path (relative to the file), bytes, or {"bytes": ..., "path": ...} as in the data
sets of Hugging Face. Unreadable images go to the quarantine.
"""

from __future__ import annotations

import hashlib
import posixpath
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from whorl.data.files import is_url, open_file
from whorl.data.formats import FORMATS, format_name, open_format
from whorl.data.formats.image_folder import list_files
from whorl.data.forms import unknown_form
from whorl.data.images import ImageShape, Pixels, decode_image
from whorl.data.labelled import held_out
from whorl.data.quarantine import BadRecordError, Quarantine
from whorl.data.record_fields import label_field
from whorl.errors import ConfigError, DataError
from whorl.tracking.seeds import numpy_rng
from whorl.vision.config import ImagesConfig
from whorl.vision.drawings import DRAWN, draw
from whorl.vision.image_set import ImageSplit
from whorl.vision.scenes import CAPTIONS, draw_scenes

LONGEST_FILE = 64 << 20  # bytes


@dataclass(frozen=True)
class LabeledImage:
    """One image with a label or a caption; the other is ""."""

    pixels: Pixels
    label: str
    caption: str


def image_shape(config: ImagesConfig) -> ImageShape:
    """Return the shape of the arrays of a set."""
    return ImageShape(size=config.side, channels=config.depth, fit=config.fit)


def make_splits(
    config: ImagesConfig, quarantine: Quarantine, on_image: Callable[[int], None] = lambda n: None
) -> tuple[dict[str, ImageSplit], tuple[str, ...]]:
    """Return the splits (`train`, `test`; of scenes also `new_captions`), and the names of the classes, if any.

    Args:
        on_image: called with the number of images so far.

    Raises:
        DataError: a class without images, or no usable image.
        ConfigError: a package is not installed.
    """
    if config.source == "digits":
        return digits(config)
    if config.source == "scenes":
        return scenes(config), ()
    if config.source in DRAWN:
        return drawings(config)
    return files(config, quarantine, on_image)


def digits(config: ImagesConfig) -> tuple[dict[str, ImageSplit], tuple[str, ...]]:
    """Return scikit-learn's 1,797 digits. Raises ConfigError: it is not installed."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ConfigError(
            f"the digits cannot be read: {error}",
            expected="the extra 'images'",
            do="pip install 'whorl[images]'",
        ) from error
    found = load_digits()
    images = np.asarray(found.images * (255 / 16) + 0.5, np.uint8)[..., None]  # values from 0 to 16
    labels = np.asarray(found.target, np.int64)
    order = numpy_rng(config.seed, "images", "split").permutation(len(images))
    n_test = round(len(images) * config.test_fraction)
    rows = {"train": np.sort(order[n_test:]), "test": np.sort(order[:n_test])}
    splits = {name: ImageSplit(images[chosen], labels=labels[chosen]) for name, chosen in rows.items()}
    return splits, tuple(str(digit) for digit in range(10))


def scenes(config: ImagesConfig) -> dict[str, ImageSplit]:
    """Return drawn scenes: `test` has the captions of `train` with new images, `new_captions` the other captions."""
    rng = numpy_rng(config.seed, "images", "scenes")
    order = rng.permutation(len(CAPTIONS))
    new, known = order[: config.held_out_captions], order[config.held_out_captions :]
    found = {}
    for name, captions, n in (
        ("train", known, config.train_scenes),
        ("test", known, config.test_scenes),
        ("new_captions", new, config.test_scenes),
    ):
        numbers = [int(captions[i % len(captions)]) for i in range(n)]
        found[name] = ImageSplit(
            draw_scenes(numbers, config.side, rng), captions=[CAPTIONS[number] for number in numbers]
        )
    return found


def drawings(config: ImagesConfig) -> tuple[dict[str, ImageSplit], tuple[str, ...]]:
    """Return drawn letters or shapes, of each class as many (or one more), and the names of the classes."""
    rng, kinds = numpy_rng(config.seed, "images", config.source), DRAWN[config.source]
    found = {}
    for name, n in (("train", config.train_scenes), ("test", config.test_scenes)):
        labels = np.arange(n) % len(kinds)
        images = [draw([*kinds.values()][label], config.side, config.depth, rng) for label in labels]
        found[name] = ImageSplit(np.stack(images), labels=labels)
    return found, tuple(kinds)


def files(
    config: ImagesConfig, quarantine: Quarantine, on_image: Callable[[int], None] = lambda n: None
) -> tuple[dict[str, ImageSplit], tuple[str, ...]]:
    """Return the images of files; raises as `make_splits`."""
    given = {"train": config.path, **({"test": config.test_path} if config.test_path else {})}
    found: dict[str, list[LabeledImage]] = {}
    for name, path in given.items():
        found[name] = []
        for image in read_images(path, config, quarantine):
            found[name].append(image)
            on_image(sum(map(len, found.values())))
        if not found[name]:
            raise quarantine.no_records_error(Path(path), "images, with a label or a caption each")
    every = [image for images in found.values() for image in images]
    has_labels, has_captions = (all(getattr(image, name) for image in every) for name in ("label", "caption"))
    if not has_labels and not has_captions and any(image.label or image.caption for image in every):
        raise DataError(
            f"some records of {config.path} have only a label and others only a caption",
            expected="the same fields in all records", do="write them to two files",
        )  # fmt: skip
    classes = _classes(config, found) if has_labels else ()
    if "test" not in found:
        images = found["train"]
        in_test = held_out(
            [image.label for image in images], [image.pixels.tobytes() for image in images], config.test_fraction,
            config.seed, "images",
        )  # fmt: skip
        found["test"] = [image for image, out in zip(found["train"], in_test, strict=True) if out]
        found["train"] = [image for image, out in zip(found["train"], in_test, strict=True) if not out]
    numbers = {name: number for number, name in enumerate(classes)}
    splits = {}
    for name, images in found.items():
        if not images:
            raise DataError(
                f"the split {name} of {config.path} has no images",
                do="add images that differ (equal ones are in one split), or change test_fraction",
            )
        splits[name] = ImageSplit(
            np.stack([image.pixels for image in images]),
            labels=np.array([numbers[image.label] for image in images], np.int64) if classes else None,
            captions=[image.caption for image in images] if has_captions else None,
        )
    return splits, classes


def read_images(path: str, config: ImagesConfig, quarantine: Quarantine) -> Iterator[LabeledImage]:
    """Yield the usable images of a folder or a file in order; the others go to the quarantine."""
    shape = image_shape(config)
    for number, record in raw_records(path, config):
        try:
            if isinstance(record, BadRecordError):
                raise record
            data, label, caption = _fields(record, path, config)
            pixels = decode_image(data, shape, config.max_pixels)
        except BadRecordError as error:
            quarantine.add(*_located(path, number, record, config, error))
            continue
        quarantine.accepted += 1
        yield LabeledImage(pixels, label, caption)


def raw_records(path: str, config: ImagesConfig) -> Iterator[tuple[int, Mapping[str, Any] | BadRecordError]]:
    """Yield (number from 1, record or its error) of a folder, or of a JSONL or Parquet file.

    Raises:
        DataError: `path` is neither.
    """
    if not is_url(path) and Path(path).expanduser().is_dir():
        path, reader = str(Path(path).expanduser()), FORMATS.get("image_folder")(longest=LONGEST_FILE)
    elif format_name(path) != "text":
        reader = open_format(path, longest=LONGEST_FILE)
    elif is_url(path):
        reader = FORMATS.get("image_folder")(longest=LONGEST_FILE)
    else:
        exists = Path(path).expanduser().exists()
        raise DataError(
            f"{path} {'holds no records of images' if exists else 'does not exist'}",
            expected="a folder with one folder of images per class, or a .jsonl or .parquet file",
        )
    for record in reader.records(path):
        yield record.number, record.value


def content_hash(config: ImagesConfig) -> str:
    """Return a hash of the images, labels and captions of the files, as bytes."""
    digest = hashlib.blake2b(digest_size=16)
    for path in (config.path, config.test_path):
        for _, record in raw_records(path, config) if path else ():
            parts: tuple[bytes, ...]
            try:
                if isinstance(record, BadRecordError):
                    raise record
                data, label, caption = _fields(record, path, config)
                parts = (data, label.encode(), caption.encode("utf-8", "surrogatepass"))
            except BadRecordError as error:
                parts = (str(error).encode("utf-8", "surrogatepass"),)
            for part in parts:
                digest.update(len(part).to_bytes(8, "big") + part)
        digest.update(b"|")
    return digest.hexdigest()


def _fields(record: Mapping[str, Any], path: str, config: ImagesConfig) -> tuple[bytes, str, str]:
    """Return (bytes of the image, label, caption) of a record. Raises BadRecordError: a field is missing or wrong."""
    label, caption = record.get(config.label_field), record.get(config.caption_field)
    if label is None and caption is None and "file" not in record:  # of a folder without classes
        image = config.image_field
        raise unknown_form(record, "images", [(image, config.label_field), (image, config.caption_field)])
    label = "" if label is None else label_field(record, config.label_field)
    if caption is not None and not isinstance(caption, str):
        raise BadRecordError("bad_field", config.caption_field, f"is a {type(caption).__name__}, not a text")
    if caption is not None and not caption.strip():
        raise BadRecordError("empty", config.caption_field, "only white space")
    data = _image_bytes(record.get(config.image_field), path, config.image_field)
    return data, label, "" if caption is None else caption.strip()


def _image_bytes(value: Any, path: str, field: str) -> bytes:
    if isinstance(value, Mapping):  # an image of Hugging Face's `datasets`
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str) or not value:
        raise BadRecordError(
            "bad_field", field, f"is a {type(value).__name__}, not a path or the bytes of a file"
        )
    address = value if is_url(value) else posixpath.join(posixpath.dirname(path), value)
    try:
        with open_file(address) as stream:
            data = stream.read(LONGEST_FILE + 1)
    except OSError as error:
        raise BadRecordError("unreadable", field, f"{address}: {error.strerror or error}") from error
    if len(data) > LONGEST_FILE:
        raise BadRecordError("too_large", field, f"{address} has more than {LONGEST_FILE} bytes")
    return data


def _located(
    path: str,
    number: int,
    record: Mapping[str, Any] | BadRecordError,
    config: ImagesConfig,
    error: BadRecordError,
) -> tuple[str, int, BadRecordError]:
    """Return (file, number, error), with the name of the image."""
    if isinstance(record, BadRecordError):
        return path, number, error
    if "file" in record:  # of a folder
        return posixpath.join(path, str(record["file"])), number, error
    name = record.get(config.image_field)
    detail = f"{name}: {error.detail}" if isinstance(name, str) and not error.field else error.detail
    return path, number, BadRecordError(error.reason, error.field or config.image_field, detail)


def _classes(config: ImagesConfig, found: Mapping[str, list[LabeledImage]]) -> tuple[str, ...]:
    """Return the names of the classes, sorted; none where all images are of one.

    Raises:
        DataError: a class without usable images, or one of `test_path` that is not in `path`.
    """
    classes = tuple(sorted({image.label for image in found["train"]}))
    if not is_url(config.path) and (folder := Path(config.path).expanduser()).is_dir():
        for name in sorted(
            {name.split("/")[0] for name, _ in list_files(str(folder)) if "/" in name} - set(classes)
        ):
            raise DataError(
                f"no file of the class folder {folder / name} is a usable image", expected="at least one",
                do="replace its files, or remove the folder; the quarantine lists the reasons",
            )  # fmt: skip
    if new := {image.label for image in found.get("test", [])} - set(classes):
        raise DataError(
            f"{config.test_path} has the class {min(new)!r}",
            expected=f"the classes of {config.path}: {', '.join(classes)}",
        )
    return classes if len(classes) > 1 else ()
