"""Actions within gymnasium's spaces, refused spaces, and evaluation of episodes that never end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.recipes.align_steps import logs_of, run_text

from whorl.agents import make_env
from whorl.agents.methods.registration import make_config
from whorl.agents.networks import ActorCritic
from whorl.agents.rollout import Actor, rollout_spec
from whorl.agents.task import evaluate, train
from whorl.errors import ConfigError
from whorl.slots import Board, FIFOReader, SerialProducer, SlotRing

gymnasium = pytest.importorskip("gymnasium")
Box = gymnasium.spaces.Box
SPACES = {
    "own-bounds": Box(np.float32([-0.1, 0, 5]), np.float32([0.1, 0.25, 6])),
    "integers": Box(np.array([0, -1]), np.array([9, 1]), dtype=np.int64),
    "bytes": Box(0, 255, (2,), dtype=np.uint8),
    "half-infinite": Box(np.float32([0, -np.inf]), np.float32([np.inf, 0])),
    "no-bounds": Box(-np.inf, np.inf, (2,)), "matrix": Box(-0.1, 0.1, (2, 3), dtype=np.float64),
    "scalar": Box(-0.1, 0.1, ()), "many": gymnasium.spaces.MultiDiscrete([2, 3]),
    "bits": gymnasium.spaces.MultiBinary(4),
}  # fmt: skip


class Endless(gymnasium.Env[Any, Any]):
    """Reward 1 for an action that its space contains. No episode ends."""

    def __init__(self, space: str, reward: float = 1.0) -> None:
        self.observation_space, self.action_space, self.reward = Box(-1, 1, (2,)), SPACES[space], reward

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.observation_space.sample() * 0, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = self.reward * self.action_space.contains(action)
        return np.zeros(2, np.float32), reward, False, False, {}


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    for space in SPACES:
        gymnasium.register(f"Endless-{space}-v0", Endless, kwargs={"space": space})
    yield
    for space in SPACES:
        del gymnasium.registry[f"Endless-{space}-v0"]


BOXES = [name for name, space in SPACES.items() if isinstance(space, Box)]


@pytest.mark.parametrize("space", BOXES)
def test_actions_are_clipped_to_each_dimension(space: str) -> None:
    """The rollout keeps the action as it was drawn, and its log-probability."""
    name = f"Endless-{space}-v0"
    environment = make_env(name, 4)
    config = make_config("a2c", name, n_envs=4, n_steps=50, hidden=(8,))
    networks = ActorCritic(environment.spaces, (8,), torch.Generator().manual_seed(0))
    board = Board.from_tensors(dict(networks.named_parameters()))
    ring = SlotRing(rollout_spec(environment.spaces, 4, 50), 1)
    with FIFOReader(ring, [SerialProducer(ring, Actor(config, 7), board=board)]) as reader:
        record = {n: t.clone() for n, t in next(reader).tensors().items()}
    assert record["reward"].eq(1).all() and record["action"].abs().max() > 1.5
    means = networks.policy(record["observation"][:-1])
    assert torch.allclose(networks.log_prob(means, record["action"]), record["behaviour_log_prob"], atol=1e-5)
    assert evaluate(config, networks, 3, 0, max_steps=5) == [5.0] * 3


def test_nearest_element_of_box_is_taken() -> None:
    taken = make_env("Endless-own-bounds-v0", 1)._to_space(np.float32([[-3, 0.125, 5.5]]))  # type: ignore[attr-defined]
    assert taken.tolist() == [[np.float32(-0.1), 0.125, 5.5]] and taken.dtype == np.float32
    whole = make_env("Endless-integers-v0", 1)._to_space(np.float32([[2.6, -7]]))  # type: ignore[attr-defined]
    assert whole.tolist() == [[3, -1]] and whole.dtype == np.int64


@pytest.mark.parametrize(("space", "kind"), [("many", "MultiDiscrete"), ("bits", "MultiBinary")])
def test_other_action_spaces_are_refused_by_name(space: str, kind: str) -> None:
    with pytest.raises(ConfigError, match=rf"action space {kind}.*\n.*expected: a Box or Discrete"):
        make_env(f"Endless-{space}-v0", 2)


def test_nan_reward_is_named_with_its_step() -> None:
    gymnasium.register("Broken-v0", Endless, kwargs={"space": "scalar", "reward": float("nan")})
    with pytest.raises(ConfigError, match="the reward of Broken-v0 is nan at step 1 of copy 0"):
        train(make_config("ppo", "Broken-v0", steps=64, n_envs=2, n_steps=8))


@pytest.mark.parametrize(
    ("method", "changes"), [("sac", {}), ("ppo", {"exploration": {"kind": "gaussian"}})], ids=["sac", "noise"]
)
def test_actions_without_bounds_are_refused(method: str, changes: dict[str, Any]) -> None:
    config = make_config(method, "Endless-no-bounds-v0", steps=300, **changes)
    with pytest.raises(ConfigError, match="the bounds of the actions are"):
        train(config)


RECIPE = """
name = "endless"
[steps.ppo]
uses = "agents"
environment = "Endless-own-bounds-v0"
steps = 32
seeds = 1
episodes = 3
episode_steps = 40
settings = { hidden = [4], n_envs = 2, n_steps = 8, n_epochs = 1, minibatches = 1 }
"""


def test_endless_episodes_are_cut_off_and_counted(tmp_path: Path) -> None:
    made = run_text(RECIPE, store=tmp_path)["ppo"]
    record = json.loads(made.file("result.json").read_text())
    assert record["truncated"] == [3] and record["returns"] == [40.0]
    assert "3 episodes, 3 cut off after 40 steps" in logs_of(tmp_path)
    assert "evaluating seed 0: 0 of 3 episodes" in logs_of(tmp_path)
    assert "3 cut off after 40 steps" in made.file("curve.html").read_text()
