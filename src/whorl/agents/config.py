"""The settings of an agent, and the presets: each algorithm told as its difference from the one before."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from whorl.errors import ConfigError

Algorithm = Literal["a2c", "ppo", "impala"]


class AgentConfig(BaseModel):
    """All that decides an agent's weights."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    algorithm: Algorithm
    environment: str
    steps: int = Field(default=100_000, ge=1, description="steps of the environment, all copies together")
    seed: int = 0
    n_envs: int = Field(default=8, ge=1, description="copies that an actor steps together")
    length: int = Field(default=32, ge=1, description="steps of each copy in a record")
    actors: int = Field(
        default=0, ge=0, description="processes that act while the learner learns; 0: in turn with it"
    )
    ahead: int = Field(
        default=1, ge=0, description="records that an actor fills before the last was read; 0: lockstep"
    )
    max_lag: int | None = Field(
        default=None, ge=0, description="records acted with older weights are made anew"
    )
    hidden: tuple[int, ...] = (64, 64)
    discount: float = Field(default=0.99, ge=0, le=1)
    lambda_: float = Field(default=0.95, ge=0, le=1, description="of GAE or V-trace")
    correct: bool = Field(default=False, description="V-trace in place of GAE: for records of older weights")
    passes: int = Field(default=1, ge=1, description="times that a record is learnt from")
    minibatches: int = Field(default=1, ge=1, description="parts of a record, a step each")
    clip: float = Field(default=0.2, gt=0, description="PPO")
    normalise: bool = Field(
        default=True, description="advantages to mean 0 and deviation 1 in each minibatch"
    )
    rate: float = Field(default=1e-3, gt=0, description="AdamW's learning rate")
    decay: bool = Field(default=True, description="the learning rate falls linearly to 0")
    value_weight: float = Field(default=0.5, ge=0)
    entropy_weight: float = Field(default=0.0, ge=0)
    clip_norm: float = Field(default=0.5, gt=0)

    @model_validator(mode="after")
    def _possible(self) -> AgentConfig:
        if self.minibatches > self.n_envs * self.length:
            raise ValueError(
                f"minibatches ({self.minibatches}) must be at most n_envs x length ({self.n_envs * self.length})"
            )
        return self

    @property
    def record_steps(self) -> int:
        """Steps of the environment in a record."""
        return self.n_envs * self.length

    @property
    def records(self) -> int:
        """Records that the run learns from."""
        return -(-self.steps // self.record_steps)


A2C = AgentConfig(
    algorithm="a2c", environment="CartPole-v1", n_envs=16, length=8, discount=0.98, lambda_=0.95, rate=6e-4
)
# The clip allows several passes over the same steps, and so more learning from each.
PPO = AgentConfig(
    algorithm="ppo", environment="CartPole-v1", discount=0.98, lambda_=0.9, passes=4, minibatches=4, rate=2e-3
)
# A2C whose records come from actors that do not wait, corrected for the age of their weights.
IMPALA = A2C.model_copy(update={"algorithm": "impala", "correct": True, "actors": 2})

PRESETS: dict[str, AgentConfig] = {"a2c": A2C, "ppo": PPO, "impala": IMPALA}


def preset(algorithm: str, environment: str, **changes: object) -> AgentConfig:
    """An algorithm's preset for an environment, with changes."""
    base = PRESETS[algorithm].model_dump()
    return AgentConfig.model_validate({**base, "environment": environment, **changes})


def checked(algorithm: str, environment: str, changes: Sequence[str]) -> AgentConfig:
    """A preset with changes as they are typed, "field=value".

    Raises:
        ConfigError: a field that does not exist, or a value that it cannot have.
    """
    values: dict[str, object] = {}
    for change in changes:
        name, equals, text = change.partition("=")
        if not equals or name not in AgentConfig.model_fields or name in ("algorithm", "environment"):
            raise ConfigError(
                f"--set {change}",
                expected=f"FIELD=VALUE with one of {', '.join(list(AgentConfig.model_fields)[2:])}",
            )
        try:
            values[name] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            values[name] = text
    try:
        return preset(algorithm, environment, **values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the settings"
        raise ConfigError(f"{where}: {first['msg']}", do="see `whorl rl train --help`") from error
