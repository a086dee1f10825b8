"""Records and producers for tests; importable by a producer process."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from whorl.slots import Spec


@dataclass(frozen=True)
class Numbers:
    values: Annotated[NDArray[np.float64], "N"]
    label: NDArray[np.int64]


SPEC = Spec.from_dataclass(Numbers, N=5)


@dataclass
class Draws:
    """Writes random numbers and the record's number."""

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


class WrongType(Draws):
    def fill(self, slot: Any, weights: Any, rng: np.random.Generator) -> int:
        slot.data.values[:] = np.arange(5)  # integers are valid
        slot.data.label[...] = 0.5
        return 0


@dataclass
class Acts:
    """Writes one weight of its network, which equals the weights' version by construction."""

    pause: float = 0.0

    def fill(self, slot: Any, weights: Any, rng: np.random.Generator) -> int:
        import torch

        if not hasattr(self, "net"):
            self.net = torch.nn.Linear(300, 300)
        weights.load_into(self.net)
        both = torch.cat([self.net.weight.flatten(), self.net.bias]).detach()
        time.sleep(self.pause)
        slot.data.values[:] = float(both[0])
        slot.data.label[...] = int((both == both[0]).all())  # 0 after a partial update
        return 1
