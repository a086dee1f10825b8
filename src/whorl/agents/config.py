"""Settings of an agent, and presets. Each preset is written as the difference from its parent algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from whorl.errors import ConfigError, example_setting, one_of

Algorithm = Literal["a2c", "ppo", "impala"]


class AgentConfig(BaseModel):
    """All settings that determine an agent's weights."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    algorithm: Algorithm
    environment: str
    steps: int = Field(default=100_000, ge=1, description="environment steps, summed over all copies")
    seed: int = Field(default=0, ge=0)
    n_envs: int = Field(default=8, ge=1, description="environments per actor")
    n_steps: int = Field(default=32, ge=1, description="steps per environment in a rollout")
    actors: int = Field(
        default=0, ge=0, description="actor processes that run ahead of the learner; 0: act and learn in turn"
    )
    prefetch: int = Field(
        default=1, ge=0, description="rollouts that an actor fills before the last one is read; 0: lockstep"
    )
    max_policy_lag: int | None = Field(
        default=None, ge=0, description="rollouts whose weights lag by more versions are generated again"
    )
    hidden: tuple[int, ...] = (64, 64)
    discount: float = Field(default=0.99, ge=0, le=1)
    gae_lambda: float = Field(default=0.95, ge=0, le=1, description="lambda of GAE or V-trace")
    v_trace: bool = Field(default=False, description="V-trace in place of GAE, for stale rollouts")
    n_epochs: int = Field(default=1, ge=1, description="passes over each rollout")
    minibatches: int = Field(default=1, ge=1, description="minibatches per pass, one optimizer step each")
    clip: float = Field(default=0.2, gt=0, description="PPO's clip range")
    normalize_advantage: bool = Field(
        default=True, description="scale advantages to mean 0 and standard deviation 1 in each minibatch"
    )
    learning_rate: float = Field(default=1e-3, gt=0, description="AdamW's learning rate")
    value_learning_rate: float | None = Field(
        default=None, gt=0, description="of the value network; default: learning_rate"
    )
    anneal: bool = Field(
        default=True, description="decrease learning rate, clip and epochs linearly over the run"
    )
    value_coef: float = Field(default=0.5, ge=0)
    entropy_coef: float = Field(default=0.0, ge=0)
    clip_norm: float = Field(default=0.5, gt=0)

    @model_validator(mode="after")
    def _validate(self) -> AgentConfig:
        if self.minibatches > self.n_envs * self.n_steps:
            raise ValueError(
                f"minibatches ({self.minibatches}) must be at most n_envs x n_steps ({self.n_envs * self.n_steps})"
            )
        return self

    @property
    def rollout_steps(self) -> int:
        """Environment steps per rollout."""
        return self.n_envs * self.n_steps

    @property
    def n_rollouts(self) -> int:
        """Number of rollouts in the run."""
        return -(-self.steps // self.rollout_steps)


# The value network learns five times faster than the policy: with lagging values, the policy stops at a plateau
# (LOG.md).
A2C = AgentConfig(
    algorithm="a2c", environment="CartPole-v1", steps=200_000, n_envs=16, n_steps=8, hidden=(64,), gae_lambda=0.95,
    normalize_advantage=False, learning_rate=2e-3, value_learning_rate=1e-2, clip_norm=2.0,
)  # fmt: skip
# The clip allows several epochs over the same rollout.
PPO = AgentConfig(
    algorithm="ppo",
    environment="CartPole-v1",
    n_envs=16,
    n_steps=64,
    n_epochs=10,
    minibatches=4,
    learning_rate=1e-3,
)
# A2C on rollouts of asynchronous actors, with V-trace correction for stale weights.
IMPALA = A2C.model_copy(update={"algorithm": "impala", "v_trace": True, "actors": 2})

PRESETS: dict[str, AgentConfig] = {"a2c": A2C, "ppo": PPO, "impala": IMPALA}


# Tuned settings per environment (LOG.md has the experiments).
TUNED_OVERRIDES: dict[tuple[str, str], dict[str, object]] = {
    ("ppo", "CartPole-v1"): {
        "n_steps": 32, "hidden": (32,), "discount": 0.98, "gae_lambda": 0.85, "n_epochs": 8, "minibatches": 3,
        "learning_rate": 0.014, "clip_norm": 1.0,
    },
    ("ppo", "Pendulum-v1"): {"discount": 0.9, "learning_rate": 3e-3},
}  # fmt: skip


def make_config(algorithm: str, environment: str, **changes: object) -> AgentConfig:
    """Return an algorithm's preset for an environment, with `changes` applied."""
    base = {**PRESETS[algorithm].model_dump(), **TUNED_OVERRIDES.get((algorithm, environment), {})}
    return AgentConfig.model_validate({**base, "environment": environment, **changes})


def parse_config(algorithm: str, environment: str, changes: Mapping[str, object]) -> AgentConfig:
    """Return a preset with changes by field. Strings are parsed as the field's type.

    Raises:
        ConfigError: unknown algorithm or field, or an invalid value.
    """
    if algorithm not in PRESETS:
        raise ConfigError(f"unknown algorithm {algorithm!r}", expected=one_of(algorithm, list(PRESETS)))
    known = [name for name in AgentConfig.model_fields if name not in ("algorithm", "environment")]
    for name in changes:
        if name not in known:
            raise ConfigError(f"unknown agent setting {name!r}", expected=one_of(name, known))
    try:
        return make_config(algorithm, environment, **changes)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the settings"
        example = example_setting(AgentConfig, first)
        raise ConfigError(
            f"{where}: {first['msg']}", expected=f"for example {example}" if example else "",
            do="see `whorl rl train --help`",
        ) from error  # fmt: skip
