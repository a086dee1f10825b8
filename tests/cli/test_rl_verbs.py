"""`whorl rl`: verbs about trained agents."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.support.cli import refuse, succeed

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
