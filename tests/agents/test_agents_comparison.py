"""Comparison of agents on one environment and on several, from results written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from whorl.agents.comparison import AgentComparison, TrainedAgent, compare
from whorl.errors import ConfigError


def agent(name: str, environment: str, returns: Sequence[float], **result: Any) -> TrainedAgent:
    curves = [{"seed": s, "return": [[0.0, 0.0], [100.0, r]]} for s, r in enumerate(returns)]
    fields = {"environment": environment, "returns": [*returns], "episodes": 20, "curves": curves, **result}
    return TrainedAgent(name, f"rl/{name}", fields)


def compared(*agents: TrainedAgent) -> AgentComparison:
    return compare(agents, np.random.default_rng(0))


def test_one_environment_compares_raw_returns() -> None:
    found = compared(agent("ppo", "Pole", [400.0, 500.0, 450.0]), agent("dqn", "Pole", [100.0, 450.0]))
    assert found.scores["ppo"].mean == found.returns["ppo", "Pole"].mean == pytest.approx(450)
    assert found.improvement["ppo", "dqn"].mean == pytest.approx((4 + 0.5) / 6)
    assert found.curves["Pole"]["dqn"].mean[-1] == pytest.approx(275)
    assert (
        found.profiles["ppo"].x[[0, -1]].tolist() == [100.0, 500.0] and found.profiles["ppo"].mean[0] == 1.0
    )


def test_returns_of_several_environments_are_scaled() -> None:
    found = compared(
        agent("ppo", "Pole", [500.0, 500.0]), agent("dqn", "Pole", [0.0, 250.0]),
        agent("ppo", "Lake", [0.5, 0.7]), agent("dqn", "Lake", [0.7, 0.7]),
    )  # fmt: skip
    # ppo has 1, 1, 0 and 1, dqn 0, 0.5, 1 and 1: the middle halves are (1, 1) and (0.5, 1).
    assert found.scores["ppo"].mean == pytest.approx(1.0) and found.scores["dqn"].mean == pytest.approx(0.75)
    assert found.returns["ppo", "Lake"].mean == pytest.approx(0.6)
    assert found.improvement["ppo", "dqn"].mean == pytest.approx((1.0 + 0.25) / 2)
    assert found.environments == ["Pole", "Lake"] and found.names == ["ppo", "dqn"]


def test_one_seed_has_a_return_and_no_interval() -> None:
    found = compared(agent("ppo", "Pole", [400.0]), agent("dqn", "Pole", [100.0, 450.0]))
    assert found.scores["ppo"].low is None and found.curves["Pole"]["ppo"].low is None
    assert found.scores["dqn"].low == 100.0 and found.improvement["ppo", "dqn"].low is None


@pytest.mark.parametrize(
    ("agents", "message"),
    [
        ([agent("ppo", "Pole", [1.0])], "1 agents to compare"),
        ([agent("ppo", "Pole", [1.0]), agent("dqn", "Pole", [1.0], episodes=5)], "rl/ppo 20, rl/dqn 5"),
        (
            [agent("ppo", "Pole", [1.0]), agent("dqn", "Pole", [1.0]), agent("dqn", "Lake", [1.0])],
            "no agent ppo on Lake",
        ),
    ],
)
def test_incomparable_agents_are_refused(agents: list[TrainedAgent], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compared(*agents)
