"""Environments: B copies that step together, as tensors.

One Python call then pays for thousands of steps, and the same code runs on a GPU. The dynamics of our own are in
`classic.py`; any environment of gymnasium can be used through its vector interface (`gymnasium.py`).

The subtle part is the end of an episode. A copy that ended is reset within the same step, so there is always an observation
to act on; but what the step *led to* is the final observation, and whoever bootstraps needs its value, not that of the new
episode's first. So a transition carries both, and both ways to end: `terminated` (nothing follows) and `truncated` (it was
cut off, by a time limit, and would have gone on).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from whorl.errors import ConfigError


class Transition(NamedTuple):
    """What a step of B copies gave.

    observation: [B, ...] what to act on next (of the new episode where one ended); final_observation: [B, ...] what the
    step led to, the same where the episode goes on; reward: [B] fp32; terminated, truncated: [B] bool, both may be set.
    They stay as they are while the environment goes on, but may share memory: nobody writes into them.
    """

    observation: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    final_observation: Tensor


class Environment(Protocol):
    """B copies of one environment.

    n: B. observation_shape: of one copy, fp32. n_actions: how many discrete actions, or None where actions are vectors of
    `action_size` numbers between `action_low` and `action_high`.
    """

    num_envs: int
    observation_shape: tuple[int, ...]
    n_actions: int | None
    action_size: int
    action_low: float
    action_high: float

    def reset(self, seed: int) -> Tensor:
        """Starts every copy anew; all that is random from here on follows from the seed. -> observation [B, ...]."""
        ...

    def step(self, action: Tensor) -> Transition:
        """action: [B] int64, or [B, action_size] fp32."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """All that what comes next depends on; nothing where that cannot be had."""
        ...

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Goes on where another was (of as many copies, and reset before); from nothing, where this one is."""
        ...

    def close(self) -> None: ...


class BatchedEnvironment(ABC):
    """An environment whose dynamics are tensor operations over all copies.

    A subclass gives `start`, `advance` and `observe`, on a state [k, B] of k numbers a copy (fp64 as the dynamics of
    gymnasium's single environments, which a test compares step by step).

    Args:
        n: copies.
        horizon: steps after which an episode is cut; default the environment's own.
    """

    observation_shape: tuple[int, ...]
    n_actions: int | None = None
    action_size: int = 1
    action_low: float = 0.0
    action_high: float = 0.0
    default_max_episode_steps: ClassVar[int]

    def __init__(self, num_envs: int, *, max_episode_steps: int | None = None, device: str = "cpu") -> None:
        if num_envs < 1:
            raise ConfigError(f"{num_envs} copies of an environment", expected="at least 1")
        self.num_envs, self.device = num_envs, torch.device(device)
        self.max_episode_steps = (
            self.default_max_episode_steps if max_episode_steps is None else max_episode_steps
        )
        self.state: Tensor | None = None

    @abstractmethod
    def initial_state(self, n: int) -> Tensor:
        """[k, n] states to begin with, drawn from `self.generator`."""

    @abstractmethod
    def transition(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[k, B] and the actions -> (next state [k, B], reward [B], terminated [B] bool)."""

    @abstractmethod
    def observe(self, state: Tensor) -> Tensor:
        """[k, B] -> [B, ...] fp32."""

    def reset(self, seed: int) -> Tensor:
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.state = self.initial_state(self.num_envs)
        self.step_count, self.next_deadline = 0, self.max_episode_steps
        self.deadline = torch.full((self.num_envs,), self.max_episode_steps, device=self.device)
        self.none_ended = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        return self.observe(self.state)

    def step(self, action: Tensor) -> Transition:
        if self.state is None:
            raise ConfigError(f"{type(self).__name__} was not started", do="call reset(seed) first")
        state, reward, terminated = self.transition(self.state, action)
        self.step_count += 1
        # Nobody's time is up before the first deadline, and deadlines only move on: most steps need not compare.
        due = self.step_count >= self.next_deadline
        truncated = self.deadline <= self.step_count if due else self.none_ended
        final = observation = self.observe(state)
        ended = (terminated | truncated if due else terminated).nonzero().view(-1)
        if len(ended):
            state.index_copy_(1, ended, self.initial_state(len(ended)))
            self.deadline.index_fill_(0, ended, self.step_count + self.max_episode_steps)
            observation = self.observe(state)  # all of them: cheaper than to pick rows
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
        """fp64 numbers in [low, high) from the environment's own generator."""
        drawn = torch.empty(shape, dtype=torch.float64, device=self.device)
        return drawn.uniform_(low, high, generator=self.generator)

    def close(self) -> None:  # noqa: B027 - there is nothing to free, and a subclass need not say so
        """Frees what it holds: nothing."""
