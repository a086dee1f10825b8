"""SIGTERM: the machine is wanted back. What was learnt is kept, and the same command continues.

A scheduler sends SIGTERM and, some seconds later, SIGKILL. A step may take longer than that. But between two updates the
weights and moments in shared memory *are* the state after the last step: gradients in the making lie elsewhere. So the
signal may break off whatever does not change the state, at any bytecode, by an exception: waiting for a batch, forward and
backward, a look at held-out text. Everything else (the update itself, a checkpoint being written, a record in a log) is
short and finishes first. Which is which is a list of what may be broken off, not of what may not.

Only the first replica hears the signal. The others ignore it (a scheduler may send it to the whole group) and end when the
first one lets go of them.
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

SIGTERM_EXIT_CODE = 128 + 15  # what a shell reports for a program that SIGTERM ended


class PreemptedError(WhorlError):
    """SIGTERM came; a checkpoint was written."""

    exit_code = SIGTERM_EXIT_CODE


class Preempted(BaseException):
    """SIGTERM, on its way out of what it broke off. No `except Exception` on that way may hold it up."""


class PreemptionHandler(Stopwatch):
    """Hears SIGTERM while it is entered. A clock, since what may be broken off is told by what the time is spent on."""

    INTERRUPTIBLE = frozenset({"data", "backward", "validation"})

    def __init__(self, *, listen: bool = True) -> None:
        super().__init__()
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
            self._breakable = False  # once is enough
            raise Preempted

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Counts the time under `name`, and lets it be broken off if it may be.

        Raises:
            Interrupted: SIGTERM came.
        """
        with super().__call__(name), self.during(name):
            yield

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """The same without counting the time."""
        self.phase = name
        if name not in self.INTERRUPTIBLE:
            yield
            return
        try:
            self._breakable = True
            if self.requested:
                raise Preempted
            yield
        finally:
            self._breakable = False
