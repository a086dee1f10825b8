"""Messages through a pipe: a length of 4 bytes (little-endian), then JSON."""

from __future__ import annotations

import json
import os
import selectors
import time
from typing import Any


def read_exactly(descriptor: int, n: int) -> bytes:
    """Read n bytes, or fewer if the pipe ends."""
    parts: list[bytes] = []
    while n > 0 and (part := os.read(descriptor, n)):
        parts.append(part)
        n -= len(part)
    return b"".join(parts)


def send(descriptor: int, value: Any) -> None:
    """Write one message. Raises BrokenPipeError if the reader is gone."""
    data = json.dumps(value).encode()
    unsent = memoryview(len(data).to_bytes(4, "little") + data)
    while unsent:
        unsent = unsent[os.write(descriptor, unsent) :]


def receive(descriptor: int) -> Any:
    """Read the next message. Raises EOFError at the end of the stream."""
    size = read_exactly(descriptor, 4)
    data = read_exactly(descriptor, int.from_bytes(size, "little"))
    if len(size) < 4 or len(data) < int.from_bytes(size, "little"):
        raise EOFError
    return json.loads(data)


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
