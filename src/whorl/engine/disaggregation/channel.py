"""Objects and file descriptors between two processes: a socket pair, and who holds its ends.

A frame is its length, a flag and a pickle (both ends are our own processes: nothing that is received here comes from
outside). A descriptor travels beside a frame as ancillary data (SCM_RIGHTS): the kernel gives the receiver one of its own,
so what it leads to, a block of pages (`engine/disaggregation/kv_transfer.py`), is shared and not sent.

The subtle part is that nobody may wait for somebody who waits for him: `WorkerProcess` sends from a thread of its own, so
its owner never blocks on a process that is busy sending.
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

_FRAME = struct.Struct("<QB")  # length of what follows, whether a descriptor comes along


class Channel:
    """Objects, and a descriptor beside each if need be, over one end of a socket pair."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def send(self, message: Any, fd: int | None = None) -> None:
        """Waits until the socket has taken all of it; the descriptor stays the caller's."""
        data = pickle.dumps(message)
        head = _FRAME.pack(len(data), fd is not None)
        if fd is None:
            self.sock.sendall(head + data)
        else:
            sent = socket.send_fds(self.sock, [head], [fd])
            self.sock.sendall(head[sent:] + data)

    def receive(self) -> tuple[Any, int | None]:
        """The next object, and the descriptor that came with it, now the caller's.

        Raises:
            EOFError: the other end is gone.
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
        """Whether something is there to be received, waiting at most so long (None: until there is)."""
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
    """A process that calls `function` (of `module`) with its end of a channel.

    Args:
        name: for messages.
        entry: "module:function"; it takes a `Channel`.
        cores: that it runs on; () for any.
    """

    def __init__(self, name: str, entry: str, cores: tuple[int, ...] = ()) -> None:
        self.name, self.cores, self.ready = name, cores, False  # ready: its owner's note that it said so
        ours, theirs = socket.socketpair()
        with theirs:
            self.popen = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    _CHILD_SCRIPT,
                    str(theirs.fileno()),
                    ",".join(map(str, cores)),
                    *entry.split(":"),
                ],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            )
        self.channel = Channel(ours)
        self._outgoing: queue.SimpleQueue[tuple[Any, int | None] | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send, name=f"whorl-{name}", daemon=True)
        self._sender.start()

    def post(self, message: Any, fd: int | None = None) -> None:
        """The descriptor is closed once it is sent, or cannot be."""
        self._outgoing.put((message, fd))

    def _send(self) -> None:
        broken = False
        while (item := self._outgoing.get()) is not None:
            message, fd = item
            try:
                if not broken:
                    self.channel.send(message, fd)
            except OSError:
                broken = True  # whoever receives from it will see that it is gone
            finally:
                if fd is not None:
                    os.close(fd)

    def exit_description(self) -> str:
        """In words, how it ended; it is ended by force if it closed its socket and stays."""
        code = self._wait()
        by = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"{self.name} (process {self.popen.pid}) {by}"

    def close(self) -> None:
        """Returns when process and thread are gone."""
        with suppress(OSError):
            self.channel.sock.shutdown(socket.SHUT_RDWR)  # also wakes a send that waits
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


# argv: the socket's descriptor, cores ("" for any), module, function. A terminal's Ctrl-C is the owner's to answer.
_CHILD_SCRIPT = """
import importlib, os, signal, socket, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
if sys.argv[2] and hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {int(c) for c in sys.argv[2].split(",")})
from whorl.engine.disaggregation.channel import Channel
function = getattr(importlib.import_module(sys.argv[3]), sys.argv[4])
function(Channel(socket.socket(fileno=int(sys.argv[1]))))
"""
