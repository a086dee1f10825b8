"""Batched environments: B copies step together, as tensors.

One Python call advances thousands of copies, and the same code runs on a GPU. Built-in dynamics are in
`classic_control.py`. Any gymnasium environment can be used through its vector interface (`gymnasium_env.py`).

The subtle part is the end of an episode. A copy that ended is reset within the same step, so an observation to act on
is always available. Bootstrapping needs the value of the *final* observation, not of the new episode's first one. A
transition therefore carries both observations and two flags: `terminated` (the task ended) and `truncated` (a time
limit cut it off).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from math import prod
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from whorl.agents.environments.tables import Tables
from whorl.errors import ConfigError
from whorl.slots.spec import FieldSpec

NO_LIMIT = 1 << 40  # `max_episode_steps` of an environment whose episodes are never truncated


class Transition(NamedTuple):
    """The result of one step of B copies.

    observation: [B, ...] the next input of the policy; the first observation of the new episode where one ended.
    final_observation: [B, ...] the result of the step; equals `observation` where the episode continues.
    reward: [B] fp32.
    terminated, truncated: [B] bool; both may be set.
    cost: [B] fp32, what a constraint limits; None in environments without costs.

    Later steps do not modify these tensors. The tensors may share memory, so callers must not write into them.
    """

    observation: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    final_observation: Tensor
    cost: Tensor | None = None


@dataclass(frozen=True)
class Spaces:
    """Observations and actions of an environment, from which a method makes its networks.

    observation_shape, observation_dtype: of one copy: fp32, or uint8 for pixels [channels, height, width].
    n_actions: number of discrete actions; None if an action is a vector.
    action_low, action_high: bounds of each dimension of a vector; may be infinite.
    has_costs: whether steps have costs, which a constraint limits.
    trial_steps: steps of a trial, whose task is drawn with it (`trials.py`); 0 without trials.
    players: 2 in a game whose players take turns; observation and reward are those of the player to move.
    """

    observation_shape: tuple[int, ...]
    n_actions: int | None = None
    action_low: tuple[float, ...] = ()
    action_high: tuple[float, ...] = ()
    observation_dtype: torch.dtype = torch.float32
    has_costs: bool = False
    players: int = 1
    trial_steps: int = 0

    @property
    def action_size(self) -> int:
        """Dimensions of an action vector; 1 for discrete actions."""
        return len(self.action_low) or 1


def step_fields(spaces: Spaces, n_outputs: int = 0) -> dict[str, FieldSpec]:
    """Return shape and type of the fields of one step in one environment, without `final_observation`.

    n_outputs: see `Method`; 0 for a method that keeps none.
    """
    number, flag = FieldSpec((), np.dtype(np.float32)), FieldSpec((), np.dtype(np.bool_))
    pixels = spaces.observation_dtype == torch.uint8
    discrete = FieldSpec((), np.dtype(np.int64))
    vector = FieldSpec((spaces.action_size,), np.dtype(np.float32))
    output = {"output": FieldSpec((n_outputs,), np.dtype(np.float32))} if n_outputs else {}
    return {
        "observation": FieldSpec((prod(spaces.observation_shape),), np.dtype(np.uint8 if pixels else np.float32)),
        "action": discrete if spaces.n_actions is not None else vector,
        "behaviour_log_prob": number, "reward": number, "terminated": flag, "truncated": flag, "cost": number,
        **output,
    }  # fmt: skip


class Environment(Protocol):
    """B copies of one environment."""

    num_envs: int
    spaces: Spaces

    def reset(self, seed: int) -> Tensor:
        """Reset every copy, seed all later randomness, and return observations [B, ...]."""
        ...

    def step(self, action: Tensor) -> Transition:
        """Advance every copy. action: [B] int64, or [B, k] fp32, which is clipped to the bounds of each dimension.

        Callers keep the unclipped action: it is the one that the policy's log-probability belongs to.
        """
        ...

    def tables(self) -> Tables | None:
        """Return the transition probabilities of a finite environment; None of another."""
        return None

    def state_dict(self) -> dict[str, Tensor]:
        """Return all state that determines later steps; empty if the environment does not expose it."""
        ...

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore the state of an environment with as many copies, after `reset`. An empty state does nothing."""
        ...

    def close(self) -> None: ...


