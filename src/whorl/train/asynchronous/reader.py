"""The reader of workers with clocks. It is the method: a barrier, bounded staleness, or no waiting.

A worker's clock is the number of its records. With staleness s it starts the next one if its clock is at most s ahead of the
slowest (Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server"). 0 is a barrier:
the records of one clock are read together, for one step. Otherwise each is read when it is ready; with None no worker waits
for another. A worker gets its next request when the server has published the step on its record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from whorl.errors import ProducerError
from whorl.slots import Board, ProducerHandle, Slot, SlotRing, SlotState
from whorl.train.asynchronous.gradient import Gradient, is_finite

MAX_REFUSED = 3  # records in a row that are not finite, after which a worker is left out


class ClockReader:
    """Iterates without end over lists of slots, each of which is one step of the server.

    Args:
        ring: a slot for each producer.
        producers: numbered 0, 1, ...; record s is of producer s mod their number, with clock s div their number.
        board: whose version decides the lag of a record.
        log: receives the name of each worker that is left out, since it died, raised, hung or sent NaN.

    Attributes: lags (records by versions that they were behind), refused (records that were not finite, by worker),
        left_out (why, by worker), idle and busy (seconds of all workers).

    Raises:
        ProducerError: while iterating, when no worker is left.
    """

    def __init__(
        self, ring: SlotRing[Gradient], producers: Sequence[ProducerHandle], staleness: int | None, board: Board,
        log: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.ring, self.staleness, self.board, self.log = ring, staleness, board, log
        self.workers, self.n_workers = dict(enumerate(producers)), len(producers)
        self.clocks, self.lags, self.refused = Counter[int](), Counter[int](), Counter[int]()
        self.left_out, self.idle, self.busy = dict[int, str](), 0.0, 0.0
        self._refused_in_row, self._asked, self._reading = Counter[int](), set[int](), list[Slot[Gradient]]()

    def __iter__(self) -> Iterator[list[Slot[Gradient]]]:
        return self

    def __next__(self) -> list[Slot[Gradient]]:
        while self._reading:
            self.ring.release(self._reading.pop())
        while not self._reading or (self.staleness == 0 and self._asked):
            if not self._reading:
                self._request()
            self._receive()
        return sorted(self._reading, key=lambda slot: slot.producer)

    def _request(self) -> None:
        """Request the next record of every worker that may start it."""
        if not self.workers:
            raise ProducerError(
                f"no worker is left of {self.n_workers}; the last one: {[*self.left_out.values()][-1]}",
                do="if they sent NaN, lower the learning rate; if they were killed, check the machine's memory",
            )
        slowest = min(self.clocks[n] for n in self.workers)
        for n in self.workers.keys() - self._asked:
            if self.staleness is None or self.clocks[n] - slowest <= self.staleness:
                self.workers[n].request(n, self.clocks[n] * self.n_workers + n)
                self._asked.add(n)

    def _receive(self) -> None:
        """Wait for a record; a worker that fails is left out."""
        asked = [self.workers[n] for n in sorted(self._asked, key=lambda n: (self.clocks[n], n))]
        # None is ready: the first one reports that it hangs.
        ready = asked[0].first_ready(asked, asked[0].timeout) or asked
        number = next(worker.number for worker in asked if worker in ready)
        try:
            self.workers[number].receive()
        except ProducerError as error:
            self._leave_out(number, error.what)
            return
        slot = self.ring.slots[number]
        slot.transition(SlotState.READY, SlotState.READING)
        self._asked.remove(number)
        self.clocks[number] += 1
        if is_finite(slot):
            self._refused_in_row[number] = 0
            self.lags[self.board.version - slot.policy_version] += 1
            self.idle, self.busy = self.idle + slot.idle, self.busy + slot.busy
            self._reading.append(slot)
            return
        self.ring.release(slot)
        for counts in (self.refused, self._refused_in_row):
            counts[number] += 1
        if self._refused_in_row[number] == MAX_REFUSED:
            self._leave_out(number, f"it sent {MAX_REFUSED} gradients in a row that are not finite")

    def _leave_out(self, number: int, why: str) -> None:
        self.workers.pop(number).close()
        self._asked.discard(number)
        self.left_out[number] = why
        self.log(f"worker {number} is left out, {len(self.workers)} of {self.n_workers} remain: {why}")

    def unread(self) -> list[Slot[Gradient]]:
        """Wait for the records that were requested, and return them."""
        while self._reading:
            self.ring.release(self._reading.pop())
        while self._asked:
            self._receive()
        return self._reading

    def close(self) -> None:
        """End the workers."""
        for worker in self.workers.values():
            worker.close()
