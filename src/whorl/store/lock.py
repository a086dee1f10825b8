"""Locks with one builder per address that a dead owner cannot hold.

On a local file system the lock is `flock` on a file; the kernel releases it when its owner dies. There are two
subtleties. A forked child inherits the open file and would hold the lock after its parent's death, so children close it
right after the fork. `gc` may remove the lock file between open and lock, so `acquire` checks that the path still names
the locked file.

Object stores have no such lock. There the owner rewrites a small heartbeat object, and an owner whose heartbeat has not
changed for a minute counts as dead. In a rare race two builders both acquire the lock. The work is then done twice, but
nothing is corrupted: each uploads to a separate folder, and the manifest, written last, names the valid one (see
`remote`).
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
    """An exclusive lock on a local path. The file holds the owner's identity, for messages of waiting processes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1

    def acquire(self, *, info: Mapping[str, Any] | None = None) -> bool:
        """Try once; return whether the lock is acquired. Raises OSError if the folder is not writable."""
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
            os.close(descriptor)  # removed after the open: lock the new file
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps({**owner_info(), **(info or {})}).encode())
        self._descriptor = descriptor
        _held_descriptors.add(descriptor)
        return True

    def wait(
        self, *, info: Mapping[str, Any] | None = None, on_wait: Callable[[str], None] | None = None
    ) -> None:
        """Wait for the lock and acquire it. `on_wait` is called once, with a text that names the owner."""
        reported = False
        while not self.acquire(info=info):
            if not reported and on_wait is not None:
                owner = self.owner()
                on_wait(f"waiting for process {owner.get('pid', '?')} on {owner.get('host', '?')}")
                reported = True
            time.sleep(POLL_SECONDS)

    def owner(self) -> dict[str, Any]:
        """Return the identity that the current or last owner wrote."""
        try:
            owner = json.loads(self.path.read_text())
        except (OSError, ValueError):  # just released, or not yet written
            return {}
        return dict(owner)

    def release(self, *, remove: bool = True) -> None:
        """Release the lock and, by default, remove its file, so that lock files do not accumulate."""
        if self._descriptor < 0:
            return
        if remove:
            self.path.unlink(missing_ok=True)
        _held_descriptors.discard(self._descriptor)
        os.close(self._descriptor)
        self._descriptor = -1


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock on a path; False if the folder is not writable."""
    lock = FileLock(path)
    try:
        is_free = not path.exists() or lock.acquire()
    except OSError:
        is_free = True
    lock.release()
    return not is_free


class ObjectStore(Protocol):
    """The object-store operations that a heartbeat needs."""

    def read(self, path: str) -> bytes | None: ...
    def write(self, path: str, data: bytes) -> None: ...
    def remove(self, path: str) -> None: ...


class HeartbeatLock:
    """A lock for object stores: an object that its owner rewrites periodically.

    An owner is alive while its heartbeat *changes*, measured on the waiting host's clock. Differing clocks of hosts
    therefore have no effect.
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
        """Wait for the lock and acquire it. A heartbeat that has not changed for `timeout` seconds is taken over."""
        last, since, reported = b"", time.monotonic(), False
        while True:
            beat = self.objects.read(self.path)
            if beat != last:
                last, since = beat or b"", time.monotonic()
            if beat is None or time.monotonic() - since > self.timeout:
                self._write()
                time.sleep(
                    min(1.0, self.interval / 10)
                )  # a simultaneous write of another builder is visible by now
                if self._is_owner():
                    break
                continue
            if not reported and on_wait is not None:
                on_wait("waiting for another builder that uses the same store")
                reported = True
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
