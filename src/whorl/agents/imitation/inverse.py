"""Maximum-entropy inverse RL: a reward under which a random but rational agent visits what the expert visits.

    policy     pi(a|s) = exp(q(s, a) - v(s))          q = E[r(s') + discount v(s')],  v = log sum_a exp q
    gradient   sum_s (visits of the expert - visits of pi) grad r(s)        of the demonstrations' log-likelihood

Source: Ziebart et al. 2008 (AAAI, "Maximum entropy inverse reinforcement learning"); with a network for r, Wulfmeier et al.
2015, arXiv:1507.04888. Soft values and visits are exact, from the tables of the environment. A visit at step t counts
discount^t, and the time limit ends the count, as in the demonstrations.

The reward belongs to the state that a step reaches, not to the action. So it keeps its meaning for other dynamics and other
moves (Fu et al. 2018, arXiv:1710.11248). Two subtle points. Entropy rewards every step, so an end would be worth less than a
longer walk. An ended episode therefore keeps the entropy of uniform choices: v = log A / (1 - discount). And visits of few
episodes are noisy. `sparsity`, the weight of sum_s |r(s)|, leaves the reward of a state at 0 unless they differ by as much.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from whorl.agents.environments.environment import Spaces
from whorl.agents.environments.registration import make_env
from whorl.agents.environments.tables import Array, Tables
from whorl.agents.methods.method import Method, MethodConfig
from whorl.agents.networks import draw_action, make_network
from whorl.agents.tabular import MAX_STEPS
from whorl.agents.visits import gini, lorenz
from whorl.errors import ConfigError
from whorl.objectives.next_token import Loss
from whorl.train.learner.update import MicroBatch, Update, all_adamw

SWEEPS, TOLERANCE = 10_000, 1e-6  # of soft value iteration


def reward_table(tables: Tables, reward: Array) -> Array:
    """Return expected rewards [S, A] of steps, from rewards [S] of the states that they reach."""
    return np.where(tables.terminal[:, None], 0.0, tables.transition @ reward)


def soft_policy(
    tables: Tables, reward: Array, discount: float, first: Array | None = None
) -> tuple[Array, Array]:
    """Return the policy [S, A] and the soft values [S] of rewards [S, A]. first: values to begin with."""
    end = math.log(reward.shape[1]) / (1 - discount)
    values = np.full(len(reward), end) if first is None else first
    for _ in range(SWEEPS):
        q = reward + discount * (tables.transition @ np.where(tables.terminal, end, values))
        last, values = values, np.logaddexp.reduce(q, axis=1)
        if np.abs(values - last).max() < TOLERANCE:
            break
    return np.exp(q - values[:, None]), values


def expected_visits(tables: Tables, policy: Array, discount: float) -> Array:
    """Return the expected discounted visits [S] that steps of a policy [S, A] make, within the time limit."""
    leads = np.einsum("sa,sat->st", policy, tables.transition) * ~tables.terminal[:, None]
    state, total = tables.initial, np.zeros(len(leads))
    for t in range(tables.max_episode_steps or MAX_STEPS):
        state = state @ leads
        total += discount**t * state
        if discount**t * state.sum() < TOLERANCE:
            break
    return total


def recorded_visits(demonstrations: Any, discount: float) -> Array:
    """Return the same [S], mean over recorded episodes."""
    steps = torch.cat([torch.arange(n) for n in demonstrations.lengths])
    each = discount ** steps.double()[:, None] * demonstrations.steps["final_observation"]
    return np.asarray(each.sum(0) / len(demonstrations.lengths))


def total_variation(visits: Array, others: Array) -> float:
    """Return the total variation of two distributions of visits [S], from 0 to 1."""
    return float(np.abs(visits / visits.sum() - others / others.sum()).sum() / 2)


class MaxEntropyConfig(MethodConfig):
    method: Literal["max-entropy-irl"] = "max-entropy-irl"
    environment: str = "FrozenLake-v1"
    steps: int = Field(default=10_000, ge=1)
    n_envs: int = Field(default=4, ge=1)
    n_steps: int = Field(default=4, ge=1)
    hidden: tuple[int, ...] = Field(
        default=(), description="of the reward's network; none: a table of rewards"
    )
    discount: float = Field(default=0.99, ge=0, lt=1)
    learning_rate: float = Field(default=0.3, gt=0)
    clip_norm: float = Field(default=1e6, gt=0)
    sparsity: float = Field(default=0.03, ge=0, description="weight of the absolute rewards of all states")


class RewardNetworks(nn.Module):
    """A reward of states, and its soft policy [S, A] (log-probabilities) and values [S], which are computed, not trained."""

    def __init__(self, spaces: Spaces, hidden: Sequence[int], generator: torch.Generator) -> None:
        super().__init__()
        (n_states,), n_actions = spaces.observation_shape, spaces.n_actions or 1
        self.reward = make_network(spaces, hidden, 1, 0.01, generator)
        self.policy = nn.Parameter(torch.zeros(n_states, n_actions), requires_grad=False)
        self.value = nn.Parameter(torch.zeros(n_states), requires_grad=False)

    def act(self, observation: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        output = observation @ self.policy
        return draw_action(output, noise), output

    def greedy_action(self, observation: Tensor) -> Tensor:
        return (observation @ self.policy).argmax(dim=-1)


class MaxEntropyIRL(Method):
    Config: ClassVar[type[MethodConfig]] = MaxEntropyConfig
    config: MaxEntropyConfig
    actions, needs_demonstrations = "discrete", True
    acted_weights = ("policy",)

    @cached_property
    def tables(self) -> Tables:
        """The tables of the environment. Raises ConfigError: it has none."""
        (environment := make_env(self.config.environment, 1)).close()
        if (found := environment.tables()) is None:
            what = f"max-entropy-irl in {self.config.environment}, which has no table of transitions"
            raise ConfigError(what, expected="a finite environment, such as FrozenLake-v1", do="use gail")
        return found

    @cached_property
    def expert_visits(self) -> Array:
        return recorded_visits(self.demonstrations, self.config.discount)

    def make_networks(self, generator: torch.Generator) -> RewardNetworks:
        assert self.tables
        return RewardNetworks(self.spaces, self.config.hidden, generator)

    def state_rewards(self, networks: RewardNetworks, observation: Tensor) -> Tensor:
        """Return rewards [...] for reaching states with observations [..., d]."""
        out: Tensor = networks.reward(observation).squeeze(-1)
        return out

    def values(self, networks: RewardNetworks, observation: Tensor) -> Tensor | None:
        return observation @ networks.value

    def make_updates(self, networks: RewardNetworks) -> list[Update]:
        rates = all_adamw(networks, self.config.learning_rate, "reward.")
        return [Update(partial(self.loss, networks), rates, clip_norm=self.config.clip_norm)]

    @torch.no_grad()
    def minibatches(
        self, networks: RewardNetworks, rollout: Mapping[str, Tensor], step: int
    ) -> Iterator[Sequence[MicroBatch]]:
        """Yield all states, with the visits of the reward's soft policy that the expert lacks. Rollouts only measure it."""
        tables, discount, states = self.tables, self.config.discount, torch.eye(len(networks.value))
        rewards = reward_table(tables, self.state_rewards(networks, states).double().numpy())
        policy, values = soft_policy(tables, rewards, discount, networks.value.double().numpy())
        networks.policy.copy_(torch.from_numpy(policy).clamp(min=1e-30).log())
        networks.value.copy_(torch.from_numpy(values))
        visits = expected_visits(tables, policy, discount)
        excess = torch.from_numpy(visits - self.expert_visits).float()
        yield [{"observation": states, "excess": excess}]

    def loss(self, networks: RewardNetworks, part: MicroBatch) -> Loss:
        """Return a loss whose gradient is that of the negative log-likelihood, with the weighted absolute rewards."""
        rewards = self.state_rewards(networks, part["observation"])
        total = (part["excess"] * rewards).sum() + self.config.sparsity * rewards.abs().sum()
        return Loss(total, torch.ones(()), {"visits_difference": part["excess"].abs().sum()})


