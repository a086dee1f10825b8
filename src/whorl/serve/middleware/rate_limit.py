"""Token buckets for requests and tokens per minute.

A bucket holds at most one minute of its limit and refills at limit / 60 per second. A request consumes 1 from the request
bucket. From the token bucket it consumes its prompt and its `max_tokens` when it starts, and gets back what it did not
generate. It may start while the prompt alone is available, so the bucket may go below zero by the output of one request.

The processes of `whorl serve --replicas` share the levels of a key in a small file, so its limits hold for all together.
"""

from __future__ import annotations

import fcntl
import math
import os
import struct
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class TokenBucket:
    """Token bucket of `limit` units per minute, full at the start. `clock` returns seconds."""

    limit: int | None
    clock: Callable[[], float] = time.monotonic
    available: float = field(init=False)
    last_refill: float = field(init=False)

    def __post_init__(self) -> None:
        self.available, self.last_refill = float(self.limit or 0), self.clock()

    def seconds_until(self, amount: float) -> float:
        """Return the seconds until `amount` is available: 0 if it is now, inf if it exceeds the limit."""
        if self.limit is None:
            return 0.0
        self._refill()
        if amount > self.limit:
            return math.inf
        return max(0.0, (amount - self.available) * 60 / self.limit)

    def consume(self, amount: float) -> None:
        """Remove `amount`; the bucket may go below zero."""
        if self.limit is not None:
            self._refill()
            self.available -= amount

    @property
    def seconds_until_full(self) -> float:
        """Seconds until the bucket is full."""
        return 0.0 if self.limit is None else max(0.0, (self.limit - self.available) * 60 / self.limit)

    def _refill(self) -> None:
        assert self.limit is not None
        now = self.clock()
        self.available = min(self.limit, self.available + (now - self.last_refill) * self.limit / 60)
        self.last_refill = now


class SharedLevels:
    """The levels of buckets in a file that several processes read and write.

    All use `time.monotonic`, which on Linux is one clock for all processes.
    """

    def __init__(self, path: Path, buckets: Sequence[TokenBucket]) -> None:
        self.buckets, self._format = buckets, struct.Struct(f"{2 * len(buckets)}d")
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        weakref.finalize(self, os.close, self._file)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Load the levels, hold the file's lock, and store the levels at the end."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            stored = os.pread(self._file, self._format.size, 0)
            if len(stored) == self._format.size:
                levels = self._format.unpack(stored)
                for n, bucket in enumerate(self.buckets):
                    bucket.available, bucket.last_refill = levels[2 * n : 2 * n + 2]
            yield
            levels = tuple(x for bucket in self.buckets for x in (bucket.available, bucket.last_refill))
            os.pwrite(self._file, self._format.pack(*levels), 0)
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
