"""Settings of multi-turn environments, and the table of their names; importable without torch.

[steps.rl]
environment = "calculator"                          # or "my_module:MyEnv"

[steps.rl.environment]                              # the same, with its limits
name = "repair"
max_turns = 3
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from whorl.registry import Registry

ENVIRONMENTS = Registry(
    "environment",
    {
        "calculator": "whorl.align.rl.environments.calculator:CalculatorEnv",
        "repair": "whorl.align.rl.environments.repair:RepairEnv",
        "openenv": "whorl.align.rl.environments.openenv:OpenEnvEnv",
        "verifiers": "whorl.align.rl.environments.verifiers:VerifiersEnv",
    },
)


class EnvironmentConfig(BaseModel):
    """An environment (`align/rl/environment.py`) and the limits of its rollouts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, AfterValidator(ENVIRONMENTS.check)] = Field(
        description="name, or module:attribute of a TextEnv"
    )
    max_turns: int = Field(
        default=4, ge=1, description="replies of the policy; a longer rollout is truncated"
    )
    step_seconds: float = Field(
        default=30.0, gt=0, description="time limit of one step of the environment, without verifiers"
    )
    reset_seconds: float = Field(
        default=60.0, gt=0, description="time limit of the start of a rollout, without verifiers"
    )
    overlap: bool = Field(
        default=False,
        description="sample the next turn of a row while other rows still wait: faster with slow environments, but the "
        "last bits then depend on the time of their answers",
    )
    options: dict[str, Any] = Field(default={}, description="arguments of the environment")


def _from_name(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


EnvironmentField = Annotated[EnvironmentConfig, BeforeValidator(_from_name)]
