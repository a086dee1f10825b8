"""The record and the producer of ring.py, in a module that the producer process can import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Bytes:
    values: Annotated[NDArray[np.uint8], "N"]


@dataclass
class Copies:
    """Copies one array into every slot."""

    n: int

    def fill(self, slot: Any, weights: Any, rng: Any) -> int:
        if not hasattr(self, "source"):
            self.source = np.arange(self.n, dtype=np.uint8)
        slot.data.values[:] = self.source
        return self.n
