"""Image files as arrays: formats, orientation, transparency, sizes, damage; and folders of classes."""

from __future__ import annotations

import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.support.images import encoded, write_class_folders

from whorl.data.formats import FORMATS
from whorl.data.images import ImageShape, decode_image
from whorl.data.quarantine import BadRecordError
from whorl.errors import ConfigError, DataError

RGB, GREY = ImageShape(size=8, channels=3), ImageShape(size=8, channels=1)
PATTERN = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)


def refused(data: bytes, **options: int) -> BadRecordError:
    with pytest.raises(BadRecordError) as error:
        decode_image(data, RGB, **options)
    return error.value


@pytest.mark.parametrize("suffix", ["PNG", "BMP", "TIFF", "PPM"])
def test_lossless_formats_keep_every_pixel(suffix: str) -> None:
    np.testing.assert_array_equal(decode_image(encoded(PATTERN, suffix), RGB), PATTERN)


def test_grey_becomes_rgb_and_rgb_becomes_grey() -> None:
    grey = PATTERN[..., 0]
    found = decode_image(encoded(grey), RGB)
    np.testing.assert_array_equal(found, np.repeat(grey[..., None], 3, axis=2))
    weights = PATTERN @ np.array([0.299, 0.587, 0.114])  # ITU-R 601, as Pillow documents
    found = decode_image(encoded(PATTERN), GREY)
    assert found.shape == (8, 8, 1)
    np.testing.assert_allclose(found[..., 0], weights, atol=1)


def test_exif_orientation_is_applied() -> None:
    image = Image.fromarray(PATTERN)
    exif = image.getexif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise to show it upright
    found = decode_image(encoded(image, "PNG", exif=exif), RGB)
    np.testing.assert_array_equal(found, np.rot90(PATTERN, -1))


def test_transparent_pixels_become_white() -> None:
    alpha = np.full((8, 8, 1), 255, np.uint8)
    alpha[:4] = 0
    found = decode_image(encoded(np.concatenate([PATTERN, alpha], axis=2)), RGB)
    assert (found[:4] == 255).all()
    np.testing.assert_array_equal(found[4:], PATTERN[4:])
    palette = Image.new("P", (8, 8))
    palette.putpalette([10, 20, 30, 40, 50, 60])
    found = decode_image(encoded(palette, "GIF", transparency=0), RGB)
    assert (found == 255).all()


def test_16_bit_grey_is_scaled() -> None:
    values = np.linspace(0, 65535, 64).reshape(8, 8).astype(np.uint16)
    found = decode_image(encoded(Image.fromarray(values)), GREY)
    np.testing.assert_array_equal(found[..., 0], values >> 8)


@pytest.mark.parametrize("fit", ["crop", "pad", "stretch"])
def test_sizes_become_squares(fit: str) -> None:
    wide = np.zeros((8, 16, 3), np.uint8)
    wide[:, 4:12] = 100  # the middle square
    found = decode_image(encoded(wide), RGB.model_copy(update={"fit": fit}))
    assert found.shape == (8, 8, 3)
    if fit == "crop":
        assert (found == 100).all()
    elif fit == "pad":
        assert (found[0] == 255).all() and (found[-1] == 255).all() and abs(int(found[4, 4, 0]) - 100) < 5
    else:
        assert (found[:, 0] < 20).all() and (abs(found[:, 4].astype(int) - 100) < 5).all()
    assert decode_image(encoded(np.full((1, 1, 3), 7)), RGB).min() == 7


def test_text_is_no_image() -> None:
    assert refused(b"a text, not a picture").reason == "not_an_image"
    assert refused(b"").reason == "not_an_image"
    assert refused(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n").reason == "not_an_image"


def test_truncated_file_is_damaged() -> None:
    big = np.random.default_rng(1).integers(0, 256, (64, 64, 3), np.uint8)
    for suffix in ("PNG", "JPEG", "WEBP", "BMP"):
        data = encoded(big, suffix)
        assert refused(data[: len(data) // 2]).reason == "damaged", suffix


def png_of(width: int, height: int) -> bytes:
    """A PNG of a few bytes that declares a size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(100)))


def test_decompression_bomb_is_refused_before_decoding() -> None:
    for side in (9_000, 60_000):  # below and above the limit of Pillow
        error = refused(png_of(side, side))
        assert error.reason == "too_large", side
    error = refused(encoded(PATTERN), max_pixels=63)
    assert error.reason == "too_large" and "8 x 8 pixels, more than 63" in error.detail


def test_floating_point_pixels_are_refused() -> None:
    image = Image.fromarray(np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8))
    assert refused(encoded(image, "TIFF")).reason == "bad_channels"


def test_model_of_other_channels_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"(?s)imported/sat takes images of 4 channels.*1 \(grey\) or 3"):
        ImageShape(size=8, channels=4).check_channels("imported/sat")


def test_missing_pillow_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIL", "PIL.Image", "PIL.ImageOps"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"(?s)extra 'images'.*pip install 'whorl\[images\]'"):
        decode_image(b"", RGB)


def test_image_folder_yields_files_with_classes(tmp_path: Path) -> None:
    folder = write_class_folders(tmp_path / "shapes", n=2)
    (folder / "top" / ".hidden").write_bytes(b"x")
    (folder / "stray.png").write_bytes(b"x")
    reader = FORMATS.get("image_folder")()
    records = [*reader.records(str(folder))]
    assert [r.number for r in records] == [*range(1, 8)]
    good = [r.value for r in records if not isinstance(r.value, BadRecordError)]
    assert [(v["file"], v["label"]) for v in good][:3] == [
        ("bottom/0.png", "bottom"), ("bottom/1.png", "bottom"), ("left/0.png", "left"),
    ]  # fmt: skip
    assert good[0]["image"] == (folder / "bottom" / "0.png").read_bytes()
    (bad,) = [r.value for r in records if isinstance(r.value, BadRecordError)]
    assert bad.detail == "stray.png is in no class folder"
    blocks = [*reader.blocks(str(folder), 1)]
    again = [r for b in blocks for r in reader.records(str(folder), b.start, b.stop)]
    assert [*map(str, again)] == [*map(str, records)]


def test_image_folder_reads_fsspec_addresses(tmp_path: Path) -> None:
    folder = write_class_folders(tmp_path / "shapes", n=2)
    reader = FORMATS.get("image_folder")()
    local, url = ([r.value for r in reader.records(where)] for where in (str(folder), f"file://{folder}"))
    assert local == url


def test_empty_class_folder_is_named(tmp_path: Path) -> None:
    folder = write_class_folders(tmp_path / "shapes", n=1)
    (folder / "right").mkdir()
    with pytest.raises(DataError, match=r"(?s)shapes/right is empty.*add images of this class"):
        [*FORMATS.get("image_folder")().records(str(folder))]
    with pytest.raises(DataError, match="is no folder"):
        [*FORMATS.get("image_folder")().records(str(folder / "top" / "0.png"))]
