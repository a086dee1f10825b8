"""Values through a pipe: a length of 4 bytes (little-endian), then JSON."""

from __future__ import annotations

import json
import os
import selectors
import time
from typing import Any


def read_exactly(descriptor: int, n: int) -> bytes:
    """n bytes, or fewer where the pipe ends."""
    parts: list[bytes] = []
    while n > 0 and (part := os.read(descriptor, n)):
        parts.append(part)
        n -= len(part)
    return b"".join(parts)


def send(descriptor: int, value: Any) -> None:
    """Raises BrokenPipeError when nobody reads."""
    data = json.dumps(value).encode()
    left = memoryview(len(data).to_bytes(4, "little") + data)
    while left:
        left = left[os.write(descriptor, left) :]


def receive(descriptor: int) -> Any:
    """The next value; raises EOFError at the stream's end."""
    size = read_exactly(descriptor, 4)
    data = read_exactly(descriptor, int.from_bytes(size, "little"))
    if len(size) < 4 or len(data) < int.from_bytes(size, "little"):
        raise EOFError
    return json.loads(data)


def receive_with_deadline(descriptor: int, deadline: float) -> Any:
    """The next value, of a sender that sends one at a time; None when the stream ends first, or the time (monotonic)."""
    os.set_blocking(descriptor, False)
    heard = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while selector.select(max(0.0, deadline - time.monotonic())):
            part = os.read(descriptor, 1 << 20)
            heard += part
            if len(heard) >= 4 and len(heard) == 4 + int.from_bytes(heard[:4], "little"):
                return json.loads(heard[4:])
            if not part:
                break
    return None
