"""`--reward`: a reward of inverse RL is solved, and trains another agent, which has it in its lineage."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.cli import refuse, succeed

from whorl.store import Store

QUICK = ("--seeds", 1, "--episodes", 2, "--episode-steps", 50)


def test_recovered_reward_is_solved_and_trains(tmp_path: Path) -> None:
    ppo = ("--steps", 3_000, "--set", "n_steps=16", "--set", "hidden=[16]", "--set", "learning_rate=0.02")
    succeed(tmp_path, "rl", "train", "ppo", "DryLake-v0", *QUICK, *ppo)
    irl = ("rl", "train", "max-entropy-irl", "DryLake-v0", "--from", "ppo-DryLake-v0", *QUICK)
    succeed(tmp_path, *irl, "--steps", 1_600)
    name, store = "max-entropy-irl-DryLake-v0", Store(tmp_path / ".whorl")
    found = json.loads(store.open(name).file("result.json").read_text())["recovered"]
    assert found["total_variation"] < 0.3 and len(found["recovered reward"]) == 16
    page = store.open(name).file("curve.html").read_text()
    assert all(title in page for title in ("Recovered reward", "Visits of the expert", "Lorenz curves"))
    printed = succeed(tmp_path, "rl", "solve", "DryLake-v0", "--reward", name, "--method", "policy-iteration")
    assert "policy-iteration" in printed.stdout
    succeed(tmp_path, "rl", "train", "dqn", "DryLake-v0", "--reward", name, *QUICK, "--steps", 1_200)
    agent = store.open("dqn-DryLake-v0")
    assert agent.parents == {"reward": store.open(name).address}
    message = refuse(tmp_path, "rl", "solve", "CliffWalking-v1", "--reward", name)
    assert "observations of shape (16,), and CliffWalking-v1 has (48,)" in message
    assert "it has no reward" in refuse(tmp_path, "rl", "solve", "DryLake-v0", "--reward", "dqn-DryLake-v0")
    sarsa = ("rl", "solve", "DryLake-v0", "--reward", name, "--method", "sarsa")
    assert "a learned reward is solved from tables" in refuse(tmp_path, *sarsa)
