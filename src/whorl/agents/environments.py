"""Batched environments: B copies step together, as tensors.

One Python call advances thousands of copies, and the same code runs on a GPU. Built-in dynamics are in
`classic_control.py`. Any gymnasium environment can be used through its vector interface (`gymnasium_env.py`).

The subtle part is the end of an episode. A copy that ended is reset within the same step, so an observation to act on
is always available. Bootstrapping needs the value of the *final* observation, not of the new episode's first one. A
transition therefore carries both observations and two flags: `terminated` (the task ended) and `truncated` (a time
limit cut it off).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from whorl.errors import ConfigError


class Transition(NamedTuple):
    """The result of one step of B copies.

    observation: [B, ...] the next input of the policy; the first observation of the new episode where one ended.
    final_observation: [B, ...] the result of the step; equals `observation` where the episode continues.
    reward: [B] fp32.
    terminated, truncated: [B] bool; both may be set.

    Later steps do not modify these tensors. The tensors may share memory, so callers must not write into them.
    """

    observation: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    final_observation: Tensor


class Environment(Protocol):
    """B copies of one environment.

    num_envs: B.
    observation_shape: shape of one copy's observation, fp32.
    n_actions: number of discrete actions; None if an action is a vector of `action_size` numbers.
    """

    num_envs: int
    observation_shape: tuple[int, ...]
    n_actions: int | None
    action_size: int

    def reset(self, seed: int) -> Tensor:
        """Reset every copy, seed all later randomness, and return observations [B, ...]."""
        ...

    def step(self, action: Tensor) -> Transition:
        """Advance every copy. action: [B] int64, or [B, action_size] fp32, which is clipped to the bounds of each dimension.

        Callers keep the unclipped action: it is the one that the policy's log-probability belongs to.
        """
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """Return all state that determines later steps; empty if the environment does not expose it."""
        ...

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore the state of an environment with as many copies, after `reset`. An empty state does nothing."""
        ...

    def close(self) -> None: ...


class BatchedEnvironment(ABC):
    """An environment whose dynamics are tensor operations over all copies.

    A subclass implements `initial_state`, `transition` and `observe` on a state [k, B]: k numbers per copy, in fp64
    like gymnasium's single environments. Vector actions reach `transition` within `action_low` and `action_high`, which
    have one number for each dimension.

    Args:
        num_envs: number of copies B.
        max_episode_steps: steps after which an episode is truncated; by default the environment's own limit.
    """

    observation_shape: tuple[int, ...]
    n_actions: int | None = None
    action_size: int = 1
    action_low: tuple[float, ...] = (-math.inf,)
    action_high: tuple[float, ...] = (math.inf,)
    default_max_episode_steps: ClassVar[int]

    def __init__(self, num_envs: int, *, max_episode_steps: int | None = None, device: str = "cpu") -> None:
        if num_envs < 1:
            raise ConfigError(f"num_envs is {num_envs}", expected="at least 1")
        self.num_envs, self.device = num_envs, torch.device(device)
        self.max_episode_steps = (
            self.default_max_episode_steps if max_episode_steps is None else max_episode_steps
        )
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
        if self.n_actions is None:
            action = action.clamp(*map(action.new_tensor, (self.action_low, self.action_high)))
        state, reward, terminated = self.transition(self.state, action)
        self.step_count += 1
        # No episode can be truncated before the earliest deadline, so most steps skip the comparison.
        due = self.step_count >= self.next_deadline
        truncated = self.deadline <= self.step_count if due else self.none_ended
        final = observation = self.observe(state)
        ended = (terminated | truncated if due else terminated).nonzero().view(-1)
        if len(ended):
            state.index_copy_(1, ended, self.initial_state(len(ended)))
            self.deadline.index_fill_(0, ended, self.step_count + self.max_episode_steps)
            observation = self.observe(state)  # for all copies: cheaper than indexing rows
        if due:
            self.next_deadline = int(self.deadline.min())
        self.state = state
        return Transition(observation, reward, terminated, truncated, final)

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

    def close(self) -> None:  # noqa: B027 - there is nothing to free, and a subclass need not say so
        """Release resources. Tensor environments hold none."""
