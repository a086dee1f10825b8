"""Exploration: how an actor tries actions other than the best. An argument of every method.

    policy      actions drawn from the method's own policy: its entropy explores
    epsilon     with a probability that falls during the run, a uniform random action
    repeat      the same, and the random action is repeated k times, P(k) ~ k^-2 (Dabney et al. 2021, arXiv:2006.01782)
    ensemble    for each episode, one member of an ensemble with random priors (Osband et al. 2018, arXiv:1806.03335)
    gaussian    independent noise added to action vectors
    ou          correlated noise, an Ornstein-Uhlenbeck process (Lillicrap et al. 2016, arXiv:1509.02971, section 7)

`bonus` adds bonus / sqrt(visits of the state) to each reward, with any kind (Bellemare et al. 2016, arXiv:1606.01868).
`repeat` and `ensemble` are structured: they reach what needs many right actions in a row.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from whorl.agents.environments.environment import Spaces
from whorl.errors import ConfigError

OU_RATE = 0.15  # share of the noise that decays in a step
LONGEST_REPEAT = 100
COUNT_CELLS = 1 << 20  # of hashed states
Kind = Literal["policy", "epsilon", "repeat", "ensemble", "gaussian", "ou"]
ACTIONS: dict[Kind, str] = {
    "epsilon": "discrete",
    "repeat": "discrete",
    "gaussian": "vectors",
    "ou": "vectors",
}


class ExplorationConfig(BaseModel):
    """The actions that an actor tries, in addition to the policy's."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Kind = Field(default="policy", description="how actions are chosen; see docs/agents.md")
    start: float = Field(
        default=1.0, ge=0, le=1, description="epsilon: probability of a random action at first"
    )
    end: float = Field(default=0.05, ge=0, le=1, description="epsilon: the same, after `fraction` of the run")
    fraction: float = Field(default=0.1, gt=0, le=1, description="epsilon: part of the run in which it falls")
    scale: float = Field(default=0.1, ge=0, description="gaussian, ou: deviation, in halves of the range")
    random_steps: int = Field(default=0, ge=0, description="first environment steps, with random actions")
    bonus: float = Field(default=0.0, ge=0, description="reward for a new state; falls as 1 / sqrt(visits)")

    def probability(self, steps_done: int, steps: int) -> float:
        """Return the probability of a random action after `steps_done` of `steps` environment steps."""
        if steps_done < self.random_steps:
            return 1.0
        if self.kind not in ("epsilon", "repeat"):
            return 0.0
        return self.start + (self.end - self.start) * min(1.0, steps_done / steps / self.fraction)


