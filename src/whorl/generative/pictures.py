"""Samples as a picture: pictures in a grid, samples of the plane as a histogram."""

from __future__ import annotations

import math
import struct
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from whorl.data.images import Pixels
from whorl.files import write_output
from whorl.generative.data import DataInfo, to_pixels

SIDE = 256  # of a histogram, in pixels
PAPER, INK = (252, 252, 250), (15, 106, 115)


def draw_rows(rows: Tensor, info: DataInfo, columns: int = 0) -> Pixels:
    """Return uint8 [H, W, 3] of rows [N, *shape]. columns: of a grid of pictures; 0: about as many as rows."""
    return grid(to_pixels(rows), columns) if info.is_pictures else histogram(rows, info.limit)


def grid(pictures: Pixels, columns: int = 0) -> Pixels:
    """Return a grid uint8 [H, W, 3] of pictures uint8 [N, h, w, C] with a gap, small ones enlarged."""
    n, height, width, channels = pictures.shape
    columns = columns or math.ceil(math.sqrt(n))
    scale, lines = max(1, 32 // height), math.ceil(n / columns)
    shown = np.broadcast_to(pictures, (n, height, width, 3)) if channels == 1 else pictures
    shown = shown.repeat(scale, axis=1).repeat(scale, axis=2)
    height, width = height * scale + 2, width * scale + 2
    out = np.full((lines * height, columns * width, 3), PAPER, np.uint8)
    for i, picture in enumerate(shown):
        top, left = i // columns * height, i % columns * width
        out[top : top + height - 2, left : left + width - 2] = picture
    return out


def histogram(rows: Tensor, limit: float) -> Pixels:
    """Return the density of rows [N, 2] between -limit and limit as uint8 [SIDE, SIDE, 3]; y grows upwards."""
    places = ((rows / limit + 1) / 2 * (SIDE // 4)).long()
    inside = ((places >= 0) & (places < SIDE // 4)).all(1)
    flat = places[inside, 1] * (SIDE // 4) + places[inside, 0]
    counts = torch.bincount(flat, minlength=(SIDE // 4) ** 2).float().view(1, 1, SIDE // 4, SIDE // 4)
    levels = F.interpolate(counts, scale_factor=4, mode="nearest")[0, 0].flip(0).sqrt()
    share = (levels / levels.max().clamp_min(1)).numpy()[..., None]
    return (share * INK + (1 - share) * PAPER).astype(np.uint8)


def write_png(path: Path, pixels: Pixels) -> None:
    """Write pixels uint8 [H, W, 3] to a file. Raises ConfigError: it cannot be written."""
    write_output(path, encode_png(pixels))


def encode_png(pixels: Pixels) -> bytes:
    """Return a PNG file of pixels uint8 [H, W, 3]."""
    height, width, _ = pixels.shape
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(lines.tobytes())), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)
