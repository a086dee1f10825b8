"""Records and producers that the tests of this room use; importable by a producer process."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Numbers:
    values: Annotated[NDArray[np.float64], "N"]
    label: NDArray[np.int64]


@dataclass
class Draws:
    """Random numbers, and the record's own place."""

    pause: float = 0.0

    def fill(self, slot: Any, weights: Any, rng: np.random.Generator) -> int:
        time.sleep(self.pause)
        slot.data.values[:] = rng.random(len(slot.data.values))
        slot.data.label[...] = slot.sequence
        return len(slot.data.values)


class Fails(Draws):
    def fill(self, slot: Any, weights: Any, rng: np.random.Generator) -> int:
        if slot.sequence == 2:
            raise ValueError("record two cannot be made")
        return super().fill(slot, weights, rng)


class WrongShape(Draws):
    def fill(self, slot: Any, weights: Any, rng: np.random.Generator) -> int:
        slot.data.values[:] = np.zeros(len(slot.data.values) + 1)
        return 0
