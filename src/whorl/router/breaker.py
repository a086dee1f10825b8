"""Circuit breaker and retry budget. Both are pure: the time is an argument.

    closed --(consecutive failures)--> open --(time)--> half-open --(one success)--> closed
                                         ^-------------------'  one failure doubles the open time

A request to a dead replica makes its client wait for the timeout. So after a few consecutive failures the replica gets no
requests (open). After a while one request at a time is sent as a probe (half-open), so that a recovering replica is not
flooded. Each failed probe doubles the open time (Nygard 2007, "Release It!").

Unlimited retries can turn one slow replica into a full outage: when every request fails, each becomes two. So retries are
paid from a budget that first attempts fill. With `ratio` 0.1, at most a tenth of the traffic is retries in the long run
("Site Reliability Engineering", 2016, chapter 21, "retry budgets").

The subtle point: a probe without a result (its client disconnected) must not leave the breaker half-open. Each `admit` is
followed by exactly one of `record_success`, `record_failure` and `cancel_probe`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from whorl.errors import ConfigError


class CircuitState(StrEnum):
    """Requests that a breaker admits: all, none, one probe."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass
class CircuitBreaker:
    """Circuit breaker of one replica.

    failure_threshold: consecutive failures that open it. open_seconds: time that it stays open, doubled by each failed probe
    up to `max_open_seconds`.
    """

    failure_threshold: int = 3
    open_seconds: float = 1.0
    max_open_seconds: float = 30.0
    consecutive_failures: int = 0
    probing: bool = False
    opened_at: float | None = None  # time of the caller's clock
    current_open_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.failure_threshold < 1 or not 0 < self.open_seconds <= self.max_open_seconds:
            raise ConfigError(
                f"circuit breaker: failure_threshold {self.failure_threshold}, open_seconds {self.open_seconds}, "
                f"max_open_seconds {self.max_open_seconds}",
                expected="failure_threshold >= 1 and 0 < open_seconds <= max_open_seconds",
            )

    def state(self, now: float) -> CircuitState:
        """Return the state at time `now` (seconds of a monotonic clock)."""
        if self.opened_at is None:
            return CircuitState.CLOSED
        return (
            CircuitState.HALF_OPEN if now - self.opened_at >= self.current_open_seconds else CircuitState.OPEN
        )

    def allows_request(self, now: float) -> bool:
        """Return whether a request may be sent, without changing the state."""
        state = self.state(now)
        return state is CircuitState.CLOSED or (state is CircuitState.HALF_OPEN and not self.probing)

    def admit(self, now: float) -> None:
        """Record that a request is sent. Raises ConfigError if `allows_request` is False: a bug of the caller."""
        if not self.allows_request(now):
            raise ConfigError("a request was sent through an open circuit", do="check `allows_request` first")
        self.probing = self.state(now) is CircuitState.HALF_OPEN

    def record_success(self) -> None:
        """Record a response and close the circuit."""
        self.consecutive_failures, self.opened_at, self.probing, self.current_open_seconds = (
            0,
            None,
            False,
            0.0,
        )

    def record_failure(self, now: float) -> None:
        """Record a missing response or an error caused by the replica."""
        self.consecutive_failures += 1
        if self.state(now) is CircuitState.HALF_OPEN:
            self.current_open_seconds = min(self.max_open_seconds, 2 * self.current_open_seconds)
            self.opened_at, self.probing = now, False
        elif self.opened_at is None and self.consecutive_failures >= self.failure_threshold:
            self.opened_at, self.current_open_seconds = now, self.open_seconds

    def cancel_probe(self) -> None:
        """Record that a request ended without a result, because its client disconnected."""
        self.probing = False


@dataclass
class RetryBudget:
    """Token bucket of retries, full at the start: a first attempt adds `ratio`, a retry takes 1."""

    ratio: float = 0.1
    capacity: float = 10.0

    def __post_init__(self) -> None:
        if not (0 <= self.ratio <= 1 and self.capacity >= 0):
            raise ConfigError(
                f"retry budget: ratio {self.ratio}, capacity {self.capacity}",
                expected="a ratio from 0 to 1 and a capacity of at least 0",
            )
        self.tokens = self.capacity

    def deposit(self) -> None:
        """Record a first attempt."""
        self.tokens = min(self.capacity, self.tokens + self.ratio)

    def try_spend(self) -> bool:
        """Take one retry from the budget; return whether it was available."""
        if self.tokens < 1 - 1e-9:
            return False
        self.tokens -= 1
        return True
