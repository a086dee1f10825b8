"""Circuit breaker and retry budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whorl.errors import ConfigError
from whorl.router.breaker import CircuitBreaker, CircuitState, RetryBudget


def opened(now: float = 0.0, **settings: float) -> CircuitBreaker:
    breaker = CircuitBreaker(**settings)  # type: ignore[arg-type]
    for _ in range(breaker.failure_threshold):
        breaker.admit(now)
        breaker.record_failure(now)
    return breaker


def test_breaker_opens_after_consecutive_failures() -> None:
    breaker = CircuitBreaker(failure_threshold=3)
    for outcome in "ffsff":
        breaker.record_failure(0.0) if outcome == "f" else breaker.record_success()
        assert breaker.allows_request(0.0)
    breaker.record_failure(0.0)
    assert breaker.state(0.0) is CircuitState.OPEN and not breaker.allows_request(0.5)
    with pytest.raises(ConfigError, match="open circuit"):
        breaker.admit(0.5)


def test_half_open_admits_one_probe_and_doubles_wait() -> None:
    breaker = opened(open_seconds=1.0, max_open_seconds=4.0)
    assert breaker.state(1.0) is CircuitState.HALF_OPEN
    breaker.admit(1.0)
    assert not breaker.allows_request(1.0), "one at a time"
    breaker.record_failure(1.0)
    waits, now = [], 1.0
    for _ in range(4):
        waits.append(next(t for t in range(1, 100) if breaker.allows_request(now + t)))
        now += waits[-1]
        breaker.admit(now)
        breaker.record_failure(now)
    assert waits == [2, 4, 4, 4], "each failed probe doubles the wait, up to the longest"
    breaker.admit(now + 4)
    breaker.record_success()
    assert breaker.state(now + 4) is CircuitState.CLOSED
    breaker.record_failure(now + 4)
    assert breaker.allows_request(now + 4), "the count was reset"


def test_cancelled_probe_does_not_lock_the_breaker() -> None:
    breaker = opened()
    breaker.admit(5.0)
    breaker.cancel_probe()
    assert breaker.allows_request(5.0)


@given(st.lists(st.sampled_from(["ask", "good", "bad", "left", "wait"]), max_size=80))
def test_breaker_invariants_hold_for_any_events(events: list[str]) -> None:
    breaker, now, probes = CircuitBreaker(failure_threshold=2, open_seconds=1.0, max_open_seconds=8.0), 0.0, 0
    for event in events:
        half_open = breaker.state(now) is CircuitState.HALF_OPEN
        if event == "wait":
            now += 0.7
        elif event == "ask" and breaker.allows_request(now):
            breaker.admit(now)
            probes += half_open
        elif event == "bad":
            breaker.record_failure(now)
            probes *= not half_open
        elif event in ("good", "left"):
            breaker.record_success() if event == "good" else breaker.cancel_probe()
            probes = 0
        assert probes <= 1
        assert breaker.current_open_seconds <= 8.0
        assert breaker.state(now + 8.0) is not CircuitState.OPEN
        assert (breaker.state(now) is CircuitState.CLOSED) <= (breaker.consecutive_failures < 2)


@given(st.integers(0, 400), st.floats(0, 1), st.integers(0, 20))
def test_retry_budget_bounds_retries(first: int, ratio: float, reserve: int) -> None:
    budget, retries = RetryBudget(ratio, reserve), 0
    for _ in range(first):  # everything fails
        budget.deposit()
        retries += budget.try_spend()
    assert retries <= reserve + ratio * first + 1e-6
    assert retries >= min(first, reserve), "retries are granted while the budget lasts"


def test_breaker_rejects_bad_settings() -> None:
    with pytest.raises(ConfigError, match="failure_threshold 0"):
        CircuitBreaker(failure_threshold=0)
    with pytest.raises(ConfigError, match="ratio 2"):
        RetryBudget(2.0)
