"""Additional metrics sinks: W&B, trackio, or any object with the four methods of `Sink`.

    whorl run quickstart --log wandb
    whorl run quickstart --log trackio:project=mine
    [log.wandb]                                          # in the recipe; the options go to wandb.init
    project = "mine"

The run folder is complete in any case; a sink is a copy. So a sink may fail (network, account): the failure is logged
once, and after several in a row the sink is disabled. Sinks change no artifact and no address. A package is imported
with the first record; that it is installed is checked before any work.

A recipe has several steps that count from 0, and a resumed run repeats some of them. So each recipe step has a separate
axis in W&B ("pretrain/step"). trackio gets the step, and numbers only. The run folder stores the id under which a
resumed run continues its curves. W&B's copy of the terminal is disabled, since the dashboard moves the cursor.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from whorl.errors import ConfigError, one_of

Values = Mapping[str, float | str]
MAX_FAILURES = 5  # in a row


class Sink(Protocol):
    """Receives the metrics of a run."""

    def start(self, folder: Path, config: Mapping[str, Any]) -> None:
        """Called once before any record, with the run's folder and its resolved recipe."""

    def write(self, step_name: str, step: int, values: Values) -> None:
        """One record of a recipe step."""

    def end_step(self, step_name: str) -> None:
        """The recipe step has ended."""

    def close(self) -> None:
        """The run has ended."""


def _prefixed(step_name: str, values: Values) -> dict[str, float | str]:
    return {f"{step_name}/{key}": value for key, value in values.items()}


class ExternalLogger:
    """W&B, or trackio, which has the same interface.

    Args:
        name: the package: "wandb" or "trackio".
        options: for its `init`; by default the project is the recipe's name.
    """

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self.name, self.options = name, dict(options)
        self._folder, self._config = Path(), dict[str, Any]()
        self._package: Any = None
        self._steps: set[str] = set()

    def start(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._folder, self._config = folder, dict(config)

    def write(self, step_name: str, step: int, values: Values) -> None:
        if self._package is None:
            self._package = self._init_package()
        if self.name == "wandb":
            if step_name not in self._steps:
                self._package.define_metric(f"{step_name}/*", step_metric=f"{step_name}/step")
                self._steps.add(step_name)
            self._package.log({**_prefixed(step_name, values), f"{step_name}/step": step})
        elif numbers := {k: v for k, v in values.items() if not isinstance(v, str)}:
            self._package.log(_prefixed(step_name, numbers), step=step)

    def _init_package(self) -> Any:
        package = importlib.import_module(self.name)
        given = {"project": self._config.get("name", "whorl"), "config": self._config, "resume": "allow"}
        run_id = self._run_id()
        if self.name == "wandb":
            given |= {
                "id": run_id,
                "name": self._folder.name,
                "dir": str(self._folder),
                "settings": {"console": "off"},
            }
        else:
            given |= {"name": run_id}
        package.init(**{**given, **self.options})
        return package

    def _run_id(self) -> str:
        """The external id of this run folder, equal after a restart."""
        path = self._folder / f"{self.name}.json"
        try:
            return str(json.loads(path.read_text())["id"])
        except (OSError, ValueError, KeyError):
            run_id = f"{self._folder.name}-{uuid.uuid4().hex[:8]}"
            path.write_text(json.dumps({"id": run_id}) + "\n")
            return run_id

    def end_step(self, step_name: str) -> None:
        pass

    def close(self) -> None:
        if self._package is not None:
            self._package.finish()


LOGGERS = ("wandb", "trackio")


def parse_loggers(texts: Iterable[str], tables: Mapping[str, Mapping[str, Any]] | None = None) -> list[Sink]:
    """Return the sinks of `--log NAME[:key=value,...]` and of the recipe's table [log]; a flag extends its table.

    Raises:
        ConfigError: an unknown name, invalid options, or a package that is not installed.
    """
    wanted = {name: dict(options) for name, options in (tables or {}).items()}
    for text in texts:
        name, _, options = text.partition(":")
        table = wanted.setdefault(name, {})
        for option in filter(None, options.split(",")):
            key, equals, value = option.partition("=")
            if not equals or not key:
                raise ConfigError(
                    f"--log {text}: invalid option", expected="--log wandb:project=mine,entity=us"
                )
            table[key] = value
    for name in wanted:
        if name not in LOGGERS:
            given = f"[log.{name}]" if name in (tables or {}) else f"--log {name}"
            raise ConfigError(f"{given}: no such logger", expected=one_of(name, LOGGERS))
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"--log {name}: the package {name} is not installed", do=f"pip install {name}")
    return [ExternalLogger(name, options) for name, options in wanted.items()]


class SafeSinks:
    """Sinks whose failures never stop a run."""

    def __init__(self, sinks: Iterable[Sink], log: Callable[[str], None]) -> None:
        self._say = log
        self._failures = dict.fromkeys(sinks, 0)

    def __bool__(self) -> bool:
        return bool(self._failures)

    def start(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._for_each(lambda sink: sink.start(folder, config))

    def write(self, step_name: str, step: int, values: Values) -> None:
        self._for_each(lambda sink: sink.write(step_name, step, values))

    def end_step(self, step_name: str) -> None:
        self._for_each(lambda sink: sink.end_step(step_name))

    def close(self) -> None:
        self._for_each(lambda sink: sink.close())

    def _for_each(self, call: Callable[[Sink], None]) -> None:
        for sink, failures in list(self._failures.items()):
            try:
                call(sink)
            except Exception as error:
                name = getattr(sink, "name", type(sink).__name__)
                if failures == 0:
                    self._say(f"{name} failed, the run continues: {type(error).__name__}: {error}")
                self._failures[sink] = failures + 1
                if failures + 1 >= MAX_FAILURES:
                    self._say(f"{name} failed {MAX_FAILURES} times in a row and is disabled")
                    del self._failures[sink]
            else:
                self._failures[sink] = 0