@torch.no_grad()
def recovered(config: MethodConfig, networks: Any, demonstrations: Any) -> dict[str, Any] | None:
    """Return true and recovered rewards [S], visits of the expert and of the reward's policy, with Gini coefficients.

    The true reward of a state is the least-squares fit of the expected rewards of steps. rows: the map, if there is one.
    None for other methods.
    """
    if not isinstance(config, MaxEntropyConfig):
        return None
    tables = MaxEntropyIRL(config, make_env(config.environment, 1).spaces).tables
    inside = ~tables.terminal
    steps = tables.transition[inside].reshape(-1, len(inside)), tables.reward[inside].ravel()
    visits = {
        "expert": recorded_visits(demonstrations, config.discount),
        "policy": expected_visits(tables, networks.policy.double().exp().numpy(), config.discount),
    }
    rewards = {
        "true": np.linalg.lstsq(*steps)[0],
        "recovered": networks.reward(torch.eye(len(inside)))[:, 0].numpy(),
    }
    return {
        "rows": list(tables.rows), "total_variation": total_variation(*visits.values()),
        **{f"{name} reward": each.tolist() for name, each in rewards.items()},
        **{f"visits of the {name}": each.tolist() for name, each in visits.items()},
        "gini": {name: gini(each) for name, each in visits.items()},
        "lorenz": {name: lorenz(each) for name, each in visits.items()},
    }  # fmt: skip
