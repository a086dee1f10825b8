"""Model predictive control: plan a sequence of actions with a model, take the first, and plan again in the next state.

    repeat   candidates a ~ N(mean, width), each a sequence of `horizon` actions, within the bounds
             mean, width = those of the candidates with the highest returns sum_t discount^t r_t under the model

This is the cross-entropy method (Rubinstein 1999, doi:10.1023/A:1010091220143). A plan begins with the rest of the last one,
draws of later steps follow those of earlier ones, and the best candidates are kept (Pinneri et al. 2020, arXiv:2008.06389).

    dynamics    true      the environment's own transition, from the state that the observation determines
                learned   an ensemble of networks (s, a) -> (s' - s, r, probability of no end), trained on the replay buffer;
                          a candidate's return is the mean over members (Chua et al. 2018, arXiv:1805.12114)

With `learned` it is a child of the replay methods whose loss is that of the model: there is no policy and no critic.
The draws of all plans are the same numbers, so that a plan is a function of the observation and of the plan before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from whorl.agents.environments.environment import BatchedEnvironment, Spaces
from whorl.agents.exploration import ExplorationConfig
from whorl.agents.methods.method import MethodConfig
from whorl.agents.methods.replayed import ReplayConfig, ReplayMethod
from whorl.agents.networks import Critics, action_bounds
from whorl.errors import ConfigError
from whorl.objectives.next_token import Loss
from whorl.tracking.seeds import generator, numpy_rng
from whorl.train.learner.update import MicroBatch, Update, all_adamw

CORRELATION = 0.5  # of the draws of neighbouring steps
SCALING_ROWS = 4096  # stored steps from which the scales of inputs and targets are computed


class MPCConfig(ReplayConfig):
    method: Literal["mpc"] = "mpc"
    environment: str = "Pendulum-v1"
    steps: int = Field(default=3_000, ge=1)
    n_envs: int = Field(default=1, ge=1)
    n_steps: int = Field(default=8, ge=1)
    hidden: tuple[int, ...] = (64, 64)
    learning_rate: float = Field(default=2e-3, gt=0)
    updates_per_step: float = Field(default=2.0, gt=0)
    learning_starts: int = Field(default=200, ge=1)
    clip_norm: float = Field(default=1e6, gt=0)
    dynamics: Literal["learned", "true"] = Field(
        default="learned", description="the model that plans are made with"
    )
    members: int = Field(default=3, ge=1, description="networks of the learned model")
    horizon: int = Field(default=40, ge=1, description="actions of a plan")
    candidates: int = Field(default=64, ge=2, description="plans that are compared")
    elites: int = Field(default=8, ge=2, description="best candidates, which the next ones are drawn around")
    iterations: int = Field(default=4, ge=1, description="times that candidates are drawn")
    exploration: ExplorationConfig = ExplorationConfig(random_steps=200)

    @model_validator(mode="after")
    def _possible(self) -> MPCConfig:
        if self.elites > self.candidates:
            raise ValueError(f"elites ({self.elites}) must be at most candidates ({self.candidates})")
        return self


def cross_entropy(score: Callable[[Tensor], Tensor], plan: Tensor, draws: Tensor, elites: int) -> Tensor:
    """Return the best plans [B, H, k] found, from plans to begin with; all numbers within [-1, 1].

    score: of candidates [B, K, H, k] -> [B, K]. draws: standard normal [iterations, K, H, k].
    """
    mean, width, kept = plan, torch.ones_like(plan), plan[:, None]
    for draw in draws:
        drawn = (mean[:, None] + width[:, None] * draw).clamp(-1, 1)
        candidates = torch.cat((drawn, mean[:, None], kept), dim=1)
        best = score(candidates).topk(elites, dim=1).indices
        kept = candidates[torch.arange(len(plan))[:, None], best]
        mean, width = kept.mean(dim=1), kept.std(dim=1)
    return kept[:, 0]


class DynamicsEnsemble(nn.Module):
    """K networks (observation, action in [-1, 1]) -> change of the observation, reward, probability of no end.

    Inputs and targets are scaled by means and deviations of stored steps, which `fit_scales` sets.
    """

    input_mean: Tensor
    input_width: Tensor
    target_mean: Tensor
    target_width: Tensor

    def __init__(
        self, spaces: Spaces, hidden: Sequence[int], members: int, generator: torch.Generator
    ) -> None:
        super().__init__()
        (size,) = spaces.observation_shape
        self.networks = Critics(members, spaces, hidden, size + 2, generator, action_size=spaces.action_size)
        for name, n in (
            ("input", size),
            ("target", size + 1),
        ):  # parameters, because an agent stores no buffers
            for moment, of in (("mean", torch.zeros), ("width", torch.ones)):
                self.register_parameter(f"{name}_{moment}", nn.Parameter(of(n), requires_grad=False))

    @torch.no_grad()
    def fit_scales(self, observation: Tensor, target: Tensor) -> None:
        """Set the scales from stored observations [N, d] and targets [N, d + 1]."""
        for name, values in (("input", observation), ("target", target)):
            self.get_parameter(f"{name}_mean").copy_(values.mean(0))
            self.get_parameter(f"{name}_width").copy_(values.std(0).clamp(min=1e-4))

    def scaled(self, observation: Tensor, action: Tensor) -> Tensor:
        """Return the networks' numbers [K, N, d + 2]. observation, action: [N, d] and [N, k], or [K, N, d] and [K, N, k]."""
        out: Tensor = self.networks((observation - self.input_mean) / self.input_width, action)
        return out

    def forward(self, observation: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return next observations [K, N, d], rewards, and 1 where the episode has not ended, 0 elsewhere; both [K, N]."""
        out = self.scaled(observation, action)
        change = out[..., :-1] * self.target_width + self.target_mean
        return observation + change[..., :-1], change[..., -1], (out[..., -1] > 0.5).float()


class MPC(ReplayMethod):
    Config: ClassVar[type[MethodConfig]] = MPCConfig
    config: MPCConfig
    actions = "vectors"

    def __init__(self, config: Any, spaces: Spaces) -> None:
        from whorl.agents.environments.registration import TENSOR_ENVIRONMENTS, make_env  # which has games

        super().__init__(config, spaces)
        self.middle, self.half_range = action_bounds(spaces)
        kind = TENSOR_ENVIRONMENTS.get(config.environment, BatchedEnvironment)
        if config.dynamics == "true" and kind.state_of is BatchedEnvironment.state_of:
            raise ConfigError(
                f"dynamics is true, and observations of {config.environment} do not determine a state to plan from",
                expected="Pendulum-v1", do="set dynamics=learned",
            )  # fmt: skip
        if len(spaces.observation_shape) != 1:
            what = f"mpc in {config.environment}: observations have the shape {spaces.observation_shape}"
            raise ConfigError(what, expected="vectors", do="use ppo or sac")
        shape = config.iterations, config.candidates, config.horizon, spaces.action_size
        self.draws = torch.randn(shape, generator=generator(config.seed, "candidates"))
        for t in range(1, config.horizon):
            fresh = (1 - CORRELATION**2) ** 0.5 * self.draws[:, :, t]
            self.draws[:, :, t] = CORRELATION * self.draws[:, :, t - 1] + fresh
        self.copies = cache(lambda n: make_env(config.environment, n))

    def make_networks(self, generator: torch.Generator) -> DynamicsEnsemble:
        return DynamicsEnsemble(self.spaces, self.config.hidden, self.config.members, generator)

    def act(self, networks: DynamicsEnsemble, observation: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        action = self.greedy_action(networks, observation)
        return action, action

    @torch.no_grad()
    def greedy_action(self, networks: DynamicsEnsemble, observation: Tensor) -> Tensor:
        if self.memory is None or len(self.memory) != len(observation):
            self.memory = torch.zeros(len(observation), *self.draws.shape[2:])
        returns = self._true_returns if self.config.dynamics == "true" else partial(self._returns, networks)
        plan = cross_entropy(partial(returns, observation), self.memory, self.draws, self.config.elites)
        self.memory = torch.cat((plan[:, 1:], torch.zeros_like(plan[:, :1])), dim=1)
        return self.middle + self.half_range * plan[:, 0]

    def _returns(self, networks: DynamicsEnsemble, observation: Tensor, candidates: Tensor) -> Tensor:
        """Return the returns [B, K] of candidates [B, K, H, k] under the learned model, mean over its members."""
        (batch, k), members = candidates.shape[:2], self.config.members
        state = observation.repeat_interleave(k, dim=0).expand(members, -1, -1)
        total, weight = torch.zeros(()), torch.ones(())
        for action in candidates.flatten(0, 1).unbind(1):
            state, reward, goes_on = networks(state, action.expand(members, -1, -1))
            total, weight = total + weight * reward, weight * goes_on * self.config.discount
        return total.mean(0).view(batch, k)

    def _true_returns(self, observation: Tensor, candidates: Tensor) -> Tensor:
        """Return the same under the environment's own transition."""
        batch, k = candidates.shape[:2]
        copies: Any = self.copies(batch * k)
        copies.reset(0)
        state = copies.state_of(observation).repeat_interleave(k, dim=1)
        total, weight = torch.zeros(()), torch.ones(())
        for action in candidates.flatten(0, 1).unbind(1):
            state, reward, terminated = copies.transition(state, self.middle + self.half_range * action)
            total, weight = total + weight * reward, weight * ~terminated * self.config.discount
        return total.view(batch, k)

    def make_updates(self, networks: DynamicsEnsemble) -> list[Update]:
        config = self.config
        rates = all_adamw(networks, config.learning_rate, "networks.")
        return [Update(partial(self.model_loss, networks), rates, clip_norm=config.clip_norm)]

    def minibatches(
        self, networks: DynamicsEnsemble, rollout: Mapping[str, Tensor], step: int
    ) -> Iterator[Sequence[MicroBatch]]:
        """Yield drawn minibatches, after scales of the stored steps; none for true dynamics, which are not learned."""
        if self.config.dynamics == "true":
            return
        if len(self.store) >= self.config.learning_starts:
            part = self.store.draw(SCALING_ROWS, numpy_rng(self.config.seed, "scales", step))
            networks.fit_scales(part["observation"], _changes(part))
        yield from super().minibatches(networks, rollout, step)

    def model_loss(self, networks: DynamicsEnsemble, part: MicroBatch) -> Loss:
        """Return the squared errors of the scaled changes and of the ends; each member has its own rows."""
        members, rows = self.config.members, len(part["reward"])
        change = (_changes(part) - networks.target_mean) / networks.target_width
        goes_on = (part["next_discount"] > 0).float().unsqueeze(-1)
        action = (part["action"] - self.middle) / self.half_range
        given = part["observation"], action, torch.cat((change, goes_on), dim=-1)
        observation, action, target = (
            t[: rows - rows % members].view(members, -1, t.shape[-1]) for t in given
        )
        each = (networks.scaled(observation, action) - target).square().mean(-1)
        return Loss(each.sum(), torch.tensor(float(each.numel())), {})


def _changes(part: MicroBatch) -> Tensor:
    """Return changes of the observation, and rewards, [N, d + 1]."""
    change: Tensor = part["next_observation"] - part["observation"]
    return torch.cat((change, part["reward"].unsqueeze(-1)), dim=-1)
