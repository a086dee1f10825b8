"""Worker processes that outlive a stage: all pools of a process share them, so that a pipeline starts them once.

A worker is a child process with one thread that runs calls until its channel closes. Between stages it is idle; after
`IDLE_SECONDS` it ends. It has the environment, the module path and the folder of its start, so one is ended, not used
again, when these have changed. The start of the first takes 0.3 s (a new interpreter and its imports), in a thread: the
caller may compute meanwhile.
"""

from __future__ import annotations

import atexit
import os
import pickle
import sys
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from whorl.machine.malloc import trim_freed_memory
from whorl.machine.process import Channel, Child

IDLE_SECONDS = 60.0
REST = b"rest"  # a message: no call follows soon


class Crew:
    """The workers of this process. Threads may share it; a fork of the process begins without workers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._idle: list[Child] = []
        self._owner, self._setting = os.getpid(), _setting()
        self._starter: threading.Thread | None = None

    @property
    def is_starting(self) -> bool:
        """Whether a thread starts workers."""
        return self._owner == os.getpid() and self._starter is not None and self._starter.is_alive()

    def start(self, n: int, modules: Collection[str]) -> None:
        """Start n idle workers in a thread, unless one is at it; `take` returns each when it has started.

        Args:
            modules: imported once, before the workers are forked.
        """
        with self._lock:
            self._check_setting()
            if not self.is_starting:
                arguments = n - len(self._idle), self._setting, modules
                self._starter = threading.Thread(target=self._add, args=arguments, daemon=True)
                self._starter.start()

    def _add(self, n: int, setting: Any, modules: Collection[str]) -> None:
        for _ in range(n):
            try:
                child = new_worker(modules)
            except OSError:  # no memory or no process number, which the caller finds too if it needs one
                return
            with self._lock:
                if setting == self._setting:
                    self._idle.append(child)
                    continue
            child.close()

    def take(self, n: int) -> list[Child]:
        """Return at most n idle workers, which belong to the caller until it returns them with `give`."""
        n = max(n, 0)
        with self._lock:
            self._check_setting()
            found, gone = list[Child](), list[Child]()
            for child in self._idle:  # one poll each: a worker may end between two
                (found if child.poll() is None else gone).append(child)
            taken, self._idle = found[:n], found[n:]
        for child in gone:
            child.close()
        return taken

    def give(self, child: Child) -> None:
        """Return a worker that has nothing to do."""
        try:
            child.channel.send_bytes(pickle.dumps(REST))
        except ConnectionError:  # it ended
            child.close()
            return
        with self._lock:
            self._idle.append(child)

    def close(self) -> None:
        """End the idle workers, and first those that start."""
        if self._owner == os.getpid():
            if self._starter is not None:
                self._starter.join(5.0)
            with self._lock:
                idle, self._idle = self._idle, []
            for child in idle:
                child.channel.close()
            for child in idle:
                child.close(1.0)

    def _check_setting(self) -> None:
        if self._owner != os.getpid():
            self._forget()
        elif self._setting != (now := _setting()):
            for child in self._idle:
                child.close()
            self._idle, self._setting = [], now


def new_worker(modules: Collection[str] = ()) -> Child:
    """Start a worker. modules: imported before, where a fork server exists."""
    return Child(f"{__name__}:serve_calls", name="corpus worker", preload=(__name__, *modules))


def serve_calls(channel: Channel) -> None:
    """Run calls from the channel until it closes or is silent for `IDLE_SECONDS`; answer each with None or its error."""
    while channel.poll(IDLE_SECONDS):
        call: Callable[[], object] | bytes = channel.recv()
        if isinstance(call, bytes):
            trim_freed_memory()
            continue
        try:
            call()
        except Exception as error:
            channel.send(_picklable(error))
        else:
            channel.send(None)


def _setting() -> Any:
    try:
        folder = str(Path.cwd())
    except OSError:  # it was deleted
        folder = ""
    return dict(os.environ), list(sys.path), folder


def _picklable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


CREW = Crew()
atexit.register(CREW.close)
