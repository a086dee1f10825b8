"""The owner's side of a prefill or decode process.

Messages are objects, some with the descriptor of a block of KV pages (`kv_transfer.py`): the receiver maps the same
memory, without a copy. The subtle point is deadlock: two processes must not both block in a send. `WorkerProcess` sends
from its own thread, so the owner never blocks on a busy process.
"""

from __future__ import annotations

import os
import queue
import threading
from typing import Any

from whorl.machine.process import Child


class WorkerProcess:
    """A process that calls a function with its end of a channel.

    Args:
        name: for messages.
        entry: "module:function"; it takes a `Channel`.
        cores: CPU cores of the process; () for any.
    """

    def __init__(self, name: str, entry: str, cores: tuple[int, ...] = ()) -> None:
        self.name, self.cores, self.ready = name, cores, False  # ready: set by the owner
        self.process = Child(entry, name=name, cores=cores, preload=(entry.partition(":")[0],))
        self.channel = self.process.channel
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
                    self.channel.send_with_fd(message, fd)
            except OSError:
                broken = True  # the receiver detects the closed channel
            finally:
                if fd is not None:
                    os.close(fd)

    def exit_description(self) -> str:
        """Describe the exit of the process; kills it if it closed its channel but still runs."""
        if self.process.wait(5.0) is None:
            self.process.kill()
        return self.process.exit_description()

    def close(self) -> None:
        """Close the channel; returns when process and thread have ended."""
        self.channel.shutdown()  # also wakes a blocked send
        self._outgoing.put(None)
        self._sender.join()
        self.process.close()
