"""Messages through a pipe: a length of 4 bytes (little-endian), then JSON."""

from __future__ import annotations

import json
import os
import selectors
import time
from typing import Any

_read, _write = os.read, os.write  # bound here: a program may replace those of `os`


def write_frame(descriptor: int, data: bytes) -> None:
    """Write one frame. Raises BrokenPipeError if the reader is gone."""
    unsent = memoryview(len(data).to_bytes(4, "little") + data)
    while unsent:
        unsent = unsent[_write(descriptor, unsent) :]


def read_frame(descriptor: int) -> bytes:
    """Read one frame. Raises EOFError if the stream ends."""
    return _read_exactly(descriptor, int.from_bytes(_read_exactly(descriptor, 4), "little"))


def _read_exactly(descriptor: int, n: int) -> bytes:
    parts = []
    while n > 0:
        part = _read(descriptor, min(n, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        n -= len(part)
    return b"".join(parts)


def send(descriptor: int, value: Any) -> None:
    """Write one message."""
    write_frame(descriptor, json.dumps(value).encode())


def receive(descriptor: int) -> Any:
    """Read the next message."""
    return json.loads(read_frame(descriptor))


def receive_with_deadline(descriptor: int, deadline: float) -> Any:
    """Read the next message; return None if the stream ends or the deadline (monotonic) passes first.

    The sender must send one message at a time.
    """
    os.set_blocking(descriptor, False)
    received = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while selector.select(max(0.0, deadline - time.monotonic())):
            part = os.read(descriptor, 1 << 20)
            received += part
            if len(received) >= 4 and len(received) == 4 + int.from_bytes(received[:4], "little"):
                return json.loads(received[4:])
            if not part:
                break
    return None