class Exploration:
    """The exploration of one actor with B environments.

    state: what the next step depends on, for a checkpoint: each tensor [B, ...], 0 at the start of an episode.

    Raises:
        ConfigError: the kind does not suit the actions or the method.
    """

    def __init__(self, config: ExplorationConfig, spaces: Spaces, n_envs: int, n_members: int) -> None:
        self.config, self.spaces, self.n_envs, self.n_members = config, spaces, n_envs, n_members
        given = "vectors" if spaces.n_actions is None else "discrete"
        if ACTIONS.get(config.kind, given) != given:
            suitable = [kind for kind in Kind.__args__ if ACTIONS.get(kind, given) == given]  # type: ignore[attr-defined]
            what = f"exploration.kind is {config.kind!r}, and the actions are {given}"
            raise ConfigError(what, expected=f"one of {', '.join(suitable)}")
        if config.kind == "ensemble" and n_members < 2:
            what = "exploration.kind is 'ensemble', and the method has one member"
            raise ConfigError(what, do="use dqn with --set members=10")
        unbounded = any(map(math.isinf, (*spaces.action_low, *spaces.action_high)))
        if unbounded and (config.kind in ("gaussian", "ou") or config.random_steps):
            raise ConfigError(
                f"the bounds of the actions are {spaces.action_low} and {spaces.action_high}",
                expected="finite bounds, to which noise and random actions are scaled",
                do="set exploration.kind=policy and exploration.random_steps=0",
            )
        self.state: dict[str, Tensor] = {}
        if config.kind == "ou":
            self.state["noise"] = torch.zeros(n_envs, spaces.action_size)
        # left: steps for which `action` is repeated; member: 1 to K, or 0 if it is to be drawn
        for name in {"repeat": ("left", "action"), "ensemble": ("member",)}.get(config.kind, ()):
            self.state[name] = torch.zeros(n_envs, dtype=torch.int64)
        self.low, self.high = torch.tensor(spaces.action_low), torch.tensor(spaces.action_high)
        self.half_range = (self.high - self.low) / 2

    def start(self, n_steps: int, generator: torch.Generator, steps_done: int, steps: int) -> None:
        """Draw all random numbers of a rollout, after `steps_done` environment steps of a run of `steps`."""
        shape, vector = (n_steps, self.n_envs), (n_steps, self.n_envs, self.spaces.action_size)
        draw, size = (torch.randn, vector) if self.spaces.n_actions is None else (torch.rand, shape)
        self.noise = draw(size, generator=generator)
        probability = self.config.probability(steps_done, steps)
        self.random: Tensor | None = None  # [T, B] whether a random action begins
        if probability:
            self.random = torch.rand(shape, generator=generator) < probability
            if self.spaces.n_actions is not None:
                self.random_action = torch.randint(self.spaces.n_actions, shape, generator=generator)
            else:
                uniform = torch.rand(vector, generator=generator)
                self.random_action = self.low + 2 * self.half_range * uniform
        if self.config.kind == "repeat":
            weights = torch.arange(1.0, LONGEST_REPEAT + 1) ** -2
            drawn = torch.multinomial(weights, n_steps * self.n_envs, replacement=True, generator=generator)
            self.lengths = 1 + drawn.view(shape)
        elif self.config.kind == "ensemble":
            self.members = torch.randint(1, self.n_members + 1, shape, generator=generator)

    def act(self, method: Any, networks: Any, observation: Tensor, t: int) -> tuple[Tensor, Tensor]:
        """Return the actions of step t of the rollout, and what `Method.log_prob` needs."""
        kind, state = self.config.kind, self.state
        if kind == "ensemble":
            state["member"] = torch.where(state["member"] == 0, self.members[t], state["member"])
            return method.act_as_member(networks, observation, state["member"] - 1)  # type: ignore[no-any-return]
        action, output = method.act(networks, observation, self.noise[t])
        if kind == "repeat" and self.random is not None:
            begins = self.random[t] & (state["left"] == 0)
            state["action"] = torch.where(begins, self.random_action[t], state["action"])
            left = torch.where(begins, self.lengths[t], state["left"])
            state["left"] = (left - 1).clamp(min=0)
            action = torch.where(left > 0, state["action"], action)
        elif self.random is not None:
            chosen = self.random[t] if action.dim() == 1 else self.random[t][:, None]
            action = torch.where(chosen, self.random_action[t], action)
        elif kind == "gaussian":
            action = (action + self.config.scale * self.half_range * self.noise[t]).clamp(self.low, self.high)
        elif kind == "ou":
            drift = self.config.scale * self.half_range * self.noise[t] * (2 * OU_RATE) ** 0.5
            state["noise"] = (1 - OU_RATE) * state["noise"] + drift
            action = (action + state["noise"]).clamp(self.low, self.high)
        return action, output

    def end_step(self, ended: Tensor) -> None:
        """Forget the state of copies whose episode ended. ended: [B]."""
        for name, tensor in self.state.items():
            self.state[name] = tensor.masked_fill(ended if tensor.dim() == 1 else ended[:, None], 0)


class VisitCounts:
    """Numbers of visits of states, by a hash of the observation rounded to hundredths; 4 MiB, in the checkpoint."""

    def __init__(self, bonus: float) -> None:
        self.bonus, self.counts = bonus, torch.zeros(COUNT_CELLS, dtype=torch.int32)

    def rewards(self, observation: Tensor) -> Tensor:
        """Count observations [T, B, d], and return the bonuses [T, B]."""
        rounded = (observation.double() * 100).round().long()
        factors = torch.arange(1, observation.shape[-1] + 1) * 0x9E3779B97F4A7C1
        mixed = ((rounded + 1) * factors).sum(-1)
        cells = (mixed ^ (mixed >> 29)) % COUNT_CELLS
        flat = cells.flatten()
        self.counts.index_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
        return self.bonus / self.counts[cells].float().sqrt()
