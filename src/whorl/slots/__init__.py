"""Slots: the spine. Producers fill preallocated records in shared memory, a reader hands them to a learner.

A `Spec` (from a typed dataclass) says what a record holds, a `SlotRing` allocates records, a `Producer` fills one
at a time, here or in a process of its own; `Drain` reads each once, `Sample` draws from those it keeps. The `Board`
carries weights back. `ray.py` has producers on other machines. Queues carry slot numbers, never tensors. See docs/slots.md.
"""

from whorl.slots.board import Board, BoardReader
from whorl.slots.producers import Producer, ProducerHandle, ProducerProcess, SerialProducer
from whorl.slots.readers import FIFOReader, ReaderStats
from whorl.slots.replay import ReplayBatch, ReplayReader
from whorl.slots.ring import Slot, SlotRing, SlotState
from whorl.slots.spec import FieldSpec, Spec

__all__ = [
    "Board",
    "BoardReader",
    "FIFOReader",
    "FieldSpec",
    "Producer",
    "ProducerHandle",
    "ProducerProcess",
    "ReaderStats",
    "ReplayBatch",
    "ReplayReader",
    "SerialProducer",
    "Slot",
    "SlotRing",
    "SlotState",
    "Spec",
]
