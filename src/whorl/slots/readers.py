"""Readers: how records leave the ring. `Drain` reads each once: what a language model and on-policy agents learn from.

Records are numbered 0, 1, 2, ...; with P producers record s is producer s mod P's, and each producer owns every
P-th slot. By default they are read in that order, so the order does not depend on who is faster, and one run equals
the next. With `order="ready"` whoever is ready first is read first: what asynchronous actors want, whose records
differ in how long they take.

A slot is handed out as it lies in shared memory and goes back to its producer when the next one is asked for:
whoever wants to keep a record copies it. A producer whose slots are all waiting to be read waits too
(back-pressure), so what is read is at most so many records old; `max_lag` bounds it in versions of the weights.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, Literal

from whorl.errors import ConfigError
from whorl.slots.board import Board
from whorl.slots.producers import ProducerHandle
from whorl.slots.ring import Slot, SlotRing, SlotState
from whorl.slots.spec import Record


@dataclass
class ReaderStats:
    """Where time went, and how old what was read was, since the last `take`.

    idle, busy: seconds, of all producers together, without anything to do (back-pressure) and filling; waited:
    seconds of the reader for records; lag_sum, lag_max: by how many versions the weights that made the records were behind;
    stale: how many records were given back unread because of that; restarts: how many producers were started again.
    """

    records: int = 0
    idle: float = 0.0
    busy: float = 0.0
    wait: float = 0.0
    stale: int = 0
    restarts: int = 0
    lag_sum: int = 0
    lag_max: int = 0

    def add(self, slot: Slot[Record], wait: float, lag: int) -> None:
        self.records += 1
        self.idle += slot.idle
        self.busy += slot.busy
        self.wait += wait
        self.lag_sum += lag
        self.lag_max = max(self.lag_max, lag)

    def metrics(self) -> dict[str, float]:
        """As metrics."""
        return {
            "records": float(self.records), "time/producer_idle": self.idle, "time/producer_busy": self.busy,
            "time/reader_wait": self.wait, "stale_records": float(self.stale), "policy_lag/mean": self.lag_sum / max(1, self.records),
            "policy_lag/max": float(self.lag_max), "worker_restarts": float(self.restarts),
        }  # fmt: skip


class FIFOReader(Generic[Record]):
    """Iterates over records for ever, starting with number `start`.

        with Drain(ring, [producer]) as records:
            for slot in records:
                train(slot.data)

    Args:
        order: "sequence", or "ready" (see the top of this file).
        board, max_lag: records made with weights more than `max_lag` versions behind the board's are not handed out but made
            anew, and counted.

    Raises:
        ProducerError: while iterating, when a producer raised, died or hung.
    """

    def __init__(
        self,
        ring: SlotRing[Record],
        producers: Sequence[ProducerHandle],
        *,
        start: int = 0,
        order: Literal["sequence", "ready"] = "sequence",
        board: Board | None = None,
        max_lag: int | None = None,
    ) -> None:
        if not 1 <= len(producers) <= len(ring):
            raise ConfigError(
                f"{len(producers)} producers on {len(ring)} slots", expected="at least 1, and a slot for each"
            )
        if max_lag is not None and (board is None or max_lag < 0):
            raise ConfigError(f"max_lag is {max_lag}", expected="at least 0, with a board to compare with")
        self.ring, self.producers, self.sequence = ring, producers, start
        self.order, self.board, self.max_lag = order, board, max_lag
        self.stats = ReaderStats()
        self._reading: Slot[Record] | None = None
        # Producer p owns slots p, p + P, ...: the k-th of them takes its k-th record, then every further round.
        n = len(producers)
        self._owner = [(start + i) % n for i in range(len(ring))]
        self._stride = [self._owner.count(self._owner[i]) * n for i in range(len(ring))]
        for i in range(len(ring)):
            self.producers[self._owner[i]].request(i, start + i)

    def __iter__(self) -> Iterator[Slot[Record]]:
        return self

    def __next__(self) -> Slot[Record]:
        if (old := self._reading) is not None:
            self._reading = None
            self._recycle(old, old.sequence + self._stride[old.index])
        began = time.perf_counter()
        while True:
            index = self._next_producer().receive()
            if index is None:
                self.stats.restarts += 1
                continue
            slot = self.ring.slots[index]
            slot.transition(SlotState.READY, SlotState.READING)
            lag = self.board.version - slot.policy_version if self.board is not None else 0
            if self.max_lag is None or lag <= self.max_lag:
                break
            self.stats.stale += 1
            self._recycle(slot, slot.sequence)
        if (
            self.order == "sequence" and self.max_lag is None
        ):  # what was made anew comes later than its number
            assert slot.sequence == self.sequence, "a producer filled slots out of order"
        self.sequence += 1
        self.stats.add(slot, time.perf_counter() - began, lag)
        self._reading = slot
        return slot

    def _recycle(self, slot: Slot[Record], next_sequence: int) -> None:
        """Gives a slot back to its producer, for record `following`."""
        self.ring.release(slot)
        self.producers[self._owner[slot.index]].request(slot.index, next_sequence)

    def _next_producer(self) -> ProducerHandle:
        turn = self.sequence % len(self.producers)
        if self.order == "sequence":
            return self.producers[turn]
        timeout = max(p.timeout for p in self.producers)
        found: list[ProducerHandle] = self.producers[turn].first_ready(self.producers, timeout)
        # Nobody: the one whose turn it is says what is wrong. Several: the one whose turn comes first.
        return (
            min(found, key=lambda p: (p.number - turn) % len(self.producers))
            if found
            else self.producers[turn]
        )

    def pop_stats(self) -> ReaderStats:
        """What was counted since the last call."""
        figures, self.stats = self.stats, ReaderStats()
        return figures

    def close(self) -> None:
        """End the producers."""
        for producer in self.producers:
            producer.close()

    def __enter__(self) -> FIFOReader[Record]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
