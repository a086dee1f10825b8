"""Limits of episodes; importable without torch.

A subclass names an environment: `whorl.align.environments.EnvironmentConfig` by its name, `folder.FolderConfig` the folder
with tools.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from whorl.evals.episodes.environment import EnvServices, TextEnv


class EpisodeConfig(BaseModel):
    """An environment (`episodes/environment.py`) and the limits of its rollouts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

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

    def make(self, services: EnvServices) -> TextEnv:
        """Return the environment of a rollout. Raises ConfigError: it cannot be made."""
        raise NotImplementedError(f"{type(self).__name__} names no environment")


def make_environment(config: EpisodeConfig | None, services: EnvServices) -> TextEnv:
    """Return the environment of a rollout; None selects `VerifierEnv`. Raises ConfigError: it cannot be made."""
    from whorl.evals.episodes.environment import VerifierEnv

    return VerifierEnv(services) if config is None else config.make(services)
