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


class Circuit(StrEnum):
    """What a breaker lets through: all, nothing, one probe."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass
class Breaker:
    """Of one replica.

    failures: in a row, that open it; wait: seconds that it then stays open, doubled by each failed probe up to `longest`.
    """

    failures: int = 3
    wait: float = 1.0
    longest: float = 30.0
    failed: int = 0  # in a row
    probing: bool = False
    opened: float | None = None  # when, of the clock that comes in
    current_wait: float = 0.0

    def __post_init__(self) -> None:
        if self.failures < 1 or not 0 < self.wait <= self.longest:
            raise ConfigError(
                f"a breaker with failures = {self.failures}, wait = {self.wait}, longest = {self.longest}",
                expected="at least one failure, and 0 < wait <= longest",
            )

    def state(self, now: float) -> Circuit:
        """What it is at `now` (seconds of any clock that does not go back)."""
        if self.opened is None:
            return Circuit.CLOSED
        return Circuit.HALF_OPEN if now - self.opened >= self.current_wait else Circuit.OPEN

    def ready(self, now: float) -> bool:
        """Whether a request may be sent; changes nothing."""
        state = self.state(now)
        return state is Circuit.CLOSED or (state is Circuit.HALF_OPEN and not self.probing)

    def admit(self, now: float) -> None:
        """A request is sent. Raises ConfigError where `ready` says no: a bug of the caller's."""
        if not self.ready(now):
            raise ConfigError("a request was sent through an open breaker", do="ask `ready` first")
        self.probing = self.state(now) is Circuit.HALF_OPEN

    def success(self) -> None:
        """It answered: closed, whatever it was."""
        self.failed, self.opened, self.probing, self.current_wait = 0, None, False, 0.0

    def failure(self, now: float) -> None:
        """It did not answer, or with an error of its own making."""
        self.failed += 1
        if self.state(now) is Circuit.HALF_OPEN:
            self.current_wait = min(self.longest, 2 * self.current_wait)
            self.opened, self.probing = now, False
        elif self.opened is None and self.failed >= self.failures:
            self.opened, self.current_wait = now, self.wait

    def released(self) -> None:
        """Nothing was learnt: the client went away before the answer came."""
        self.probing = False


@dataclass
class RetryBudget:
    """A bucket that every first attempt adds `ratio` to and every retry takes one from; `reserve` is its size and start."""

    ratio: float = 0.1
    reserve: float = 10.0

    def __post_init__(self) -> None:
        if not (0 <= self.ratio <= 1 and self.reserve >= 0):
            raise ConfigError(
                f"a retry budget of ratio {self.ratio} and reserve {self.reserve}",
                expected="a ratio from 0 to 1, a reserve of 0 or more",
            )
        self.left = self.reserve

    def deposit(self) -> None:
        """A first attempt."""
        self.left = min(self.reserve, self.left + self.ratio)

    def take(self) -> bool:
        """Whether a retry may be made; if so it is paid."""
        if self.left < 1 - 1e-9:
            return False
        self.left -= 1
        return True
