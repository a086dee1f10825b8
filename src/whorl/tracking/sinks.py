"""Where the numbers of a run may go besides its own folder: W&B, trackio, or anything with these four methods.

    whorl run quickstart --log wandb
    whorl run quickstart --log trackio:project=mine
    [log.wandb]                                          # in the recipe; what stands here goes to wandb.init
    project = "mine"

The run folder has everything in any case; a sink is a copy for others to look at. So a sink may fail (no network, no
account): it is told once, and after a few failures in a row the sink is left alone; training goes on. Which sinks there are
changes no artifact and no address. Their packages are imported when the first number comes, and not before; that they are
installed is asked before any work.

A recipe has several steps that count from 0, and a run that was killed repeats some of its steps. So each recipe step has
an axis of its own in W&B ("pretrain/step"), whose counter is left alone; trackio is given the step, and numbers without
texts. Repeated steps fall on the same place. The mark that lets a continued run find its own curves again is kept in the
run folder. W&B's copy of the terminal is turned off: the dashboard moves its cursor.
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
    """Hears what a run measures."""

    def start(self, folder: Path, config: Mapping[str, Any]) -> None:
        """The run's folder and its resolved recipe. Called before anything is written."""

    def write(self, step_name: str, step: int, values: Values) -> None:
        """One record of a recipe step."""

    def end_step(self, step_name: str) -> None:
        """The recipe step is over."""

    def close(self) -> None:
        """The run is over."""


def _prefixed(step_name: str, values: Values) -> dict[str, float | str]:
    return {f"{step_name}/{key}": value for key, value in values.items()}


class ExternalLogger:
    """W&B, or trackio, whose interface is the same.

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
        mark = self._run_id()
        if self.name == "wandb":
            given |= {
                "id": mark,
                "name": self._folder.name,
                "dir": str(self._folder),
                "settings": {"console": "off"},
            }
        else:
            given |= {"name": mark}
        package.init(**{**given, **self.options})
        return package

    def _run_id(self) -> str:
        """What this run folder is called there, the same after a restart."""
        path = self._folder / f"{self.name}.json"
        try:
            return str(json.loads(path.read_text())["id"])
        except (OSError, ValueError, KeyError):
            mark = f"{self._folder.name}-{uuid.uuid4().hex[:8]}"
            path.write_text(json.dumps({"id": mark}) + "\n")
            return mark

    def end_step(self, step_name: str) -> None:
        pass

    def close(self) -> None:
        if self._package is not None:
            self._package.finish()


LOGGERS = ("wandb", "trackio")


def parse_loggers(texts: Iterable[str], tables: Mapping[str, Mapping[str, Any]] | None = None) -> list[Sink]:
    """The sinks that `--log NAME[:key=value,...]` and the recipe's table [log] ask for; a flag adds to its table.

    Raises:
        ConfigError: an unknown name, options that cannot be read, or a package that is not installed.
    """
    wanted = {name: dict(options) for name, options in (tables or {}).items()}
    for text in texts:
        name, _, options = text.partition(":")
        table = wanted.setdefault(name, {})
        for option in filter(None, options.split(",")):
            key, equals, value = option.partition("=")
            if not equals or not key:
                raise ConfigError(
                    f"--log {text}: not understood", expected="--log wandb:project=mine,entity=us"
                )
            table[key] = value
    for name in wanted:
        if name not in LOGGERS:
            raise ConfigError(f"--log {name}: no such place for metrics", expected=one_of(name, LOGGERS))
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"--log {name}: the package {name} is not installed", do=f"pip install {name}")
    return [ExternalLogger(name, options) for name, options in wanted.items()]


class SafeSinks:
    """Sinks of which none can stop a run."""

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
                    self._say(f"{name} fails, the run goes on: {type(error).__name__}: {error}")
                self._failures[sink] = failures + 1
                if failures + 1 >= MAX_FAILURES:
                    self._say(f"{name} failed {MAX_FAILURES} times in a row and is left alone from here")
                    del self._failures[sink]
            else:
                self._failures[sink] = 0
