"""Where the units of a step run: settings that change no byte of the result, and are not part of an address."""

from __future__ import annotations

import importlib.util
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from whorl.corpus.mapreduce.executors import LocalPool, RayTasks
from whorl.corpus.mapreduce.units import Executor
from whorl.errors import ConfigError


class ExecutorConfig(BaseModel):
    """The engine of a step's units of work."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: Literal["local", "ray"] = Field(
        default="local",
        description="local: processes of this machine; ray: tasks on the cluster of RAY_ADDRESS",
    )
    workers: int | None = Field(
        default=None,
        ge=1,
        description="units at a time; default: a process per core, or all CPUs of the cluster",
    )

    def executor(self, default_workers: int = 1) -> Executor:
        """Return the executor. Raises ConfigError: Ray is not installed."""
        if self.engine == "ray":
            self.check_installed()
            return RayTasks(self.workers)
        return LocalPool(self.workers or default_workers)

    def check_installed(self, step: str = "") -> None:
        """Raise ConfigError if the engine is not installed.

        Args:
            step: name of the step, for the message.
        """
        if self.engine == "ray" and importlib.util.find_spec("ray") is None:
            raise ConfigError(
                f'{step + "." if step else ""}engine = "ray", but Ray is not installed',
                do="pip install 'whorl[ray]', or use engine = \"local\"",
            )


ENGINE_FIELDS = tuple(ExecutorConfig.model_fields)
