"""Any gymnasium environment, through its vector interface, as an `Environment`.

The copies are stepped in this process one after another; subprocesses pay only if one step costs over about 1 ms.
Copies that ended are reset within the same step, like the built-in environments.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whorl.agents.environments.environment import Spaces, Transition
from whorl.agents.environments.tables import Tables, tables_of_outcomes
from whorl.errors import ConfigError


class GymnasiumEnvironment:
    """`num_envs` copies of the gymnasium environment `name`. Discrete observations become one-hot.

    Raises:
        ConfigError: gymnasium or what the environment needs is missing, the name is unknown, or a space is neither Box
            nor Discrete.
    """

    def __init__(self, name: str, num_envs: int, **settings: Any) -> None:
        try:
            import gymnasium
            from gymnasium.vector import AutoresetMode
        except ImportError as error:
            what = f"the environment {name!r} needs gymnasium, which is not installed"
            do = "pip install gymnasium; `whorl rl environments` lists the built-in environments"
            raise ConfigError(what, do=do) from error
        try:
            vector = {"autoreset_mode": AutoresetMode.SAME_STEP}
            self.envs = gymnasium.make_vec(
                name, num_envs, vectorization_mode="sync", vector_kwargs=vector, **settings
            )
        except gymnasium.error.DependencyNotInstalled as error:
            what = f"missing package for the environment {name!r}: {error}"
            raise ConfigError(what, do="install the package") from error
        except gymnasium.error.Error as error:
            what = f"unknown environment {name!r}: {error}"
            raise ConfigError(what, do="run `whorl rl environments`, or see gymnasium's list") from error
        self.num_envs, self.name = num_envs, name
        observation, action = self.envs.single_observation_space, self.envs.single_action_space
        self.one_hot: Tensor | None = None
        if isinstance(observation, gymnasium.spaces.Discrete):
            self.first_observation = int(observation.start)
            self.one_hot = torch.eye(int(observation.n))
            shape: tuple[int, ...] = (int(observation.n),)
        elif isinstance(observation, gymnasium.spaces.Box):
            shape = observation.shape
        else:
            raise self._unsupported("observation", observation)
        pixels = len(shape) == 3 and observation.dtype == np.uint8
        if pixels:  # [height, width, channels] -> [channels, height, width]
            shape = (shape[2], *shape[:2])
        self.action_space: Any = action
        settings = {"observation_dtype": torch.uint8 if pixels else torch.float32}
        if isinstance(action, gymnasium.spaces.Discrete):
            self.spaces = Spaces(shape, n_actions=int(action.n), **settings)
        elif isinstance(action, gymnasium.spaces.Box):
            low, high = (tuple(b.astype(np.float64).reshape(-1).tolist()) for b in (action.low, action.high))
            self.spaces = Spaces(shape, action_low=low, action_high=high, **settings)
        else:
            raise self._unsupported("action", action)

    def _unsupported(self, kind: str, space: Any) -> ConfigError:
        self.envs.close()
        do = f"register an environment that wraps it in a gymnasium.{kind.title()}Wrapper"
        what = f"the environment {self.name!r} has the {kind} space {space}"
        return ConfigError(what, expected="a Box or Discrete space", do=do)

    def _to_tensor(self, observation: Any) -> Tensor:
        if self.one_hot is not None:
            return self.one_hot[torch.as_tensor(observation) - self.first_observation]
        if self.spaces.observation_dtype == torch.uint8:
            return torch.from_numpy(np.array(np.moveaxis(observation, -1, -3)))
        return torch.from_numpy(np.array(observation, np.float32))  # copied: gymnasium may reuse its buffer

    def _to_space(self, action: NDArray[Any]) -> NDArray[Any]:
        """Return elements [B, ...] of the action space: the nearest to each vector, or the numbers of discrete actions."""
        space = self.action_space
        if self.spaces.n_actions is not None:
            return action + int(space.start)
        # fp64 represents every bound of fp32 and of integers up to 2 ** 53.
        nearest = action.reshape(-1, *space.shape).astype(np.float64).clip(space.low, space.high)
        return (nearest.round() if space.dtype.kind in "iu" else nearest).astype(space.dtype)

    def reset(self, seed: int) -> Tensor:
        return self._to_tensor(self.envs.reset(seed=seed)[0])

    def step(self, action: Tensor) -> Transition:
        raw_observation, reward, terminated, truncated, info = self.envs.step(self._to_space(action.numpy()))
        observation = self._to_tensor(raw_observation)
        final = observation
        if "final_obs" in info:
            final = observation.clone()
            for i in np.flatnonzero(info["_final_obs"]):
                final[i] = self._to_tensor(info["final_obs"][i])
        rewards = torch.tensor(reward, dtype=torch.float32)
        return Transition(observation, rewards, torch.tensor(terminated), torch.tensor(truncated), final)

    def render(self) -> NDArray[np.uint8]:
        """Return a picture [height, width, 3] of the first copy; needs `render_mode="rgb_array"`.

        Raises:
            ConfigError: a package of the renderer is missing, or the environment draws no pictures.
        """
        import gymnasium

        try:
            found: Any = self.envs.render()
        except gymnasium.error.Error as error:
            raise ConfigError(f"{self.name} cannot be drawn: {error}", do="install the package") from error
        if not found or found[0] is None:
            raise ConfigError(f"{self.name} draws no pictures")
        picture: NDArray[np.uint8] = np.asarray(found[0])
        return picture

    def tables(self) -> Tables | None:
        """Return the tables of an environment with gymnasium's attributes P and initial_state_distrib; None of another."""
        first: Any = self.envs.envs[0]  # type: ignore[attr-defined]
        outcomes, initial = (getattr(first.unwrapped, name, None) for name in ("P", "initial_state_distrib"))
        if self.one_hot is None or self.spaces.n_actions is None or outcomes is None or initial is None:
            return None
        return tables_of_outcomes(outcomes, initial, first.spec.max_episode_steps)

    def state_dict(self) -> dict[str, Tensor]:
        return {}  # gymnasium does not expose its state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Do nothing: gymnasium does not expose its state."""

    def close(self) -> None:
        self.envs.close()
