"""The optimum of bandits against arithmetic, brute force and a published figure."""

from __future__ import annotations

import pytest

from whorl.agents.meta.bandit_optimum import FIVE_ARMS, rewards_by_pull
from whorl.cli.jobs.rl_environments import solve


def best(counts: list[tuple[int, int]], pulls: int) -> float:
    """The optimum by a recursion without any sharing of states."""
    if not pulls:
        return 0.0
    values = []
    for arm, (won, lost) in enumerate(counts):
        mean = (won + 1) / (won + lost + 2)
        win, lose = ([*counts[:arm], new, *counts[arm + 1 :]] for new in ((won + 1, lost), (won, lost + 1)))
        values.append(mean * (1 + best(win, pulls - 1)) + (1 - mean) * best(lose, pulls - 1))
    return max(values)


def test_optimum_equals_brute_force() -> None:
    assert rewards_by_pull(((0, 0),) * 2, 2).tolist() == pytest.approx([0.5, (2 / 3 + 1 / 2) / 2])
    for arms, pulls in ((2, 5), (3, 4)):
        found = rewards_by_pull(((0, 0),) * arms, pulls)
        assert found.sum() == pytest.approx(best([(0, 0)] * arms, pulls), abs=1e-12)


def test_solve_prints_the_optimum_of_five_arms(capsys: pytest.CaptureFixture[str]) -> None:
    solve("bandits", None)
    assert rewards_by_pull(FIVE_ARMS, 10).sum() == pytest.approx(6.660, abs=5e-4)
    assert "6.6600" in capsys.readouterr().out
