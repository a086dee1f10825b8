"""The routing policy in simulated time: cache hits, balance and TTFT against other policies."""

from __future__ import annotations

import pytest
from bench.router._simulation import POLICIES, Outcome, conversations, simulate


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    names = ("round robin", "least requests", "longest prefix", "whorl")
    return {name: simulate(conversations(60, 8.0, 1, prompts=12), POLICIES[name], n=4) for name in names}


def test_policy_increases_cache_hits(outcomes: dict[str, Outcome]) -> None:
    """Over several seeds: a single one changes the ratio by a tenth."""
    names = ("round robin", "least requests", "whorl")
    hits = {name: [outcomes[name].hit] for name in names}
    for seed in (2, 3):
        for name in names:
            hits[name].append(simulate(conversations(60, 8.0, seed, prompts=12), POLICIES[name], n=4).hit)
    found = {name: sum(each) for name, each in hits.items()}
    assert found["whorl"] > 1.3 * max(found["round robin"], found["least requests"])


def test_policy_balances_load(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["whorl"].imbalance < outcomes["longest prefix"].imbalance
    assert outcomes["whorl"].imbalance < 1.5


def test_policy_reduces_ttft(outcomes: dict[str, Outcome]) -> None:
    for other in ("round robin", "least requests"):
        assert outcomes["whorl"].percentile(0.5) < 0.6 * outcomes[other].percentile(0.5)
        assert outcomes["whorl"].percentile(0.95) < outcomes[other].percentile(0.95)


def test_simulation_is_deterministic(outcomes: dict[str, Outcome]) -> None:
    again = simulate(conversations(60, 8.0, 1, prompts=12), POLICIES["whorl"], n=4)
    assert again == outcomes["whorl"]
