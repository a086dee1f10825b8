"""Records, producers and readers for tests; importable by a producer process."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from whorl.slots import Board, FIFOReader, ProducerProcess, SerialProducer, SlotRing, Spec

RecordRead = tuple[int, int, int, bytes]


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


def open_reader(
    *producers: Any, slots: int = 1, kind: Any = ProducerProcess, reader: Any = (), **options: Any
) -> Any:
    """A reader of a poisoned ring. `reader` are options of the reader, `options` of each producer."""
    ring = SlotRing(SPEC, slots, poison=True)
    handles = [kind(ring, p, seed=7, number=number, **options) for number, p in enumerate(producers)]
    return FIFOReader(ring, handles, board=options.get("board"), **dict(reader))


def record_read(slot: Any) -> RecordRead:
    """Number, producer, length and values of the slot's record."""
    assert int(slot.data.label) == slot.sequence
    return slot.sequence, slot.producer, slot.length, slot.data.values.tobytes()


def read(reader: FIFOReader[Numbers], n: int) -> list[RecordRead]:
    return [record_read(next(reader)) for _ in range(n)]


def expected_records(n: int, producers: int = 1) -> list[RecordRead]:
    """The first records of serial producers, with a slot for each."""
    with open_reader(*[Draws()] * producers, slots=producers, kind=SerialProducer) as reader:
        return read(reader, n)


def filled(value: float) -> dict[str, Any]:
    """Weights of the network of `Acts` that all equal `value`."""
    import torch

    return {"weight": torch.full((300, 300), value), "bias": torch.full((300,), value)}


def publish(board: Board, version: int) -> None:
    """Publish weights that equal their version."""
    board.publish(filled(float(version)), version)