class BatchedEnvironment(Environment):
    """An environment whose dynamics are tensor operations over all copies.

    A subclass sets `spaces` and implements `initial_state`, `transition` and `observe` on a state [k, B]: k numbers per
    copy, in fp64 like gymnasium's single environments. Vector actions reach `transition` within their bounds.

    Args:
        num_envs: number of copies B.
        max_episode_steps: steps after which an episode is truncated; by default the environment's own limit.
    """

    spaces: Spaces
    default_max_episode_steps: ClassVar[int]

    def __init__(self, num_envs: int, *, max_episode_steps: int | None = None, device: str = "cpu") -> None:
        if num_envs < 1:
            raise ConfigError(f"num_envs is {num_envs}", expected="at least 1")
        self.num_envs, self.device = num_envs, torch.device(device)
        default = self.default_max_episode_steps
        self.max_episode_steps = default if max_episode_steps is None else max_episode_steps
        self.state: Tensor | None = None

    @abstractmethod
    def initial_state(self, n: int) -> Tensor:
        """Return n initial states [k, n], drawn from `self.generator`."""

    @abstractmethod
    def transition(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map a state [k, B] and actions to (next state [k, B], reward [B], terminated [B] bool)."""

    @abstractmethod
    def observe(self, state: Tensor) -> Tensor:
        """Map a state [k, B] to observations [B, ...] in fp32."""

    def state_of(self, observation: Tensor) -> Tensor:
        """Return the states [k, B] that observations [B, ...] determine, for planning."""
        raise NotImplementedError(f"observations of {type(self).__name__} do not determine its state")

    def cost(self, state: Tensor) -> Tensor | None:
        """Return the costs [B] of having reached `state` [k, B]; None without costs."""
        return None

    def reset(self, seed: int) -> Tensor:
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.state = self.initial_state(self.num_envs)
        self.step_count, self.next_deadline = 0, self.max_episode_steps
        self.deadline = torch.full((self.num_envs,), self.max_episode_steps, device=self.device)
        self.none_ended = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        return self.observe(self.state)

    def step(self, action: Tensor) -> Transition:
        if self.state is None:
            raise ConfigError(f"{type(self).__name__} was not reset", do="call reset(seed) first")
        if self.spaces.n_actions is None:
            action = action.clamp(*map(action.new_tensor, (self.spaces.action_low, self.spaces.action_high)))
        state, reward, terminated = self.transition(self.state, action)
        self.step_count += 1
        # No episode can be truncated before the earliest deadline, so most steps skip the comparison.
        due = self.step_count >= self.next_deadline
        truncated = self.deadline <= self.step_count if due else self.none_ended
        final, cost = self.observe(state), self.cost(state)
        observation = final
        ended = (terminated | truncated if due else terminated).nonzero().view(-1)
        if len(ended):
            state.index_copy_(1, ended, self.initial_state(len(ended)))
            self.deadline.index_fill_(0, ended, self.step_count + self.max_episode_steps)
            observation = self.observe(state)  # for all copies: cheaper than indexing rows
        if due:
            self.next_deadline = int(self.deadline.min())
        self.state = state
        return Transition(observation, reward, terminated, truncated, final, cost)

    def state_dict(self) -> dict[str, Tensor]:
        assert self.state is not None
        return {
            "state": self.state, "remaining": self.deadline - self.step_count, "generator": self.generator.get_state()
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        if not state:
            return
        self.state, self.deadline, self.step_count = state["state"].clone(), state["remaining"].clone(), 0
        self.next_deadline = int(self.deadline.min())
        self.generator.set_state(state["generator"])

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        """Draw fp64 numbers in [low, high) from the environment's generator."""
        drawn = torch.empty(shape, dtype=torch.float64, device=self.device)
        return drawn.uniform_(low, high, generator=self.generator)

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
