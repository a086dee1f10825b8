"""`whorl rl`: verbs about trained agents."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.support.cli import refuse, succeed

from whorl.report.animation import draws_pictures
from whorl.store import Store

QUICK = ("--steps", 512, "--seeds", 2, "--episodes", 2, "--episode-steps", 50, "--set", "hidden=[8]")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose store has two agents of PPO with different settings, and one of A2C."""
    folder = tmp_path_factory.mktemp("agents")
    succeed(
        folder,
        "rl",
        "train",
        "ppo",
        "CartPole-v1",
        *QUICK,
        "--set",
        "clip=0.1",
        "--set",
        "exploration.end=0.1",
    )
    succeed(folder, "rl", "train", "ppo", "CartPole-v1", *QUICK)
    succeed(folder, "rl", "train", "a2c", "FrozenLake-v1", *QUICK)
    return folder


def test_compare_prints_tables_and_writes_a_page(trained: Path) -> None:
    first, second = [a.address for a in Store(trained / ".whorl").artifacts() if a.config["method"] == "ppo"]
    printed = succeed(trained, "rl", "compare", first[:8], second[:8], "--out", "page.html").stdout
    # The two agents differ in one setting, which names them.
    assert "ppo exploration.end=0.1 clip=0.1" in printed and "ppo exploration.end=0.05 clip=0.2" in printed
    assert "2 greedy episodes each" in printed and "Probability of improvement" in printed
    assert "Normalised returns" not in printed  # one environment
    page = (trained / "page.html").read_text()
    assert "Performance profiles" in page and "Learning curves" in page and 'class="band second"' in page
    result = json.loads(Store(trained / ".whorl").open(first).file("result.json").read_text())
    assert f"{result['interquartile_mean'][0]:.1f}" in printed


def test_compare_refuses_what_it_cannot_compare(trained: Path) -> None:
    message = refuse(trained, "rl", "compare", "ppo-CartPole-v1", "a2c-FrozenLake-v1")
    assert "no agent ppo on FrozenLake-v1" in message
    assert "an agent is given twice" in refuse(trained, "rl", "compare", *["ppo-CartPole-v1"] * 2)
    assert "no artifact 'sac-Pole'" in refuse(trained, "rl", "compare", "sac-Pole", "ppo-CartPole-v1", code=1)


def test_record_restores_the_best_seed(trained: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    agent = Store(trained / ".whorl").open("ppo-CartPole-v1")
    returns = json.loads(agent.file("result.json").read_text())["returns"]
    printed = succeed(trained, "rl", "record", "ppo-CartPole-v1", "--out", "best.gif", "--steps", 20).stdout
    assert f"seed {returns.index(max(returns))}, " in printed
    assert image.open(trained / "best.gif").n_frames > 5
    other = succeed(trained, "rl", "record", "a2c-FrozenLake-v1", "--seed", 1, "--out", "lake.gif").stdout
    assert "wrote lake.gif: seed 1" in other


def test_record_names_what_does_not_exist(trained: Path) -> None:
    assert "has no seed 7" in refuse(trained, "rl", "record", "ppo-CartPole-v1", "--seed", 7)
    assert "no artifact 'sac'" in refuse(trained, "rl", "record", "sac", code=1)


def test_page_of_a_grid_has_values_and_an_episode(trained: Path) -> None:
    pytest.importorskip("PIL")
    page = Store(trained / ".whorl").open("a2c-FrozenLake-v1").file("curve.html").read_text()
    assert page.count('<td style="--s:') == 16 and "data:image/gif;base64," in page


def test_methods_lists_methods_and_settings_of_one(tmp_path: Path) -> None:
    rows = [line.split() for line in succeed(tmp_path, "rl", "methods").stdout.splitlines()]
    assert {row[0]: row[1] for row in rows}.items() >= {
        "ppo": "any",
        "dqn": "discrete",
        "td3": "vectors",
    }.items()
    settings = {
        line.split()[0]: line for line in succeed(tmp_path, "rl", "methods", "dqn").stdout.splitlines()
    }
    assert "epsilon" in settings["exploration"] and "random_steps" in settings["exploration"]
    # The description of a field whose default alone is overridden is that of the parent.
    assert "128" in settings["batch_size"] and "steps in a minibatch" in settings["batch_size"]
    assert "n_step=3" in settings["CartPole-v1"]
    assert "did you mean 'sac'" in refuse(tmp_path, "rl", "methods", "sacc")


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        (("dqn", "Pendulum-v1"), ("dqn cannot act in Pendulum-v1", "discrete actions", "whorl rl methods")),
        (
            ("cpo", "CartPole-v1"),
            ("cpo limits costs, and CartPole-v1 has none", "CostlyGrid-v0", "trpo or ppo"),
        ),
        (
            ("sac", "Pendulum-v1", "--set", "capacity=1_000_000_000_000"),
            ("a replay of 1,000,000,000,000 rows needs 27,000,000,000,000 bytes", "free", "lower capacity"),
        ),
    ],
    ids=["actions", "costs", "memory"],
)
def test_what_cannot_run_is_refused_before_a_store(
    tmp_path: Path, words: tuple[str, ...], messages: tuple[str, ...]
) -> None:
    message = refuse(tmp_path, "rl", "train", *words)
    assert all(part in message for part in messages), message
    assert not [*tmp_path.iterdir()]


