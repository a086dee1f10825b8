"""Settings of multi-turn environments, and the table of their names; importable without torch.

[steps.rl]
environment = "calculator"                          # or "my_module:MyEnv"

[steps.rl.environment]                              # the same, with its limits
name = "repair"
max_turns = 3
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from whorl.errors import ConfigError
from whorl.evals.episodes.config import EpisodeConfig
from whorl.registry import Registry

if TYPE_CHECKING:
    from whorl.evals.episodes.environment import EnvServices, TextEnv

ENVIRONMENTS = Registry(
    "environment",
    {
        "calculator": "whorl.align.rl.environments.calculator:CalculatorEnv",
        "repair": "whorl.align.rl.environments.repair:RepairEnv",
        "openenv": "whorl.align.rl.environments.openenv:OpenEnvEnv",
        "verifiers": "whorl.align.rl.environments.verifiers:VerifiersEnv",
    },
)


class EnvironmentConfig(EpisodeConfig):
    """An environment (`evals/episodes/environment.py`) and the limits of its rollouts."""

    name: Annotated[str, AfterValidator(ENVIRONMENTS.check)] = Field(
        description="name, or module:attribute of a TextEnv"
    )
    options: dict[str, Any] = Field(default={}, description="arguments of the environment")

    def make(self, services: EnvServices) -> TextEnv:
        """Return the environment of a rollout.

        Raises:
            ConfigError: the environment cannot be imported, is no TextEnv, or rejects its options.
        """
        from whorl.evals.episodes.environment import TextEnv

        try:
            env = ENVIRONMENTS.get(self.name)(services, **self.options)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"environment {self.name!r} cannot be made: {error}",
                expected="the arguments of its class", do="correct environment.options",
            ) from error  # fmt: skip
        if not isinstance(env, TextEnv):
            raise ConfigError(
                f"environment {self.name!r} is {type(env).__name__}",
                expected="a subclass of whorl.evals.episodes.environment.TextEnv",
            )
        return env


def _from_name(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


EnvironmentField = Annotated[EnvironmentConfig, BeforeValidator(_from_name)]
