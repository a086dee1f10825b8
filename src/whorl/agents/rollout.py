"""Rollouts: the record that an actor writes into a slot, and the actor, a producer.

A rollout is T steps of B environments. Environments continue where the last rollout ended, so an actor's rollouts
depend on one another. Random choices within a rollout depend only on the slot's seed.

The actor stores log-probabilities of the weights that acted. The slot's header holds the version of these weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray

from whorl.agents.environments import Environment
from whorl.agents.networks import ActorCritic
from whorl.agents.registration import make_env
from whorl.slots import BoardReader, Slot, Spec

STEP_FIELDS = ("observation", "action", "reward", "terminated", "truncated", "final_observation")


@dataclass(frozen=True)
class Rollout:
    """T steps of B environments with discrete actions. `observation` has T + 1 steps, the last after step T."""

    observation: Annotated[NDArray[np.float32], "T1", "B", "D"]
    final_observation: Annotated[NDArray[np.float32], "T", "B", "D"]
    action: Annotated[NDArray[np.int64], "T", "B"]
    behaviour_log_prob: Annotated[NDArray[np.float32], "T", "B"]
    reward: Annotated[NDArray[np.float32], "T", "B"]
    terminated: Annotated[NDArray[np.bool_], "T", "B"]
    truncated: Annotated[NDArray[np.bool_], "T", "B"]


@dataclass(frozen=True)
class ContinuousRollout:
    """Like `Rollout`, with actions that are vectors of K numbers."""

    observation: Annotated[NDArray[np.float32], "T1", "B", "D"]
    final_observation: Annotated[NDArray[np.float32], "T", "B", "D"]
    action: Annotated[NDArray[np.float32], "T", "B", "K"]
    behaviour_log_prob: Annotated[NDArray[np.float32], "T", "B"]
    reward: Annotated[NDArray[np.float32], "T", "B"]
    terminated: Annotated[NDArray[np.bool_], "T", "B"]
    truncated: Annotated[NDArray[np.bool_], "T", "B"]


def rollout_spec(environment: Environment, n_steps: int) -> Spec[Any]:
    """Return the slot spec of `n_steps` steps of all copies. Observations are flattened."""
    sizes = {
        "T": n_steps, "T1": n_steps + 1, "B": environment.num_envs, "D": int(np.prod(environment.observation_shape))
    }  # fmt: skip
    if environment.n_actions is not None:
        return Spec.from_dataclass(Rollout, **sizes)
    return Spec.from_dataclass(ContinuousRollout, **sizes, K=environment.action_size)


@dataclass
class Actor:
    """Producer that acts in `num_envs` copies of an environment with the board's newest weights.

    It pickles small: environments and networks are created in the process that runs it. `seed` seeds the environments
    and must differ between actors.
    """

    environment: str
    num_envs: int
    hidden: Sequence[int]
    seed: int

    def setup(self) -> None:
        """Create the environments and the networks. `fill` calls it if it was not called before."""
        torch.set_num_threads(1)
        self._envs = make_env(self.environment, self.num_envs)
        self._networks = ActorCritic(self._envs, self.hidden, torch.Generator())
        self._observation = self._envs.reset(self.seed).flatten(1)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the state that determines the next rollout, without weights; empty if the environment has none."""
        state = self._envs.state_dict()
        return {**state, "seen": self._observation} if state else {}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Restore the state of another actor."""
        self._envs.load_state_dict(state)
        self._observation = state.get("seen", self._observation)

    @torch.no_grad()
    def fill(self, slot: Slot[Any], weights: BoardReader, rng: np.random.Generator) -> int:
        """Write T steps into the slot and return T * B."""
        if not hasattr(self, "_envs"):
            self.setup()
        weights.load_into(self._networks)
        rollout = slot.tensors()
        envs, networks, observation = self._envs, self._networks, self._observation
        n_steps = len(rollout["reward"])
        generator = torch.Generator().manual_seed(slot.seed)
        noise = (
            torch.rand(n_steps, self.num_envs, generator=generator)
            if networks.discrete
            else torch.randn(n_steps, self.num_envs, envs.action_size, generator=generator)
        )
        outputs, steps = [], {name: list[torch.Tensor]() for name in STEP_FIELDS}
        for t in range(n_steps):
            steps["observation"].append(observation)
            action, output = networks.act(observation, noise[t])
            outputs.append(output)
            transition = envs.step(action)
            steps["action"].append(action)
            steps["reward"].append(transition.reward)
            steps["terminated"].append(transition.terminated)
            steps["truncated"].append(transition.truncated)
            steps["final_observation"].append(transition.final_observation.flatten(1))
            observation = transition.observation.flatten(1)
        steps["observation"].append(observation)
        for name, values in steps.items():  # stacked once: the cost is per operation, not per byte
            torch.stack(values, out=rollout[name])
        rollout["behaviour_log_prob"][:] = networks.log_prob(torch.stack(outputs), rollout["action"])
        self._observation = observation
        return n_steps * self.num_envs
