"""When to stop asking a replica that fails, and how many second attempts a fleet can bear. Both pure: the clock comes in.

    closed --(failures in a row)--> open --(time)--> half-open --(one good answer)--> closed
                                      ^------------------'  one bad answer, and a longer wait than before

A request that waits for a dead replica's timeout is lost twice: its client waits, and it holds a place. So after a few
failures in a row the replica is not asked at all (open), and after a while a single request is let through to see
(half-open): one probe at a time, or the crowd that waited would fall on a replica that has just come up. Each failed probe
doubles the wait. (Nygard 2007, "Release It!", the circuit breaker.)

Second attempts are what turns one slow replica into an outage of all: when everything fails, every request becomes two. So
they are paid from a budget that first attempts fill: with `ratio` 0.1 at most a tenth of the traffic, over the long run, is
retries, whatever happens ("Site Reliability Engineering", 2016, chapter 21, "retry budgets").

The subtle part: a probe whose answer never comes (its client went away) must not leave the breaker half-open for ever. Who
asks with `admit` ends with exactly one of `success`, `failure` and `released`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from whorl.errors import ConfigError


class CircuitState(StrEnum):
    """What a breaker lets through: all, nothing, one probe."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass
class CircuitBreaker:
    """Of one replica.

    failures: in a row, that open it; wait: seconds that it then stays open, doubled by each failed probe up to `longest`.
    """

    failure_threshold: int = 3
    open_seconds: float = 1.0
    max_open_seconds: float = 30.0
    consecutive_failures: int = 0  # in a row
    probing: bool = False
    opened_at: float | None = None  # when, of the clock that comes in
    current_open_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.failure_threshold < 1 or not 0 < self.open_seconds <= self.max_open_seconds:
            raise ConfigError(
                f"a breaker with failures = {self.failure_threshold}, wait = {self.open_seconds}, longest = {self.max_open_seconds}",
                expected="at least one failure, and 0 < wait <= longest",
            )

    def state(self, now: float) -> CircuitState:
        """What it is at `now` (seconds of any clock that does not go back)."""
        if self.opened_at is None:
            return CircuitState.CLOSED
        return (
            CircuitState.HALF_OPEN if now - self.opened_at >= self.current_open_seconds else CircuitState.OPEN
        )

    def allows_request(self, now: float) -> bool:
        """Whether a request may be sent; changes nothing."""
        state = self.state(now)
        return state is CircuitState.CLOSED or (state is CircuitState.HALF_OPEN and not self.probing)

    def admit(self, now: float) -> None:
        """A request is sent. Raises ConfigError where `ready` says no: a bug of the caller's."""
        if not self.allows_request(now):
            raise ConfigError("a request was sent through an open breaker", do="ask `ready` first")
        self.probing = self.state(now) is CircuitState.HALF_OPEN

    def record_success(self) -> None:
        """It answered: closed, whatever it was."""
        self.consecutive_failures, self.opened_at, self.probing, self.current_open_seconds = (
            0,
            None,
            False,
            0.0,
        )

    def record_failure(self, now: float) -> None:
        """It did not answer, or with an error of its own making."""
        self.consecutive_failures += 1
        if self.state(now) is CircuitState.HALF_OPEN:
            self.current_open_seconds = min(self.max_open_seconds, 2 * self.current_open_seconds)
            self.opened_at, self.probing = now, False
        elif self.opened_at is None and self.consecutive_failures >= self.failure_threshold:
            self.opened_at, self.current_open_seconds = now, self.open_seconds

    def cancel_probe(self) -> None:
        """Nothing was learnt: the client went away before the answer came."""
        self.probing = False


@dataclass
class RetryBudget:
    """A bucket that every first attempt adds `ratio` to and every retry takes one from; `reserve` is its size and start."""

    ratio: float = 0.1
    capacity: float = 10.0

    def __post_init__(self) -> None:
        if not (0 <= self.ratio <= 1 and self.capacity >= 0):
            raise ConfigError(
                f"a retry budget of ratio {self.ratio} and reserve {self.capacity}",
                expected="a ratio from 0 to 1, a reserve of 0 or more",
            )
        self.tokens = self.capacity

    def deposit(self) -> None:
        """A first attempt."""
        self.tokens = min(self.capacity, self.tokens + self.ratio)

    def try_spend(self) -> bool:
        """Whether a retry may be made; if so it is paid."""
        if self.tokens < 1 - 1e-9:
            return False
        self.tokens -= 1
        return True