def test_environment_without_its_packages_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gymnasium")
    for name in [n for n in sys.modules if n.startswith("gymnasium.envs.mujoco")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mujoco", None)
    message = refuse(tmp_path, "rl", "train", "sac", "HalfCheetah-v5")
    assert "missing package for the environment 'HalfCheetah-v5'" in message
    assert "mujoco" in message.lower() and "install" in message
    assert not [*tmp_path.iterdir()]


def test_train_names_page_and_next_command(trained: Path) -> None:
    again = succeed(trained, "rl", "train", "ppo", "CartPole-v1", *QUICK).stdout
    assert "looked up" in again and "curve.html" in again and "whorl rl record ppo-CartPole-v1" in again


def test_agents_learn_from_recorded_or_given_experts(trained: Path) -> None:
    agent = next(
        a for a in Store(trained / ".whorl").artifacts() if a.kind == "agents" and "CartPole" in a.name
    )
    printed = succeed(trained, "rl", "record", agent.address, "--demos", 3, "--name", "shown").stdout
    assert "3 episodes" in printed and "--from shown" in printed
    small = ("--steps", 256, "--seeds", 1, "--episodes", 1, "--set", "hidden=[8]")
    succeed(trained, "rl", "train", "clone", "CartPole-v1", "--from", "shown", *small)
    succeed(trained, "rl", "train", "dagger", "CartPole-v1", "--from", agent.address, *small)
    store = Store(trained / ".whorl")
    for pupil, of in (("clone", "shown"), ("dagger", "demos-ppo-CartPole-v1")):
        parent = store.find(store.open(f"{pupil}-CartPole-v1").parents["demonstrations"])
        assert parent is not None and parent.name == f"rl/{of}" and parent.parents["expert"] == agent.address
    assert (
        len(json.loads(store.open("demos-ppo-CartPole-v1").file("result.json").read_text())["lengths"]) == 10
    )


def test_train_refuses_experts_that_do_not_fit(trained: Path) -> None:
    words = ("rl", "train", "clone")
    assert "clone learns from demonstrations" in refuse(trained, *words, "CartPole-v1")
    message = refuse(trained, *words, "CartPole-v1", "--from", "a2c-FrozenLake-v1")
    assert "FrozenLake-v1" in message and ("never succeeds" in message or "observations of shape" in message)
    message = refuse(trained, "rl", "train", "ppo", "FrozenLake-v1", "--from", "a2c-FrozenLake-v1")
    assert "ppo learns from rewards" in message
    assert "demos-a2c-FrozenLake-v1" not in [a.name for a in Store(trained / ".whorl").artifacts()]


def test_drawn_demonstrations_differ_from_greedy_ones(trained: Path) -> None:
    actions = []
    for name, drawn in (("greedy", ()), ("drawn", ("--drawn",))):
        words = ("rl", "record", "a2c-FrozenLake-v1", "--demos", 20, "--name", name)
        succeed(trained, *words, *drawn)
        steps = load_file(Store(trained / ".whorl").open(name).file("episodes.safetensors"))
        states = steps["observation"].argmax(1)
        actions.append({(int(s), int(a)) for s, a in zip(states, steps["action"], strict=True)})
    greedy, drawn = actions
    assert len(greedy) == len({state for state, _ in greedy})
    assert len(drawn) > len({state for state, _ in drawn})
    assert "--drawn is of demonstrations" in refuse(trained, "rl", "record", "a2c-FrozenLake-v1", "--drawn")


def test_trials_have_no_pictures() -> None:
    names = ("bandits", "GoalGrid3-v0", "DeepSea8-v0", "Pendulum-v1")
    assert [draws_pictures(n) for n in names] == [False, False, True, True]


TINY = ("--steps", 256, "--seeds", 1, "--episodes", 2, "--set", "hidden=[8]")
SMALL = (
    "--set",
    "simulations=4",
    "--set",
    "opponent_simulations=4",
    "--set",
    "n_envs=8",
    "--set",
    "learning_starts=64",
)


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose store has an agent of each game, and one that plays none."""
    folder = tmp_path_factory.mktemp("games")
    for game in ("tictactoe", "connect4"):
        succeed(folder, "rl", "train", "alphazero", game, *TINY, *SMALL)
    succeed(folder, "rl", "train", "ppo", "CartPole-v1", *TINY)
    return folder


def test_page_of_a_game_has_both_games_move_by_move(games: Path) -> None:
    page = Store(games / ".whorl").open("alphazero-tictactoe").file("curve.html").read_text()
    assert "Game as X against UCT" in page and "Game as O against UCT" in page and "Moves as O" in page
    boards = re.findall(r'<table class="heatmap">(.*?)</table>', page, re.S)
    for board in boards:  # stones are numbered from 1 without gaps
        numbers = sorted(int(n) for n in re.findall(r"[XO]<small>(\d+)</small>", board))
        assert numbers == [*range(1, len(numbers) + 1)] and len(numbers) >= 5
    assert len(boards) == 2


def test_match_prints_the_points_of_both_colours(games: Path) -> None:
    printed = succeed(
        games, "rl", "match", "alphazero-tictactoe:8", "random", "--games", 20
    ).stdout.splitlines()[-1]
    assert (
        printed.startswith("alphazero-tictactoe:8 against random in 20 games of tictactoe: ")
        and " won, " in printed
    )
    again = succeed(
        games, "rl", "match", "alphazero-tictactoe:8", "random", "--games", 20
    ).stdout.splitlines()[-1]
    assert again == printed
    other = succeed(games, "rl", "match", "uct:4", "alphazero-connect4", "--games", 4, "--seed", 3).stdout
    assert "4 games of connect4" in other


@pytest.mark.parametrize(
    ("players", "messages"),
    [
        (("alphazero-tictactoe", "alphazero-connect4"), ("play tictactoe and connect4", "players of one game")),
        (("uct:10", "random"), ("uct:10 and random play any game", "at least one of them trained")),
        (("alphazero-tictactoe:0", "random"), ("'0' simulations", "a number above 0")),
        (("uct:many", "alphazero-tictactoe"), ("'many' simulations", "write uct:100")),
        (("ppo-CartPole-v1", "random"), ("an agent of CartPole-v1, which is no game", "tictactoe or connect4")),
    ],
    ids=["games", "none", "zero", "word", "poles"],
)  # fmt: skip
def test_match_refuses_what_cannot_play(
    games: Path, players: tuple[str, str], messages: tuple[str, ...]
) -> None:
    message = refuse(games, "rl", "match", *players)
    assert all(part in message for part in messages), message


def test_a_person_plays_in_the_terminal(games: Path) -> None:
    typed = "5\n5\n12\nback\n\nquit\n"
    printed = succeed(games, "rl", "play", "alphazero-tictactoe", "--human", stdin=typed).stdout
    boards = printed.split("> ")
    assert ". X ." in boards[1] and "the agent plays" in boards[1] and "visits" in boards[1]
    assert "the move 5 is illegal" in boards[2] and "a number" not in boards[2]
    assert "the move '12' is unknown" in boards[3]
    assert "X" not in boards[4]  # both moves are taken back
    assert boards[5].count("X") == 1 and "O" not in boards[5]  # an empty line lets the agent begin


def test_a_game_in_the_terminal_ends(games: Path) -> None:
    printed = succeed(games, "rl", "play", "alphazero-tictactoe", "--human", stdin="\n" * 12).stdout
    assert "has won" in printed or "a draw" in printed
