"""One builder per address: locks that a dead owner cannot hold.

On a local file system the lock is `flock` on a file: the kernel releases it when its owner dies, however it
dies. Two subtleties. A forked child inherits the open file and would keep the lock alive after its parent's
death, so children close it right after the fork. And a lock file may be removed (by `gc`) between our
opening it and our locking it, so after locking we check that the path still names the file that we hold.

Object stores have no such lock. There the owner writes a small heartbeat object again and again, and one
that has stood still for a minute counts as dead. Two contenders may, in a rare race, both believe that they
won: then the work is done twice, but nothing is corrupted, since each uploads under a folder of its own and
only the manifest, written last, says which folder counts (see `remote`).
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

POLL_SECONDS = 0.1
HEARTBEAT_SECONDS = 10.0
HEARTBEAT_TIMEOUT_SECONDS = 60.0

_held_descriptors: set[int] = set()


def _close_in_child() -> None:
    for descriptor in _held_descriptors:
        os.close(descriptor)
    _held_descriptors.clear()


os.register_at_fork(after_in_child=_close_in_child)


def owner_info() -> dict[str, Any]:
    return {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}


class FileLock:
    """An exclusive lock on a local path. What the owner writes into it tells those who wait whom they wait
    for.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1

    def acquire(self, *, info: Mapping[str, Any] | None = None) -> bool:
        """Try once; True if it is ours now. Raises OSError when the folder cannot be written."""
        while True:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                return False
            try:
                current = self.path.stat().st_ino == os.fstat(descriptor).st_ino
            except FileNotFoundError:
                current = False
            if current:
                break
            os.close(descriptor)  # removed under our feet: lock the new one
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps({**owner_info(), **(info or {})}).encode())
        self._descriptor = descriptor
        _held_descriptors.add(descriptor)
        return True

    def wait(
        self, *, info: Mapping[str, Any] | None = None, on_wait: Callable[[str], None] | None = None
    ) -> None:
        """Take the lock, however long it takes; `on_wait` is told once whom we wait for."""
        told = False
        while not self.acquire(info=info):
            if not told and on_wait is not None:
                owner = self.owner()
                on_wait(f"waiting for process {owner.get('pid', '?')} on {owner.get('host', '?')}")
                told = True
            time.sleep(POLL_SECONDS)

    def owner(self) -> dict[str, Any]:
        """What the present (or last) owner wrote about itself."""
        try:
            found = json.loads(self.path.read_text())
        except (OSError, ValueError):  # released just now, or about to be written
            return {}
        return dict(found)

    def release(self, *, remove: bool = True) -> None:
        """Give it up; the file goes too, so that locks do not pile up."""
        if self._descriptor < 0:
            return
        if remove:
            self.path.unlink(missing_ok=True)
        _held_descriptors.discard(self._descriptor)
        os.close(self._descriptor)
        self._descriptor = -1


class ObjectStore(Protocol):
    """The little of an object store that a heartbeat needs."""

    def read(self, path: str) -> bytes | None: ...
    def write(self, path: str, data: bytes) -> None: ...
    def remove(self, path: str) -> None: ...


class HeartbeatLock:
    """A lock for stores without locks: an object that its owner keeps rewriting.

    Liveness is judged by whether the beat *changes* while we watch, on our own clock, so that hosts whose
    clocks disagree do not rob each other.
    """

    def __init__(
        self,
        objects: ObjectStore,
        path: str,
        *,
        interval: float = HEARTBEAT_SECONDS,
        timeout: float = HEARTBEAT_TIMEOUT_SECONDS,
    ) -> None:
        self.objects, self.path, self.interval, self.timeout = objects, path, interval, timeout
        self.token = uuid.uuid4().hex
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def wait(self, *, on_wait: Callable[[str], None] | None = None) -> None:
        """Take the lock; a beat that stands still for `dead_after` seconds is taken over."""
        last, since, told = b"", time.monotonic(), False
        while True:
            beat = self.objects.read(self.path)
            if beat != last:
                last, since = beat or b"", time.monotonic()
            if beat is None or time.monotonic() - since > self.timeout:
                self._write()
                time.sleep(min(1.0, self.interval / 10))  # a rival who wrote at the same moment shows by now
                if self._is_owner():
                    break
                continue
            if not told and on_wait is not None:
                on_wait("waiting for another builder that uses the same store")
                told = True
            time.sleep(min(1.0, self.interval / 5))
        self._thread = threading.Thread(target=self._run_heartbeat, name="heartbeat", daemon=True)
        self._thread.start()

    def release(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            if self._is_owner():
                self.objects.remove(self.path)

    def _is_owner(self) -> bool:
        beat = self.objects.read(self.path)
        return beat is not None and json.loads(beat)["token"] == self.token

    def _write(self) -> None:
        beat = {"token": self.token, **owner_info()}
        self.objects.write(self.path, json.dumps(beat).encode())

    def _run_heartbeat(self) -> None:
        while not self._stop.wait(self.interval):
            self._write()
