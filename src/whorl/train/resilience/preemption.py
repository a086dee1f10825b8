"""Preemption by SIGTERM: the run saves a checkpoint and exits; the same command resumes it.

A scheduler sends SIGTERM and, some seconds later, SIGKILL. A step may take longer. Between two updates the weights and
moments in shared memory *are* the state after the last step, since gradients are stored separately. So the signal may
interrupt, by an exception at any bytecode, every phase that changes no state: waiting for data, forward and backward,
validation. The other phases (the update, a checkpoint, a log record) are short and finish first. `INTERRUPTIBLE` lists
the former.

Only rank 0 handles the signal. The other ranks ignore it (a scheduler may signal the whole group) and end when rank 0
closes its pipes.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from whorl.errors import WhorlError
from whorl.train.learner.loop import Stopwatch

INTERRUPTIBLE = frozenset({"data", "backward", "validation"})
SIGTERM_EXIT_CODE = 128 + 15  # exit code that a shell reports for a program ended by SIGTERM


class PreemptedError(WhorlError):
    """SIGTERM arrived; a checkpoint was written."""

    exit_code = SIGTERM_EXIT_CODE


def preempted_error(done: int, steps: int, saved: int) -> PreemptedError:
    """Return the error of a run that stopped after step `done` of `steps`; its last checkpoint is of step `saved`."""
    state = (
        f"a checkpoint of step {done:,} is written"
        if saved == done
        else f"the last checkpoint is of step {saved:,}"
    )
    return PreemptedError(
        f"stopped by SIGTERM after step {done:,} of {steps:,}; {state}",
        do="run the same command again to resume",
    )


class Preempted(BaseException):
    """Raised by the signal handler to interrupt a phase. A BaseException, so `except Exception` does not catch it."""


class PreemptionHandler(Stopwatch):
    """A stopwatch that handles SIGTERM while entered. The phase it times decides whether the signal may interrupt."""

    def __init__(self, *, listen: bool = True) -> None:
        super().__init__()
        self.interruptible = INTERRUPTIBLE
        self.requested, self.phase = False, "start"
        self._breakable = False
        self._listen = listen and threading.current_thread() is threading.main_thread()
        self._before: Any = None

    def __enter__(self) -> PreemptionHandler:
        if self._listen:
            self._before = signal.signal(signal.SIGTERM, self._on_sigterm)
        return self

    def __exit__(self, *_: object) -> None:
        if self._listen:
            signal.signal(signal.SIGTERM, self._before)

    def _on_sigterm(self, _number: int, _frame: FrameType | None) -> None:
        self.requested = True
        if self._breakable:
            self._breakable = False  # raise only once
            raise Preempted

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a phase; SIGTERM may interrupt it if it is in `interruptible`.

        Raises:
            Preempted: SIGTERM.
        """
        with super().__call__(name), self.during(name):
            yield

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Like a call, without timing."""
        self.phase = name
        if name not in self.interruptible:
            yield
            return
        try:
            self._breakable = True
            if self.requested:
                raise Preempted
            yield
        finally:
            self._breakable = False
