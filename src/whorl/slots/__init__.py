"""Slots: the spine. Producers fill preallocated records in shared memory, a reader drains them.

A `Spec` (from a typed dataclass) says what a record holds, a `SlotRing` allocates records, a `Producer`
fills one at a time, here or in a process of its own, and a `Drain` hands them out in order. Queues carry
slot numbers, never tensors. See docs/slots.md.
"""

from whorl.slots.producers import Producer, ProducerProcess, SerialProducer
from whorl.slots.readers import Drain
from whorl.slots.ring import Slot, SlotRing, State
from whorl.slots.spec import Field, Spec

__all__ = [
    "Drain",
    "Field",
    "Producer",
    "ProducerProcess",
    "SerialProducer",
    "Slot",
    "SlotRing",
    "Spec",
    "State",
]
