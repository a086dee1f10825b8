"""The reader of workers with clocks: it decides who waits for whom.

A worker's clock is the number of its records. With staleness s it starts its next record if its clock is at most s ahead of
the slowest one (stale synchronous parallel: Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel
Parameter Server").

    0       a barrier: the records of one clock are read together, for one step (the synchronous parameter server)
    s > 0   bounded staleness: each record is read when it is ready
    None    asynchronous: no worker ever waits for another

A worker whose record is read gets its next request at the next read, when the server has published the new weights. A
record that is not accepted (NaN) is dropped and counted. A worker that dies, or sends MAX_REFUSED such records in a row, is
named and left out; the others go on.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Generic

from whorl.errors import ProducerError
from whorl.slots import Board, ProducerHandle, ReaderStats, Slot, SlotRing, SlotState
from whorl.slots.spec import Record

MAX_REFUSED = 3


class ClockReader(Generic[Record]):
    """Iterates without end over lists of slots, each of which is one step of the server.

    Args:
        ring: a slot for each producer.
        producers: numbered 0, 1, ...; record s is of producer s mod their number, with clock s div their number.
        board: whose version decides the lag of a record.
        accept: whether a record is used.
        log: receives a message for each worker that is left out.

    Attributes:
        lags: records by the number of versions that they were behind. refused: records dropped, by worker.
        left_out: messages by worker.

    Raises:
        ProducerError: while iterating, when no worker is left.
    """

    def __init__(
        self,
        ring: SlotRing[Record],
        producers: Sequence[ProducerHandle],
        *,
        staleness: int | None,
        board: Board,
        accept: Callable[[Slot[Record]], bool] = lambda slot: True,
        log: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.ring, self.staleness, self.board, self.accept, self.log = ring, staleness, board, accept, log
        self.workers = dict(enumerate(producers))
        self.n_workers, self.clocks = len(producers), Counter[int]()
        self.stats, self.lags, self.refused = ReaderStats(), Counter[int](), Counter[int]()
        self.left_out: dict[int, str] = {}
        self._in_row = Counter[int]()
        self._busy: set[int] = set()
        self._reading: list[Slot[Record]] = []

    def __iter__(self) -> Iterator[list[Slot[Record]]]:
        return self

    def __next__(self) -> list[Slot[Record]]:
        for slot in self._reading:
            self.ring.release(slot)
        self._reading = []
        began = time.perf_counter()
        while not self._reading or (self.staleness == 0 and self._busy):
            if not self._reading:
                self._request()
            if (found := self._receive()) is not None:
                self._reading.append(found)
        wait = (time.perf_counter() - began) / len(self._reading)
        for slot in self._reading:
            lag = self.board.version - slot.policy_version
            self.lags[lag] += 1
            self.stats.add(slot, wait, lag)
        return sorted(self._reading, key=lambda slot: slot.producer)

    def _request(self) -> None:
        """Request the next record of every worker that may start it."""
        slowest = min(self.clocks[n] for n in self.workers)
        for n in self.workers.keys() - self._busy:
            if self.staleness is None or self.clocks[n] - slowest <= self.staleness:
                self.workers[n].request(n, self.clocks[n] * self.n_workers + n)
                self._busy.add(n)

    def _receive(self) -> Slot[Record] | None:
        """Wait for a record; None if it is not accepted, or if its worker is left out."""
        busy = [self.workers[n] for n in sorted(self._busy, key=lambda n: (self.clocks[n], n))]
        ready = busy[0].first_ready(busy, busy[0].timeout) or busy  # none: the first one reports that it hangs
        number = next(worker.number for worker in busy if worker in ready)
        try:
            index = self.workers[number].receive()
        except ProducerError as error:
            self._leave_out(number, error.what, error)
            return None
        assert index is not None, "a worker is never restarted"
        slot = self.ring.slots[index]
        slot.transition(SlotState.READY, SlotState.READING)
        self._busy.discard(number)
        self.clocks[number] += 1
        if self.accept(slot):
            self._in_row[number] = 0
            return slot
        self.ring.release(slot)
        self.refused[number] += 1
        self._in_row[number] += 1
        if self._in_row[number] == MAX_REFUSED:
            self._leave_out(number, f"worker {number} sent {MAX_REFUSED} gradients in a row that are not finite")
        return None

    def _leave_out(self, number: int, why: str, cause: Exception | None = None) -> None:
        self.workers.pop(number).close()
        self._busy.discard(number)
        self.left_out[number] = why
        if not self.workers:
            raise ProducerError(
                f"no worker is left of {self.n_workers}; the last one: {why}",
                do="if they sent NaN, lower the learning rate; if they were killed, check the machine's memory",
            ) from cause
        self.log(f"worker {number} is left out, {len(self.workers)} of {self.n_workers} go on: {why}")

    def close(self) -> None:
        """End the workers."""
        for worker in self.workers.values():
            worker.close()
