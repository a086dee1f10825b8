"""Token buckets for requests and tokens per minute.

A bucket holds at most one minute of its limit and refills at limit / 60 per second. A request consumes 1 from the request
bucket and its prompt length from the token bucket. Generated tokens are consumed when the sequence ends, and may take the
bucket below zero. A burst is therefore at most one minute of prompts, and the long-run mean is the limit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field


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
