"""The slot ring: n slots of one Spec in shared memory, each with a header.

    FREE -> WRITING -> READY -> READING -> FREE

The header holds the state and the origin of the content: policy version, producer, seed, sequence number, length, and
the producer's idle and busy times. Every transition checks the expected state, so a partly written slot is never read
and a slot being read is never overwritten. A producer that died during a write leaves WRITING behind. Only the code
that restarts it reclaims the slot.

The memory is anonymous (`memfd_create`, or an unlinked temporary file). It has no name, so runs cannot clash, it does
not count towards /dev/shm, and it is freed with the last process that maps it, even after SIGKILL. Other processes get
the file descriptor.

With `poison=True` a freed slot is overwritten with 0xFF bytes (NaN as a float, -1 as an integer). This exposes readers
that keep a view too long and producers that leave fields unwritten.
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
    """The state of a slot."""

    FREE = 0
    WRITING = 1
    READY = 2
    READING = 3


HEADER_FIELDS = ("state", "producer", "sequence", "policy_version", "seed", "length", "idle", "busy")
_HEADER_INDEX = {name: place for place, name in enumerate(HEADER_FIELDS)}


class Slot(Generic[Record]):
    """One record in shared memory: `data` has its arrays, `content` their bytes, properties read the header."""

    def __init__(self, index: int, memory: memoryview, spec: Spec[Record]) -> None:
        self.index = index
        self.header = memory[: len(HEADER_FIELDS) * 8].cast(
            "q"
        )  # int64; reading an element takes 40 ns, from a numpy array 100
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
        """Number of the record: 0, 1, 2, ..."""
        return self.header[2]

    @property
    def policy_version(self) -> int:
        """Version of the weights used; 0 without weights."""
        return self.header[3]

    @property
    def seed(self) -> int:
        """Seed of the record's generator."""
        return self.header[4]

    @property
    def length(self) -> int:
        """Length in use, returned by `fill`."""
        return self.header[5]

    @property
    def idle(self) -> float:
        """Seconds the producer waited for the request of this record."""
        return self.header[6] * 1e-9

    @property
    def busy(self) -> float:
        """Seconds the fill took."""
        return self.header[7] * 1e-9

    def tensors(self) -> dict[str, torch.Tensor]:
        """The arrays as torch tensors over the same memory, in the Spec's order."""
        if not self._tensors:
            import torch

            self._tensors = {name: torch.from_numpy(getattr(self.data, name)) for name in self._names}
        return self._tensors

    def transition(self, expected: SlotState, to: SlotState, **header: int) -> None:
        """Change the state, and write header fields first.

        Raises:
            ProducerError: the state is not `expected`.
        """
        if self.header[0] != expected:
            raise ProducerError(
                f"slot {self.index} is {self.state.name}, but must change to {to.name}",
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
        poison: overwrite freed slots (see the module docstring).
        fd: attach to another ring's memory (its `fd`) instead of allocating.
    """

    def __init__(
        self, spec: Spec[Record], n_slots: int, *, poison: bool = False, fd: int | None = None
    ) -> None:
        if n_slots < 1:
            raise ConfigError(f"a ring of {n_slots} slots", expected="at least 1 slot")
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
        """Return a slot that was read to its producer: READING -> FREE."""
        if self.poison:
            slot.poison()
        slot.transition(SlotState.READING, SlotState.FREE)

    def reclaim(self, slot: Slot[Record]) -> None:
        """Free a slot requested from a dead producer and not reported, in any state of writing.

        Raises:
            ProducerError: it is being read.
        """
        if self.poison:
            slot.poison()
        slot.transition(min(slot.state, SlotState.READY), SlotState.FREE)


def anonymous_memory(n_bytes: int, label: str = "whorl-slots") -> int:
    """Return a file descriptor of `n_bytes` of unnamed memory; system tools show `label`."""
    create: Any = getattr(os, "memfd_create", None)
    if create is not None:
        fd: int = create(label)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, n_bytes)
    return fd
