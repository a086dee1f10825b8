"""A method of reinforcement learning: everything that distinguishes one from another.

    Config              its settings, a subclass of its parent's
    make_networks       policy, critics, target networks
    act, greedy_action  the acting policy; `exploration` in the settings adds to it (`exploration.py`)
    minibatches         from a rollout to minibatches: in passes, or drawn from a replay buffer
    make_updates        losses, and which parameters each of them trains
    averages            target networks

The loop, the optimizers, checkpoints and actors belong to `AgentTask` and the trainer. A method is written as the difference
from its parent: PPO is A2C with another loss and several passes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from whorl.agents.environments.environment import Spaces
from whorl.agents.exploration import ExplorationConfig
from whorl.errors import ConfigError
from whorl.objectives.next_token import Loss
from whorl.slots.replay import TransitionStore
from whorl.train.learner.average import Average
from whorl.train.learner.update import MicroBatch, Update


class MethodConfig(BaseModel):
    """Settings of every method: all that determines an agent's weights."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: str
    environment: str = "CartPole-v1"
    steps: int = Field(default=100_000, ge=1, description="environment steps, summed over all copies")
    seed: int = Field(default=0, ge=0)
    n_envs: int = Field(default=8, ge=1, description="environments per actor")
    n_steps: int = Field(default=32, ge=1, description="steps per environment in a rollout")
    actors: int = Field(default=0, ge=0, description="processes that act ahead; 0: act and learn in turn")
    prefetch: int = Field(default=1, ge=0, description="rollouts that an actor is ahead; 0: lockstep")
    max_policy_lag: int | None = Field(default=None, ge=0, description="rollouts of older weights are redone")
    rollouts_per_step: int = Field(default=1, ge=1, description="rollouts per training step, actors in turn")
    hidden: tuple[int, ...] = Field(default=(64, 64), description="widths of the hidden layers")
    discount: float = Field(default=0.99, ge=0, le=1, description="of later rewards, per step")
    learning_rate: float = Field(default=1e-3, gt=0, description="AdamW's learning rate")
    anneal: bool = Field(default=True, description="decrease learning rate, clip and epochs over the run")
    clip_norm: float = Field(default=0.5, gt=0, description="largest norm of a gradient")
    exploration: ExplorationConfig = Field(
        ExplorationConfig(), description=", ".join(ExplorationConfig.model_fields)
    )

    @property
    def rollout_steps(self) -> int:
        """Environment steps per training step."""
        return self.n_envs * self.n_steps * self.rollouts_per_step

    @property
    def n_rollouts(self) -> int:
        """Number of training steps in the run."""
        return -(-self.steps // self.rollout_steps)

    def remaining_fraction(self, step: int) -> float:
        """Return the fraction of the run that remains, from 1 to 0; 1 without annealing."""
        return max(0.0, 1 - step / self.n_rollouts) if self.anneal else 1.0


class Method(ABC):
    """One method with its settings.

    spaces: of the environment. store: the replay buffer of the learner's process, if the method has one.
    actions: which the method suits. needs_costs: it limits the costs of an environment.
    needs_trials: a rollout has whole trials of the environment.
    players: of the environment. demonstrations: of an expert, in the learner's process, if the method needs them.
    n_outputs: numbers per step of the second result of `act` that a rollout keeps. memory: of a recurrent policy.
    without_effect: settings of a parent that it does not read.
    acted_weights: prefixes of the parameters that actors need.
    actors_differentiate: records hold the gradient of `rollout_loss`.
    """

    Config: ClassVar[type[MethodConfig]]
    actions: ClassVar[Literal["discrete", "vectors", "any"]] = "any"
    needs_costs: ClassVar[bool] = False
    needs_trials: ClassVar[bool] = False
    players: ClassVar[int] = 1
    needs_demonstrations: ClassVar[bool] = False
    n_outputs: int = 0
    demonstrations: Any = None
    memory: Any = None
    without_effect: ClassVar[tuple[str, ...]] = ()
    acted_weights: ClassVar[tuple[str, ...]] = ("",)
    actors_differentiate: ClassVar[bool] = False
    store: TransitionStore | None = None

    def __init__(self, config: Any, spaces: Spaces) -> None:
        self.config, self.spaces = config, spaces
        given = "vectors" if spaces.n_actions is None else "discrete"
        if self.actions not in (given, "any"):
            raise ConfigError(
                f"{config.method} cannot act in {config.environment}: its actions are {given}",
                expected="action vectors" if self.actions == "vectors" else "discrete actions",
                do="`whorl rl methods` lists what each method acts with",
            )
        if self.needs_costs and not spaces.has_costs:
            what = f"{config.method} limits costs, and {config.environment} has none"
            expected = "an environment with costs, such as CostlyGrid-v0"
            raise ConfigError(what, expected=expected, do="use trpo or ppo")
        if self.needs_trials and config.n_steps != spaces.trial_steps:
            steps = spaces.trial_steps
            found = f"trials of {steps} steps" if steps else "no trials"
            raise ConfigError(
                f"{config.method} with n_steps = {config.n_steps} in {config.environment}, which has {found}",
                expected="whole trials, in an environment such as bandits or GoalGrid-v0",
                do=f"set n_steps={steps}" if steps else "use ppo",
            )
        if self.players != spaces.players:
            raise ConfigError(
                f"{config.method} in {config.environment}, which has {spaces.players} player{'s' * (spaces.players > 1)}",
                expected=f"an environment with {self.players}", do="`whorl rl methods` lists what each method suits",
            )  # fmt: skip

    def start_rollout(self, networks: Any, copies: int) -> None:
        """Begin a rollout, or an evaluation, of `copies` environments without a memory of earlier steps."""
        self.memory = None

    def make_store(self, copies: int) -> None:
        """Allocate the replay buffer for `copies` environments, if the method has one."""
        self.store = None

    @abstractmethod
    def make_networks(self, generator: torch.Generator) -> nn.Module:
        """Return untrained networks. The same generator gives the same bits."""

    def act(self, networks: Any, observation: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return actions and what `log_prob` needs, for observations [B, d]; by default those of the networks.

        noise: [B] uniform in [0, 1) for discrete actions, [B, k] standard normal for vectors.
        """
        found: tuple[Tensor, Tensor] = networks.act(observation, noise)
        return found

    @property
    def n_members(self) -> int:
        """Number of policies of an ensemble."""
        return 1

    def greedy_action(self, networks: Any, observation: Tensor) -> Tensor:
        """Return the best action of each observation [B, d]; by default that of the networks."""
        action: Tensor = networks.greedy_action(observation)
        return action

    def match_points(self, networks: Any, games: int, seed: int) -> list[float]:
        """Return the points of games against a fixed opponent: 1 for a win, 1/2 for a draw; of games of two players."""
        raise NotImplementedError(f"{self.config.method} plays no games")

    def values(self, networks: Any, observation: Tensor) -> Tensor | None:
        """Return the values [B] of observations [B, d], for the map of a grid; None without a value of states."""
        return None

    def log_prob(self, networks: Any, outputs: Tensor, action: Tensor) -> Tensor:
        """Return log-probabilities [T, B] of actions, given the stacked second results of `act`; 0 if not needed."""
        return torch.zeros(outputs.shape[:2])

    def rollout_loss(self, networks: Any, rollout: Mapping[str, Tensor]) -> Loss:
        """Return the loss whose gradient actors compute."""
        raise NotImplementedError(f"{self.config.method} computes gradients in the learner")

    def actor_rates(self, networks: Any, step: int) -> dict[str, float] | None:
        """Return the rates by parameter at which actors move the shared weights themselves; None if the learner does."""
        return None

    @abstractmethod
    def make_updates(self, networks: Any) -> list[Update]:
        """Return the updates of each minibatch, in order."""

    def averages(self) -> Sequence[Average]:
        """Return the target networks."""
        return ()

    @abstractmethod
    def minibatches(
        self, networks: Any, rollout: Mapping[str, Tensor], step: int
    ) -> Iterator[Sequence[MicroBatch]]:
        """Yield minibatches of training step `step`. rollout: the fields of `rollout.Rollout`, each [T, B, ...]."""
