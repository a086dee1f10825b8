"""Slots: producers fill preallocated records in shared memory, a reader passes them to a learner.

A `Spec` (from a typed dataclass) defines a record, a `SlotRing` allocates slots, a `Producer` fills one slot at a time,
in this process or another. `FIFOReader` reads each record once. The `Board` publishes weights to the producers.
`replay.TransitionStore` keeps the steps of rollouts and draws minibatches of them; it imports torch. `ray.py` runs
producers on other machines. Queues carry slot numbers, never tensors. See docs/slots.md.
"""

from whorl.slots.board import Board, BoardReader
from whorl.slots.producers import Producer, ProducerHandle, ProducerProcess, SerialProducer
from whorl.slots.readers import FIFOReader, ReaderStats
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
    "SerialProducer",
    "Slot",
    "SlotRing",
    "SlotState",
    "Spec",
]
