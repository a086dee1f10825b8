"""Drawn scenes with captions: two objects and their relation, as "a red circle left of a blue square".

112 captions: an ordered pair of 8 objects (4 colours, 2 shapes), and one of two relations. Several captions have the same
words in another order, so words alone do not decide a caption. Places, sizes, shades, background and noise are random.
"""

from __future__ import annotations

from itertools import permutations, product

import numpy as np

from whorl.data.images import Pixels
from whorl.vision.drawings import SHAPES, to_pixels

COLOURS = {
    "red": (0.9, 0.15, 0.1),
    "green": (0.1, 0.75, 0.2),
    "blue": (0.15, 0.25, 0.95),
    "yellow": (0.95, 0.85, 0.1),
}
RELATIONS = ("left of", "above")
OBJECTS = tuple(product(COLOURS, ("circle", "square")))
SCENES = tuple((r, a, b) for r in RELATIONS for a, b in permutations(OBJECTS, 2))
CAPTIONS = tuple(f"a {a[0]} {a[1]} {r} a {b[0]} {b[1]}" for r, a, b in SCENES)


def draw_scene(number: int, size: int, rng: np.random.Generator) -> Pixels:
    """Return an image of the scene `CAPTIONS[number]`: uint8 [size, size, 3]."""
    relation, *objects = SCENES[number]
    unit = size / 32  # the geometry is given for 32 pixels
    row, column = np.arange(size)[:, None], np.arange(size)
    image = np.full((size, size, 3), rng.uniform(0.3, 0.6))
    for (colour, shape), along in zip(objects, (rng.uniform(7, 9), rng.uniform(22, 24)), strict=True):
        across, radius = rng.uniform(13, 18), rng.uniform(5.5, 7.0) * unit
        x, y = (along, across) if relation == "left of" else (across, along)
        inside = SHAPES[shape]((row - y * unit) / radius, (column - x * unit) / radius, 0) <= 0
        image[inside] = np.array(COLOURS[colour]) * rng.uniform(0.75, 1.1)
    return to_pixels(image, rng)


def draw_scenes(numbers: list[int], size: int, rng: np.random.Generator) -> Pixels:
    """Return one image of each scene: uint8 [N, size, size, 3]."""
    return np.stack([draw_scene(number, size, rng) for number in numbers])
