"""Images as arrays: bytes of a file are decoded by Pillow, turned upright, flattened, and resized to a square.

    decode_image(data, ImageShape(size=32, channels=3))        -> uint8 [32, 32, 3]

The EXIF orientation is applied. Transparent pixels are composited onto white. 16-bit grey values are scaled to 8 bits. Of
an animation the first frame is used.

The subtle point is hostile files. A file of a few kB can declare 10^10 pixels, so the declared size is checked before the
pixels are decoded. Only the formats of `FORMATS` are tried: Pillow also reads formats that start other programs (EPS).
"""

from __future__ import annotations

import io
import warnings
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from whorl.data.quarantine import BadRecordError
from whorl.errors import ConfigError

Pixels = NDArray[np.uint8]  # [H, W, C]
Fit = Literal["crop", "pad", "stretch"]
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
MAX_PIXELS = 64_000_000  # 256 MB in four channels


class ImageShape(BaseModel):
    """The arrays that images are converted to: [size, size, channels].

    fit: "crop" keeps the largest square in the middle, "pad" adds white borders, "stretch" changes the aspect ratio.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    size: int = Field(ge=1, le=4096)
    channels: int = Field(ge=1)
    fit: Fit = "crop"
    resample: Literal["nearest", "bilinear", "bicubic", "lanczos"] = "bicubic"

    def check_channels(self, name: str) -> None:
        """Check that files can be converted.

        Raises:
            ConfigError: channels is neither 1 nor 3; `name` is that of the model.
        """
        if self.channels not in (1, 3):
            raise ConfigError(
                f"{name} takes images of {self.channels} channels",
                expected="1 (grey) or 3 (RGB): image files are converted to these",
                do="call the network from Python with tensors [N, C, H, W]",
            )


def import_pillow() -> Any:
    """Return the package PIL. Raises ConfigError: it is not installed."""
    try:
        import PIL.Image
        import PIL.ImageOps
    except ImportError as error:
        raise ConfigError(
            f"image files cannot be read: {error}",
            expected="the extra 'images'",
            do="pip install 'whorl[images]'",
        ) from error
    return PIL


def decode_image(data: bytes, shape: ImageShape, max_pixels: int = MAX_PIXELS) -> Pixels:
    """Return the pixels of an image file, uint8 [size, size, channels].

    Raises:
        BadRecordError: not_an_image, damaged (truncated), too_large (more than `max_pixels` pixels), or bad_channels.
        ConfigError: Pillow is not installed.
    """
    pil = import_pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # of Pillow about sizes, which are checked here, and about odd metadata
            image = pil.Image.open(io.BytesIO(data), formats=FORMATS)
            width, height = image.size
            if width * height > max_pixels:
                raise BadRecordError("too_large", "", f"{width} x {height} pixels, more than {max_pixels:,}")
            image = pil.ImageOps.exif_transpose(image)  # reads the pixels
            return _resized(pil, _flattened(pil, image, shape.channels), shape)
    except BadRecordError:
        raise
    except pil.UnidentifiedImageError as error:
        raise BadRecordError(
            "not_an_image", "", "its bytes begin as none of " + ", ".join(FORMATS)
        ) from error
    except pil.Image.DecompressionBombError as error:
        raise BadRecordError("too_large", "", str(error)) from error
    except (
        Exception
    ) as error:  # decoders raise OSError, SyntaxError, struct.error, IndexError and others for damage
        raise BadRecordError("damaged", "", str(error) or type(error).__name__) from error


def _flattened(pil: Any, image: Any, channels: int) -> Any:
    """Return a grey or RGB image of 8 bits."""
    if image.mode.startswith("I"):  # grey values of 16 bits, in some files as integers of 32
        values = np.asarray(image).astype(np.int64)
        if values.min() < 0 or values.max() > 0xFFFF:
            raise BadRecordError("bad_channels", "", f"grey values from {values.min()} to {values.max()}")
        image = pil.Image.fromarray((values >> 8).astype(np.uint8))
    elif image.mode == "F":
        raise BadRecordError("bad_channels", "", "floating-point grey values, not integers of 8 or 16 bits")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = pil.Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = pil.Image.alpha_composite(white, image)
    return image.convert("L" if channels == 1 else "RGB")


def _resized(pil: Any, image: Any, shape: ImageShape) -> Pixels:
    size = (shape.size, shape.size)
    method = pil.Image.Resampling[shape.resample.upper()]
    if shape.fit == "crop":
        image = pil.ImageOps.fit(image, size, method=method)
    elif shape.fit == "pad":
        image = pil.ImageOps.pad(image, size, method=method, color="white")
    else:
        image = image.resize(size, method)
    pixels = np.array(image, np.uint8)
    return pixels[:, :, None] if pixels.ndim == 2 else pixels
