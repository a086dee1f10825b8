"""The ring: n slots of one Spec in memory that processes share, each with a header.

    FREE -> WRITING -> READY -> READING -> FREE

The header holds the state and where the content came from: policy version, producer, seed, sequence number, length,
and how long its producer had nothing to do before it (idle) and took to fill it (busy). Every step of a slot's life
checks the state it expects, so a slot half written is never read, and one that is being read is never overwritten:
a producer that died while writing leaves WRITING behind, which nobody accepts. Only who knows that it is dead, and starts
another, takes the slot back.

The memory is anonymous (`memfd_create`, or an unlinked temporary file where that is missing): it has no
name in the system, so it cannot clash with another run's, does not count against the size of /dev/shm, and
is gone with the last process that holds it, SIGKILL included. Other processes get the file descriptor.

With `poison=True` a freed slot is overwritten with 0xFF bytes (NaN as a float, -1 as an integer), so that a
reader that kept a view too long, or a producer that leaves part of a slot unwritten, is found by a test and
not by luck.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Generic

import numpy as np

from whorl.errors import ConfigError, ProducerError
from whorl.slots.spec import ALIGNMENT, Record, Spec

if TYPE_CHECKING:
    import torch


class SlotState(IntEnum):
    """Where a slot is in its life."""

    FREE = 0
    WRITING = 1
    READY = 2
    READING = 3


HEADER_FIELDS = ("state", "producer", "sequence", "policy_version", "seed", "length", "idle", "busy")
_HEADER_INDEX = {name: place for place, name in enumerate(HEADER_FIELDS)}


class Slot(Generic[Record]):
    """One record in shared memory: `data` holds its arrays, `content` their bytes, the properties read its header."""

    def __init__(self, index: int, memory: memoryview, spec: Spec[Record]) -> None:
        self.index = index
        self.header = memory[: len(HEADER_FIELDS) * 8].cast(
            "q"
        )  # int64; an element takes 40 ns, of an array 100
        self.content = np.frombuffer(memory, np.uint8)[ALIGNMENT:]
        self.data: Record = spec.view(memory[ALIGNMENT:])
        self._names = list(spec.fields)
        self._tensors: dict[str, torch.Tensor] = {}

    @property
    def state(self) -> SlotState:
        return SlotState(self.header[0])

    @property
    def producer(self) -> int:
        """Number of the producer that filled it."""
        return self.header[1]

    @property
    def sequence(self) -> int:
        """Place in the order of all records that are read: 0, 1, 2, ..."""
        return self.header[2]

    @property
    def policy_version(self) -> int:
        """Version of the weights that made the content; 0 where no weights took part."""
        return self.header[3]

    @property
    def seed(self) -> int:
        """What the producer's generator for this record was seeded with."""
        return self.header[4]

    @property
    def length(self) -> int:
        """What `fill` returned: how much of the record is in use."""
        return self.header[5]

    @property
    def idle(self) -> float:
        """Seconds that its producer waited before it was asked for this record."""
        return self.header[6] * 1e-9

    @property
    def busy(self) -> float:
        """Seconds that filling it took."""
        return self.header[7] * 1e-9

    def tensors(self) -> dict[str, torch.Tensor]:
        """The arrays as torch tensors over the same memory, in the Spec's order."""
        if not self._tensors:
            import torch

            self._tensors = {name: torch.from_numpy(getattr(self.data, name)) for name in self._names}
        return self._tensors

    def transition(self, expected: SlotState, to: SlotState, **header: int) -> None:
        """Go from one state to the next, writing header fields on the way.

        Raises:
            ProducerError: the slot is in another state than `expected`.
        """
        if self.header[0] != expected:
            raise ProducerError(
                f"slot {self.index} is {self.state.name} where it was to go to {to.name}",
                expected=f"{expected.name}: two users of one slot, or a producer that died in it",
            )
        for name, value in header.items():
            self.header[_HEADER_INDEX[name]] = value
        self.header[0] = to

    def poison(self) -> None:
        """Overwrite the content with 0xFF bytes."""
        self.content[:] = 0xFF


class SlotRing(Generic[Record]):
    """`n_slots` records of `spec` in shared memory.

    Args:
        poison: overwrite freed slots (see the top of this file).
        fd: attach to another ring's memory (its `fd`) rather than making new.
    """

    def __init__(
        self, spec: Spec[Record], n_slots: int, *, poison: bool = False, fd: int | None = None
    ) -> None:
        if n_slots < 1:
            raise ConfigError(f"a ring of {n_slots} slots is impossible", expected="at least 1 slot")
        self.spec, self.poison = spec, poison
        stride = ALIGNMENT + spec.n_bytes
        new = fd is None
        self.fd = anonymous_memory(stride * n_slots) if fd is None else fd
        memory = memoryview(mmap.mmap(self.fd, stride * n_slots))
        self.slots = [Slot(i, memory[i * stride : (i + 1) * stride], spec) for i in range(n_slots)]
        weakref.finalize(self, os.close, self.fd)
        if new and poison:
            for slot in self.slots:
                slot.poison()

    def __len__(self) -> int:
        return len(self.slots)

    def release(self, slot: Slot[Record]) -> None:
        """Give a slot that was read back to its producer: READING -> FREE."""
        if self.poison:
            slot.poison()
        slot.transition(SlotState.READING, SlotState.FREE)

    def reclaim(self, slot: Slot[Record]) -> None:
        """Free a slot that a dead producer was asked to fill and has not told of, however far it came.

        Raises:
            ProducerError: it is being read.
        """
        if self.poison:
            slot.poison()
        slot.transition(min(slot.state, SlotState.READY), SlotState.FREE)


def anonymous_memory(n_bytes: int, label: str = "whorl-slots") -> int:
    """A file descriptor of `n_bytes` of memory that no name leads to; `label` is what the system's tools show."""
    create: Any = getattr(os, "memfd_create", None)
    if create is not None:
        fd: int = create(label)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, n_bytes)
    return fd
