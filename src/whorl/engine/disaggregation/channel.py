"""Objects and file descriptors between two processes, over a socket pair.

A frame is a length, a flag and a pickle (both ends are processes of this engine, so the input is trusted). A descriptor is
sent with a frame as ancillary data (SCM_RIGHTS): the receiver gets its own descriptor of the same memory, for example a
block of KV pages (`engine/disaggregation/kv_transfer.py`), without a copy.

The subtle point is deadlock: two processes must not both block in a send. `WorkerProcess` sends from its own thread, so the
owner never blocks on a busy process.
"""

from __future__ import annotations

import os
import pickle
import queue
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any

_FRAME = struct.Struct("<QB")  # length of the payload, whether a descriptor follows


class Channel:
    """Objects, each with an optional descriptor, over one end of a socket pair."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def send(self, message: Any, fd: int | None = None) -> None:
        """Send an object; blocks until the socket has taken all of it. The caller keeps the descriptor."""
        data = pickle.dumps(message)
        head = _FRAME.pack(len(data), fd is not None)
        if fd is None:
            self.sock.sendall(head + data)
        else:
            sent = socket.send_fds(self.sock, [head], [fd])
            self.sock.sendall(head[sent:] + data)

    def receive(self) -> tuple[Any, int | None]:
        """Return the next object and its descriptor, which the caller then owns.

        Raises:
            EOFError: the other end is closed.
        """
        try:
            head, fds, _, _ = socket.recv_fds(self.sock, _FRAME.size, 1)
            head += self._recv_exactly(_FRAME.size - len(head)) if head else b""
            if not head:
                raise EOFError
            message = pickle.loads(self._recv_exactly(_FRAME.unpack(head)[0]))
        except ConnectionError:
            raise EOFError from None
        return message, fds[0] if fds else None

    def poll(self, seconds: float | None) -> bool:
        """Whether an object can be received, after waiting at most `timeout` seconds (None: until there is one)."""
        return bool(select.select([self.sock], [], [], seconds)[0])

    def _recv_exactly(self, n: int) -> bytes:
        parts = []
        while n:
            part = self.sock.recv(min(n, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            n -= len(part)
        return b"".join(parts)


class WorkerProcess:
    """A process that calls a function with its end of a channel.

    Args:
        name: for messages.
        entry: "module:function"; it takes a `Channel`.
        cores: CPU cores of the process; () for any.
    """

    def __init__(self, name: str, entry: str, cores: tuple[int, ...] = ()) -> None:
        self.name, self.cores, self.ready = name, cores, False  # ready: set by the owner
        own_end, child_end = socket.socketpair()
        with child_end:
            self.popen = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    _CHILD_SCRIPT,
                    str(child_end.fileno()),
                    ",".join(map(str, cores)),
                    *entry.split(":"),
                ],
                pass_fds=(child_end.fileno(),),
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            )
        self.channel = Channel(own_end)
        self._outgoing: queue.SimpleQueue[tuple[Any, int | None] | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send, name=f"whorl-{name}", daemon=True)
        self._sender.start()

    def post(self, message: Any, fd: int | None = None) -> None:
        """Queue a message. The descriptor is closed once it is sent or cannot be sent."""
        self._outgoing.put((message, fd))

    def _send(self) -> None:
        broken = False
        while (item := self._outgoing.get()) is not None:
            message, fd = item
            try:
                if not broken:
                    self.channel.send(message, fd)
            except OSError:
                broken = True  # the receiver detects the closed channel
            finally:
                if fd is not None:
                    os.close(fd)

    def exit_description(self) -> str:
        """Describe the exit of the process; kills it if it closed its socket but still runs."""
        code = self._wait()
        by = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"{self.name} (process {self.popen.pid}) {by}"

    def close(self) -> None:
        """Close the channel; returns when process and thread have ended."""
        with suppress(OSError):
            self.channel.sock.shutdown(socket.SHUT_RDWR)  # also wakes a blocked send
        self._outgoing.put(None)
        self._sender.join()
        self.channel.sock.close()
        self._wait()

    def _wait(self) -> int:
        try:
            return self.popen.wait(5.0)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            return self.popen.wait()


# argv: socket descriptor, cores ("" for any), module, function. SIGINT (Ctrl-C) is left to the owner.
_CHILD_SCRIPT = """
import importlib, os, signal, socket, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
if sys.argv[2] and hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {int(c) for c in sys.argv[2].split(",")})
from whorl.engine.disaggregation.channel import Channel
function = getattr(importlib.import_module(sys.argv[3]), sys.argv[4])
function(Channel(socket.socket(fileno=int(sys.argv[1]))))
"""
