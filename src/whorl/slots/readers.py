"""FIFO reader: returns each record once, for language models and on-policy agents.

Records are numbered 0, 1, 2, ...; of P producers, producer s mod P makes record s, and each producer owns every P-th
slot. By default records are read in this order, so the order is independent of timing and runs repeat exactly. With
`order="ready"` the first finished record is read first, for asynchronous actors whose records differ in duration.

A slot is returned without a copy and goes back to its producer at the next read: copy a record to keep it. A producer
whose slots are all unread waits (back-pressure), so a record is at most that many records old. `max_lag` bounds its age
in weight versions.
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
    """Timing and staleness since the last `pop_stats`.

    idle, busy: seconds, summed over producers, without a request (back-pressure) and filling. wait: seconds of the
        reader waiting. lag_sum, lag_max: weight versions that records were behind. stale: records returned unread
        because of that. restarts: of producers.
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
        """The statistics as metrics."""
        return {
            "records": float(self.records), "time/producer_idle": self.idle, "time/producer_busy": self.busy,
            "time/reader_wait": self.wait, "stale_records": float(self.stale),
            "policy_lag/mean": self.lag_sum / max(1, self.records),
            "policy_lag/max": float(self.lag_max), "worker_restarts": float(self.restarts),
        }  # fmt: skip


class FIFOReader(Generic[Record]):
    """Iterates over records without end, from number `start`.

        with FIFOReader(ring, [producer]) as records:
            for slot in records:
                train(slot.data)

    Args:
        order: "sequence" or "ready" (see the module docstring).
        board, max_lag: records more than `max_lag` versions behind the board are made again, and counted.

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
                f"{len(producers)} producers on {len(ring)} slots",
                expected="at least 1 producer, and a slot for each",
            )
        if max_lag is not None and (board is None or max_lag < 0):
            raise ConfigError(f"max_lag is {max_lag}", expected="at least 0, together with a board")
        self.ring, self.producers, self.sequence = ring, producers, start
        self.order, self.board, self.max_lag = order, board, max_lag
        self.stats = ReaderStats()
        self._reading: Slot[Record] | None = None
        # Producer p owns slots p, p + P, ...; its k-th slot takes its k-th record, then one per round.
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
        ):  # records that were made again arrive out of order
            assert slot.sequence == self.sequence, "a producer filled slots out of order"
        self.sequence += 1
        self.stats.add(slot, time.perf_counter() - began, lag)
        self._reading = slot
        return slot

    def _recycle(self, slot: Slot[Record], next_sequence: int) -> None:
        """Return a slot to its producer, for record `next_sequence`."""
        self.ring.release(slot)
        self.producers[self._owner[slot.index]].request(slot.index, next_sequence)

    def _next_producer(self) -> ProducerHandle:
        turn = self.sequence % len(self.producers)
        if self.order == "sequence":
            return self.producers[turn]
        timeout = max(p.timeout for p in self.producers)
        found: list[ProducerHandle] = self.producers[turn].first_ready(self.producers, timeout)
        # None ready: the producer that is next in turn reports the error. Several: the first in turn.
        return (
            min(found, key=lambda p: (p.number - turn) % len(self.producers))
            if found
            else self.producers[turn]
        )

    def pop_stats(self) -> ReaderStats:
        """Return the statistics since the last call, and reset them."""
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
