"""Producers that die at a chosen moment; importable by a producer process."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.slots.examples import Draws
from whorl.slots import SlotState


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def first(place: Path) -> bool:
    """Return True on the first call with this path."""
    try:
        place.open("x").close()
    except FileExistsError:
        return False
    return True


@dataclass
class Dies(Draws):
    """Is killed once at each of `records`, at a moment `when`; leaves a marker file in `folder`.

    when: "begun" (the record is half written), "whole" (the slot is READY but unreported), "forked" (a child holds its
        descriptors, the socket included), "never" (forks likewise, and hangs), "unpickled" (before the first request),
        "always" (every time).
    """

    folder: Path = Path()
    records: tuple[int, ...] = (2,)
    when: str = "begun"

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.when == "unpickled" and first(self.folder / "unpickled"):
            die()

    def fill(self, slot: Any, weights: Any, rng: np.random.Generator) -> int:
        now = self.when != "unpickled" and slot.sequence in self.records
        if now and (self.when == "always" or first(self.folder / str(slot.sequence))):
            slot.data.label[...] = -5
            if self.when == "whole":
                super().fill(slot, weights, rng)
                slot.transition(SlotState.WRITING, SlotState.READY, length=5)
            if self.when in ("forked", "never"):
                child = os.fork()
                if not child:
                    time.sleep(600)
                (self.folder / "child").write_text(str(child))
            if self.when == "never":
                time.sleep(600)
            die()
        return super().fill(slot, weights, rng)


@dataclass
class DiesReading:
    """Uses weights, and is killed the first time during a copy from the board."""

    folder: Path

    def fill(self, slot: Any, weights: Any, rng: np.random.Generator) -> int:
        import torch

        into = {name: torch.zeros(shape) for name, shape in weights.board.layout}
        if first(self.folder / "reading"):
            into["b"] = Trap()  # type: ignore[assignment]
        weights.version = weights.board.read(into)
        slot.data.values[:] = float(into["a"][0])
        slot.data.label[...] = slot.sequence
        return 1


class Trap:
    def copy_(self, other: object) -> None:
        die()


@dataclass
class Leaves(Draws):
    """Exits without an exception or a signal."""

    def fill(self, slot: Any, weights: Any, rng: np.random.Generator) -> int:
        os._exit(3)


@dataclass
class CannotBegin(Draws):
    """Raises on unpickling."""

    text: str = field(default="it cannot begin")

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise ValueError(state["text"])
