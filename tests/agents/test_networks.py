"""Networks: pixels, and several critics as one product."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from whorl.agents.environments.environment import Spaces
from whorl.agents.environments.registration import make_tables
from whorl.agents.methods.registration import make_config
from whorl.agents.networks import Critics, Pixels, QNetworks
from whorl.agents.task import evaluate, train
from whorl.errors import ConfigError

gymnasium = pytest.importorskip("gymnasium")
Box, Discrete = gymnasium.spaces.Box, gymnasium.spaces.Discrete


class BrightSide(gymnasium.Env[Any, Any]):
    """One step: name the bright half of a picture of 10 x 10 pixels (0 left, 1 right). Reward 1 if right."""

    observation_space = Box(0, 255, (10, 10, 1), np.uint8)

    def __init__(self, vectors: bool = False) -> None:
        self.action_space: Any = Box(-1, 1, (1,)) if vectors else Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.side = int(self.np_random.integers(2))
        picture = self.np_random.integers(0, 100, (10, 10, 1)).astype(np.uint8)
        picture[:, 5 * self.side : 5 * self.side + 5] += 120
        return picture, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        named = int(action[0] > 0) if isinstance(self.action_space, Box) else int(action)
        return np.zeros((10, 10, 1), np.uint8), float(named == self.side), True, False, {}


for _name, _vectors in (("BrightSide-v0", False), ("BrightSideVector-v0", True)):
    gymnasium.register(_name, entry_point=BrightSide, kwargs={"vectors": _vectors})


@pytest.mark.parametrize(
    ("method", "environment"), [("ppo", "BrightSide-v0"), ("dqn", "BrightSide-v0"), ("sac", "BrightSideVector-v0")]
)  # fmt: skip
def test_methods_learn_from_pixels(method: str, environment: str) -> None:
    replay = {"learning_starts": 200, "batch_size": 32, "updates_per_step": 0.2, "n_envs": 8}
    changes: dict[str, Any] = {"hidden": (32,), "steps": 2048, "n_steps": 8, "discount": 0.5}
    config = make_config(method, environment, **changes, **(replay if method != "ppo" else {}))
    networks = train(config)
    assert any(p.dim() == 4 for p in networks.parameters())  # a convolution
    assert np.mean(evaluate(config, networks, 100, 1)) >= 0.95


def test_pixels_have_no_table_to_solve() -> None:
    message = (
        r"BrightSide-v0 has no table of transitions: it has pixels of shape \(1, 10, 10\)(.|\n)*rl train dqn"
    )
    with pytest.raises(ConfigError, match=message):
        make_tables("BrightSide-v0")


def test_images_too_small_are_refused() -> None:
    with pytest.raises(ConfigError, match="images of 4 x 9 pixels"):
        Pixels((1, 4, 9), torch.Generator())


def test_batched_critics_equal_single_ones() -> None:
    spaces = Spaces((3,), action_low=(-1.0,) * 2, action_high=(1.0,) * 2)
    critics = Critics(3, spaces, (8, 4), 1, torch.Generator().manual_seed(0), action_size=2)
    observation, action = torch.randn(5, 3), torch.randn(5, 2)
    for k, values in enumerate(critics(observation, action)):
        x = torch.cat((observation, action), dim=1)
        for n, (weight, bias) in enumerate(zip(critics.weights, critics.biases, strict=True)):
            x = (x.relu() if n else x) @ weight[k] + bias[k]
        torch.testing.assert_close(values, x)


def test_duelling_values_have_the_mean_of_the_value_stream() -> None:
    spaces = Spaces((3,), n_actions=4)
    networks = QNetworks(spaces, (8,), torch.Generator().manual_seed(0), 2, duelling=True)
    observation = torch.randn(5, 3)
    torch.testing.assert_close(
        networks.values(networks.q, observation).mean(-1), networks.q(observation)[..., 0]
    )


def test_priors_are_fixed_and_differ_between_members() -> None:
    spaces = Spaces((3,), n_actions=4)
    networks = QNetworks(spaces, (8,), torch.Generator().manual_seed(0), 2, prior_scale=3.0)
    values = networks.values(networks.q, torch.randn(5, 3))
    assert networks.prior is not None and not any(p.requires_grad for p in networks.prior.parameters())
    assert (values[0] - values[1]).abs().min() > 0
