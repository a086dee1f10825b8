"""Slots: the spine. Producers fill preallocated records in shared memory, a reader hands them to a learner.

A `Spec` (from a typed dataclass) says what a record holds, a `SlotRing` allocates records, a `Producer` fills one
at a time, here or in a process of its own; `Drain` reads each once, `Sample` draws from those it keeps. The `Board`
carries weights back. `ray.py` has producers on other machines. Queues carry slot numbers, never tensors. See docs/slots.md.
"""

from whorl.slots.board import Board, Weights
from whorl.slots.producers import Producer, ProducerProcess, SerialProducer, Source
from whorl.slots.readers import Drain, Figures
from whorl.slots.replay import Drawn, Sample
from whorl.slots.ring import Slot, SlotRing, State
from whorl.slots.spec import Field, Spec

__all__ = [
    "Board",
    "Drain",
    "Drawn",
    "Field",
    "Figures",
    "Producer",
    "ProducerProcess",
    "Sample",
    "SerialProducer",
    "Slot",
    "SlotRing",
    "Source",
    "Spec",
    "State",
    "Weights",
]
