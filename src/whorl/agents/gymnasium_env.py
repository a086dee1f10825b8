"""Any gymnasium environment, through its vector interface, as an `Environment`.

The copies are stepped in this process one after another; subprocesses pay only if one step costs over about 1 ms.
Copies that ended are reset within the same step, like the built-in environments.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from whorl.agents.environments import Transition
from whorl.errors import ConfigError


class GymnasiumEnvironment:
    """`num_envs` copies of the gymnasium environment `name`. Discrete observations become one-hot.

    Raises:
        ConfigError: gymnasium is missing, the name is unknown, or a space is neither Box nor Discrete.
    """

    def __init__(self, name: str, num_envs: int, **settings: Any) -> None:
        try:
            import gymnasium
            from gymnasium.vector import AutoresetMode
        except ImportError as error:
            raise ConfigError(
                f"the environment {name!r} needs gymnasium, which is not installed",
                do="pip install gymnasium; `whorl rl environments` lists the built-in environments",
            ) from error
        try:
            self.envs = gymnasium.make_vec(
                name,
                num_envs,
                vectorization_mode="sync",
                vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP},
                **settings,
            )
        except gymnasium.error.Error as error:
            raise ConfigError(
                f"unknown environment {name!r}: {error}",
                do="run `whorl rl environments`, or see gymnasium's list",
            ) from error
        self.num_envs, self.name = num_envs, name
        observation, action = self.envs.single_observation_space, self.envs.single_action_space
        self.one_hot: Tensor | None = None
        if isinstance(observation, gymnasium.spaces.Discrete):
            self.first_observation = int(observation.start)
            self.one_hot = torch.eye(int(observation.n))
            self.observation_shape: tuple[int, ...] = (int(observation.n),)
        elif isinstance(observation, gymnasium.spaces.Box):
            self.observation_shape = observation.shape
        else:
            raise self._unsupported("observation", observation)
        self.n_actions: int | None = None
        self.action_size, self.action_low, self.action_high = 1, 0.0, 0.0
        if isinstance(action, gymnasium.spaces.Discrete):
            self.n_actions, self.first_action = int(action.n), int(action.start)
        elif isinstance(action, gymnasium.spaces.Box) and len(action.shape) == 1:
            self.action_size = action.shape[0]
            self.action_low, self.action_high = float(action.low.min()), float(action.high.max())
        else:
            raise self._unsupported("action", action)

    def _unsupported(self, kind: str, space: Any) -> ConfigError:
        self.envs.close()
        return ConfigError(
            f"the environment {self.name!r} has the {kind} space {space}",
            expected="a Box or Discrete space (actions: a Box of one dimension)",
            do="wrap it, for example with gymnasium.wrappers.FlattenObservation",
        )

    def _to_tensor(self, observation: Any) -> Tensor:
        if self.one_hot is not None:
            return self.one_hot[torch.as_tensor(observation) - self.first_observation]
        return torch.from_numpy(
            np.array(observation, dtype=np.float32)
        )  # copied: gymnasium may reuse its buffer

    def reset(self, seed: int) -> Tensor:
        return self._to_tensor(self.envs.reset(seed=seed)[0])

    def step(self, action: Tensor) -> Transition:
        taken = action.numpy() + self.first_action if self.n_actions is not None else action.numpy()
        raw_observation, reward, terminated, truncated, info = self.envs.step(taken)
        observation = self._to_tensor(raw_observation)
        final = observation
        if "final_obs" in info:
            final = observation.clone()
            for i in np.flatnonzero(info["_final_obs"]):
                final[i] = self._to_tensor(info["final_obs"][i])
        return Transition(
            observation,
            torch.tensor(reward, dtype=torch.float32),
            torch.tensor(terminated),
            torch.tensor(truncated),
            final,
        )

    def state_dict(self) -> dict[str, Tensor]:
        return {}  # gymnasium does not expose its state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Do nothing: gymnasium does not expose its state."""

    def close(self) -> None:
        self.envs.close()
