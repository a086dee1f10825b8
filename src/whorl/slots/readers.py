"""Readers: how records leave the ring. `Drain` reads each once, in order: what a language model trains on.

Records are numbered 0, 1, 2, ...; with P producers record s is producer s mod P's, and each producer owns
every P-th slot. So the order does not depend on who is faster, and one run equals the next. A slot is
handed out as it lies in shared memory and goes back to its producer when the next one is asked for: whoever
wants to keep a record copies it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Generic

from whorl.errors import ConfigError
from whorl.slots.producers import ProducerProcess, SerialProducer
from whorl.slots.ring import Slot, SlotRing, State
from whorl.slots.spec import Record


class Drain(Generic[Record]):
    """Iterates over records for ever, starting with number `start`.

        with Drain(ring, [producer]) as records:
            for slot in records:
                train(slot.data)

    Raises:
        ProducerError: while iterating, when a producer raised, died or hung.
    """

    def __init__(
        self,
        ring: SlotRing[Record],
        producers: Sequence[SerialProducer] | Sequence[ProducerProcess],
        *,
        start: int = 0,
    ) -> None:
        if not 1 <= len(producers) <= len(ring):
            raise ConfigError(
                f"{len(producers)} producers on {len(ring)} slots", expected="at least 1, and a slot for each"
            )
        self.ring, self.producers, self.sequence = ring, producers, start
        self._reading: Slot[Record] | None = None
        # Producer p owns slots p, p + P, ...: the k-th of them takes its k-th record, then every further round.
        n = len(producers)
        self._owner = [(start + i) % n for i in range(len(ring))]
        self._stride = [self._owner.count(self._owner[i]) * n for i in range(len(ring))]
        for i in range(len(ring)):
            self.producers[self._owner[i]].ask(i, start + i)

    def __iter__(self) -> Iterator[Slot[Record]]:
        return self

    def __next__(self) -> Slot[Record]:
        if (old := self._reading) is not None:
            self._reading = None
            following = old.sequence + self._stride[old.index]
            self.ring.release(old)
            self.producers[self._owner[old.index]].ask(old.index, following)
        slot = self.ring.slots[self.producers[self.sequence % len(self.producers)].receive()]
        slot.step(State.READY, State.READING)
        assert slot.sequence == self.sequence, "a producer filled slots out of order"
        self.sequence += 1
        self._reading = slot
        return slot

    def close(self) -> None:
        """End the producers."""
        for producer in self.producers:
            producer.close()

    def __enter__(self) -> Drain[Record]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
