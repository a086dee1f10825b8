"""`whorl rl solve`: what it prints, its page, errors."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.cli import invoke, succeed


def test_exact_solution_is_printed_as_table_and_map(tmp_path: Path) -> None:
    lines = succeed(tmp_path, "rl", "solve", "FrozenLake-v1").output.splitlines()
    assert lines[0] == "FrozenLake-v1: 16 states, 4 actions, discount 0.99"
    exact, swept = lines[2].split(), lines[3].split()
    assert exact[0] == "policy-iteration" and exact[3:6] == ["0.5420", "0.7402", "0"]
    assert swept[0] == "value-iteration" and swept[3:5] == ["0.5420", "0.7402"] and float(swept[5]) < 1e-10
    assert lines[6].startswith("← ↑ ↑ ↑") and lines[7].startswith("← H ← H") and "0.863" in lines[9]


def test_budget_and_page_of_a_grid_with_costs(tmp_path: Path) -> None:
    arguments = ("rl", "solve", "CostlyGrid-v0", "--discount", 1, "--budget", 1, "--out", "costs.html")
    output = succeed(tmp_path, *arguments).output
    row = next(line for line in output.splitlines() if line.startswith("cost up to 1"))
    assert row.split()[4:6] == ["linear", "program"] and float(row.split()[8]) == pytest.approx(1, abs=0.01)
    page = (tmp_path / "costs.html").read_text()
    assert page.count("--s:") >= 23 and ">↑<small>" in page and "linear program" in page


def test_learned_methods_have_intervals(tmp_path: Path) -> None:
    chosen = (
        "--method",
        "q-learning",
        "--method",
        "value-iteration",
        "--episodes",
        300,
        "--seeds",
        3,
        "--step-size",
        0.5,
    )
    output = succeed(tmp_path, "rl", "solve", "CliffWalking-v1", *chosen).output
    row = next(line for line in output.splitlines() if line.startswith("q-learning"))
    assert "3 x 300 episodes" in row and "-13.0000 (-13.0000 to -13.0000)" in row
    assert "Policy and values of q-learning, seed 0" in output and "↑ C C" in output


def test_environment_without_map_lists_states(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    output = succeed(tmp_path, "rl", "solve", "Taxi-v4").output
    assert "500 states, 6 actions" in output and "first 20 states" in output and "20.0000" in output


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (
            ("CartPole-v1",),
            ("CartPole-v1 has no table", "shape (4,)", "a finite environment", "rl train dqn"),
        ),
        (("FrozenLake-v1", "--method", "q-lerning"), ("unknown method 'q-lerning'", "q-learning")),
        (("FrozenLake-v1", "--budget", "1"), ("has none", "CostlyGrid-v0")),
        (("Blackjack-v1",), ("Blackjack-v1", "Tuple")),
    ],
)
def test_unsuitable_environments_are_refused(
    tmp_path: Path, arguments: tuple[str, ...], messages: tuple[str, ...]
) -> None:
    result = invoke(tmp_path, "rl", "solve", *arguments)
    assert result.exit_code == 2
    for message in messages:
        assert message in result.output
