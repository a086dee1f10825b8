"""Group commit: one thread commits everything that waits, so that many writers share one flush of the disk.

DeWitt et al. 1984, "Implementation techniques for main memory database systems".
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from whorl.log.event import Event
from whorl.log.port import LogUnavailableError, Position

BATCH = 4096  # events of one transaction
GATHER_SECONDS = 0.001
Submission = tuple[str, Sequence[Event], list[bytes], "Future[list[Position]]"]


class GroupCommit:
    """A queue of submissions and its thread.

    Args:
        write: appends submissions in one transaction; returns the positions of each.
    """

    def __init__(
        self, write: Callable[[Sequence[Submission]], list[list[Position]]], batch: int = BATCH
    ) -> None:
        self._write, self._batch = write, batch
        self._waiting: queue.SimpleQueue[Submission | None] = queue.SimpleQueue()
        self._lock, self._closed = threading.Lock(), False
        self._thread = threading.Thread(target=self._write_all, name="whorl-log", daemon=True)
        self._thread.start()

    def submit(self, topic: str, events: Sequence[Event], values: list[bytes]) -> Future[list[Position]]:
        """Return the positions, once they are durable. Raises LogUnavailableError: it is closed."""
        future: Future[list[Position]] = Future()
        with self._lock:  # nothing comes behind the end
            if self._closed:
                raise LogUnavailableError("the log is closed")
            self._waiting.put((topic, events, values, future))
        return future

    def close(self) -> None:
        """Commit what waits, and end."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._waiting.put(None)
        self._thread.join()

    def _write_all(self) -> None:
        last, writers = False, 0
        while not last:
            batch, size = list[Submission](), 0
            while not batch or (size < self._batch and not self._waiting.empty()):
                if last := (more := self._waiting.get()) is None:
                    break
                if not batch and self._batch > 1:
                    self._gather(writers - 1)
                batch.append(more)
                size += len(more[1])
            self._commit([each for each in batch if each[-1].set_running_or_notify_cancel()])
            writers = len(batch) + self._waiting.qsize()

    def _gather(self, expected: int) -> None:
        """Wait for the writers of the last commit to submit again (commit_delay of PostgreSQL)."""
        deadline = time.monotonic() + GATHER_SECONDS
        while self._waiting.qsize() < expected and time.monotonic() < deadline:
            time.sleep(GATHER_SECONDS / 20)

    def _commit(self, batch: Sequence[Submission]) -> None:
        try:
            places = self._write(batch) if batch else []
        except BaseException as error:  # of this transaction; the next may succeed
            if len(batch) > 1 and not isinstance(error, LogUnavailableError):
                for each in batch:  # one of them is wrong, not all
                    self._commit([each])
                return
            for *_, future in batch:
                future.set_exception(error)
        else:
            for (*_, future), own in zip(batch, places, strict=True):
                future.set_result(own)
