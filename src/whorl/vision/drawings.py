"""Drawn letters and shapes, each with its kind as label: grey or coloured pictures that follow from a seed.

A kind is a function of places (y, x) and of the weight of its lines. It returns about the distance to the ink in units of
the drawing's half height, at most 0 within. Size, place, rotation, weight, ink, paper and noise are random. Only sums,
products and square roots are computed, so that each platform draws the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whorl.data.images import Pixels

Plane = NDArray[np.floating[Any]]
NOISE = 0.025
LETTERS = {  # strokes through the points 1 to 9 of a grid, line by line
    "A": "74269 46", "C": "3179", "E": "3179 46", "F": "317 46", "H": "17 39 46", "I": "28", "K": "17 349",
    "L": "179", "M": "71539", "N": "7193", "O": "13971", "P": "71364", "S": "314697", "T": "13 28", "U": "1793",
    "V": "183", "W": "17593", "X": "19 37", "Y": "15 358", "Z": "1379",
}  # fmt: skip


def _letter(strokes: str, y: Plane, x: Plane, weight: float) -> Plane:
    nearest = np.full(np.broadcast_shapes(y.shape, x.shape), np.inf)
    for stroke in strokes.split():
        points = [divmod(int(digit) - 1, 3) for digit in stroke]
        for (y0, x0), (y1, x1) in pairwise((row - 1, column - 1) for row, column in points):
            dy, dx = y1 - y0, x1 - x0
            along = np.clip(((y - y0) * dy + (x - x0) * dx) / (dy * dy + dx * dx), 0, 1)
            nearest = np.minimum(nearest, _length(y - y0 - along * dy, x - x0 - along * dx))
    return np.asarray(nearest - weight)


def _length(y: Plane, x: Plane) -> Plane:
    return np.asarray(np.sqrt(y * y + x * x))


def _bar(y: Plane, x: Plane, width: float) -> Plane:
    return np.asarray(np.maximum(abs(y) - 1, abs(x) - width))


Kind = Callable[[Plane, Plane, float], Plane]
SHAPES: dict[str, Kind] = {
    "circle": lambda y, x, weight: _length(y, x) - 1,
    "square": lambda y, x, weight: _bar(y, x, 1),
    "triangle": lambda y, x, weight: np.maximum(y, 0.75**0.5 * abs(x) - y / 2) - 0.5,
    "cross": lambda y, x, weight: np.minimum(_bar(y, x, weight), _bar(x, y, weight)),
    "ring": lambda y, x, weight: abs(_length(y, x) - 1 + weight) - weight,
}
DRAWN: dict[str, Mapping[str, Kind]] = {
    "glyphs": {name: partial(_letter, strokes) for name, strokes in LETTERS.items()},
    "shapes": SHAPES,
}


def draw(kind: Kind, size: int, channels: int, rng: np.random.Generator) -> Pixels:
    """Return one picture uint8 [size, size, channels] of a kind."""
    radius = rng.uniform(0.24, 0.36) * size
    y, x = (np.arange(size) + 0.5 - rng.uniform(1.3 * radius, size - 1.3 * radius, 2)[:, None]) / radius
    tangent, weight = rng.uniform(-0.3, 0.3), rng.uniform(0.15, 0.3)
    cosine = 1 / np.sqrt(1 + tangent * tangent)
    y, x = y[:, None], x[None]
    beyond = kind(cosine * (y - tangent * x), cosine * (x + tangent * y), weight)
    share = np.clip(0.5 - beyond * radius, 0, 1)[..., None]
    image = share * rng.uniform(0.6, 1, channels) + (1 - share) * rng.uniform(0, 0.25)
    return to_pixels(image, rng)


def to_pixels(image: Plane, rng: np.random.Generator) -> Pixels:
    """Return uint8 [H, W, C] of values from 0 to 1, with noise."""
    noisy = image + rng.normal(0, NOISE, image.shape)
    return np.asarray(np.clip(noisy * 255 + 0.5, 0, 255), np.uint8)
