"""Experience: what an actor writes into a slot, and the actor, a producer like any other.

A record is T steps of B environments. The environments go on where the last record ended, so an actor's records
depend on one another, unlike a tokeniser's; what is random within one still follows from the record's own seed.

The actor writes log-probabilities under the weights that acted, and the version of these stands in the slot's
header: whoever learns from the record knows how old it is.
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
    """T steps of B environments with discrete actions. observation has one step more: what the last one led to."""

    observation: Annotated[NDArray[np.float32], "T1", "B", "D"]
    final_observation: Annotated[NDArray[np.float32], "T", "B", "D"]
    action: Annotated[NDArray[np.int64], "T", "B"]
    behaviour_log_prob: Annotated[NDArray[np.float32], "T", "B"]
    reward: Annotated[NDArray[np.float32], "T", "B"]
    terminated: Annotated[NDArray[np.bool_], "T", "B"]
    truncated: Annotated[NDArray[np.bool_], "T", "B"]


@dataclass(frozen=True)
class ContinuousRollout:
    """The same where actions are vectors of K numbers."""

    observation: Annotated[NDArray[np.float32], "T1", "B", "D"]
    final_observation: Annotated[NDArray[np.float32], "T", "B", "D"]
    action: Annotated[NDArray[np.float32], "T", "B", "K"]
    behaviour_log_prob: Annotated[NDArray[np.float32], "T", "B"]
    reward: Annotated[NDArray[np.float32], "T", "B"]
    terminated: Annotated[NDArray[np.bool_], "T", "B"]
    truncated: Annotated[NDArray[np.bool_], "T", "B"]


def rollout_spec(environment: Environment, n_steps: int) -> Spec[Any]:
    """The record of `length` steps of an environment's copies; observations are flattened."""
    sizes = {
        "T": n_steps, "T1": n_steps + 1, "B": environment.num_envs, "D": int(np.prod(environment.observation_shape))
    }  # fmt: skip
    if environment.n_actions is not None:
        return Spec.from_dataclass(Rollout, **sizes)
    return Spec.from_dataclass(ContinuousRollout, **sizes, K=environment.action_size)


@dataclass
class Actor:
    """Acts in `n` copies of an environment with the board's newest weights. It pickles small: all is made where it runs.

    seed: of the environments, apart for each actor.
    """

    environment: str
    num_envs: int
    hidden: Sequence[int]
    seed: int

    def setup(self) -> None:
        """Makes the environments and the networks; `fill` does it where nobody did."""
        torch.set_num_threads(1)
        self._copies = make_env(self.environment, self.num_envs)
        self._networks = ActorCritic(self._copies, self.hidden, torch.Generator())
        self._seen = self._copies.reset(self.seed).flatten(1)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What the next record depends on besides the weights; nothing where an environment does not tell."""
        inside = self._copies.state_dict()
        return {**inside, "seen": self._seen} if inside else {}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Goes on where another one was."""
        self._copies.load_state_dict(state)
        self._seen = state.get("seen", self._seen)

    @torch.no_grad()
    def fill(self, slot: Slot[Any], weights: BoardReader, rng: np.random.Generator) -> int:
        """Write T steps; returns their number, T * B."""
        if not hasattr(self, "_copies"):
            self.setup()
        weights.load_into(self._networks)
        record = slot.tensors()
        length, copies, networks, seen = len(record["reward"]), self._copies, self._networks, self._seen
        generator = torch.Generator().manual_seed(slot.seed)
        noise = (
            torch.rand(length, self.num_envs, generator=generator)
            if networks.discrete
            else torch.randn(length, self.num_envs, copies.action_size, generator=generator)
        )
        said, steps = [], {name: list[torch.Tensor]() for name in STEP_FIELDS}
        for t in range(length):
            steps["observation"].append(seen)
            action, words = networks.act(seen, noise[t])
            said.append(words)
            found = copies.step(action)
            steps["action"].append(action)
            steps["reward"].append(found.reward)
            steps["terminated"].append(found.terminated)
            steps["truncated"].append(found.truncated)
            steps["final_observation"].append(found.final_observation.flatten(1))
            seen = found.observation.flatten(1)
        steps["observation"].append(seen)
        for name, values in steps.items():  # at once: an operation costs more than what it copies
            torch.stack(values, out=record[name])
        record["behaviour_log_prob"][:] = networks.log_prob(torch.stack(said), record["action"])
        self._seen = seen
        return length * self.num_envs
