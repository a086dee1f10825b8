"""Suites of tasks: a TOML file, or a generated suite of the package.

    name = "science"
    about = "Multiple choice on science."

    [[tasks]]
    task = "arc"                       # a ready task, or the path of a task file, relative to this file
    test = "data/arc.jsonl"            # replaces data.test; also `train`
    limit = 500                        # of items, the first ones
    set = { name = "arc-500", version = "2" }      # replaces settings of the task

A generated suite is a function `(SuiteInputs) -> list of EvalTask`, registered in SUITES or named "module:attribute".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from whorl.errors import ConfigError, NotApplicableError, settings_error
from whorl.evals.kinds.kind import EvalTask
from whorl.evals.suites.catalog import catalog_file
from whorl.evals.tasks.config import (
    Paths,
    TaskConfig,
    absolute,
    parse_task,
    read_task_file,
    read_toml,
)
from whorl.evals.tasks.harness import read_harness_file
from whorl.evals.tasks.task import load_task
from whorl.registry import Registry
from whorl.store import user_path

SUITES = Registry(
    "suite",
    {
        "own": "whorl.evals.suites.own:own_suite",
        "safety": "whorl.evals.suites.safety:safety_suite",
        "jailbreak": "whorl.evals.suites.safety:jailbreak_suite",
        "probes": "whorl.evals.suites.probes:probes_suite",
        "side-effects": "whorl.evals.suites.side_effects:side_effects_suite",
        "sources": "whorl.evals.suites.cited_sources:sources_suite",
        "reasoning-gym": "whorl.evals.suites.reasoning_gym:reasoning_gym_suite",
    },
)

ABOUT: Mapping[str, str] = {
    "own": "last words, next lines, functions and doctests of the held-out documents of the model's corpus",
    "safety": "refusal of harmful requests, and of harmless ones that resemble them",
    "jailbreak": "the same requests under role play, encodings and other transformations",
    "probes": "induction, recall, copying, sorting, brackets, arithmetic and state tracking, by difficulty",
    "side-effects": "forgetting, exposure bias, and answers about people who do not exist",
    "sources": "made-up facts from numbered sources, with the right citation; and the same questions without sources",
    "reasoning-gym": "algebra, games, logic and further families of the package reasoning-gym",
}


@dataclass(frozen=True)
class SuiteInputs:
    """Inputs of a generated suite.

    Attributes:
        documents: returns (path, text) of held-out documents, for a suite from a corpus.
        limit: of items per task; None: the suite's own size.
        seed: of the generated items.
        log: receives a sentence about each task that is left out.
        run_programs: an item whose solution does not pass its own tests is left out; False to count items only.
    """

    documents: Callable[[], Sequence[tuple[str, str]]] = tuple
    limit: int | None = None
    seed: int = 0
    log: Callable[[str], None] = lambda _: None
    run_programs: bool = True


class SuiteTask(BaseModel):
    """One task of a suite file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    task: str
    test: Paths = ()
    train: Paths = ()
    limit: int | None = Field(default=None, ge=1)
    set: dict[str, Any] = {}


class SuiteConfig(BaseModel):
    """A suite file; see the top of this module."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    about: str = ""
    tasks: tuple[SuiteTask, ...] = Field(min_length=1)


@dataclass(frozen=True)
class TaskSources:
    """Files of data from the command line.

    Attributes:
        test, train: name of a task -> files; the name "" is any task.
        num_fewshot: few-shot examples of each item; None keeps those of the task.
    """

    test: Mapping[str, Sequence[str]] = field(default_factory=dict)
    train: Mapping[str, Sequence[str]] = field(default_factory=dict)
    num_fewshot: int | None = None

    def load(self, config: TaskConfig, limit: int | None = None) -> EvalTask:
        """Return the task with its items. Raises ConfigError, DataError."""
        test, train = (given.get(config.name, given.get("", ())) for given in (self.test, self.train))
        if self.num_fewshot is not None:
            config = config.model_copy(update={"num_fewshot": self.num_fewshot, "examples": ()})
        return load_task(config, test=test, train=train, limit=limit)


def read_any_task(name: str, folder: Path = Path()) -> TaskConfig:
    """Return the configuration of a ready task by its name, or of a task file (.toml, or .yaml of lm-evaluation-harness).

    Raises:
        ConfigError: no such task, or a wrong setting.
    """
    suffix = Path(name).suffix
    path = folder / user_path(name)
    if suffix in (".yaml", ".yml"):
        return read_harness_file(path)
    return read_task_file(path if suffix == ".toml" or path.is_file() else catalog_file(name))


def load_tasks(names: Sequence[str], sources: TaskSources, limit: int | None = None) -> list[EvalTask]:
    """Return tasks by name or file.

    Raises:
        ConfigError: a name, a setting, or data for a task that is not among them. DataError: wrong records.
    """
    configs = [read_any_task(name) for name in names]
    _check_sources(sources, [config.name for config in configs])
    return [sources.load(config, limit) for config in configs]


def load_suite(name: str, inputs: SuiteInputs, sources: TaskSources = TaskSources()) -> list[EvalTask]:
    """Return the tasks of a suite: a name of SUITES, "module:attribute", or a TOML file.

    Raises:
        ConfigError: no such suite, or a wrong setting. DataError: wrong records. NotApplicableError: a generated suite
            finds nothing to evaluate.
    """
    path = Path(name).expanduser()
    if path.suffix == ".toml":
        return _load_file(path, inputs, sources)
    make: Callable[[SuiteInputs], list[EvalTask]] = SUITES.get(name)
    made = make(inputs)
    if not made:
        raise NotApplicableError(f"the suite {name} has no tasks for these inputs")
    return made


def _load_file(path: Path, inputs: SuiteInputs, sources: TaskSources) -> list[EvalTask]:
    try:
        suite = SuiteConfig.model_validate(read_toml(path))
    except ValidationError as error:
        raise settings_error(error.errors()[0], str(path), SuiteConfig, "correct the suite file") from error
    configs = [_configured(each, path) for each in suite.tasks]
    _check_sources(sources, [config.name for config in configs])
    limits = [[n for n in (each.limit, inputs.limit) if n is not None] for each in suite.tasks]
    return [sources.load(config, min(n, default=None)) for config, n in zip(configs, limits, strict=True)]


def _configured(each: SuiteTask, path: Path) -> TaskConfig:
    try:
        config = read_any_task(each.task, path.parent)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.what}", expected=error.expected, do=error.do) from error
    given = {"test": each.test or config.data.test, "train": each.train or config.data.train}
    config = config.model_copy(update={"data": absolute(config.data.model_copy(update=given), path.parent)})
    return parse_task({**config.model_dump(), **each.set}, f"{path}: {each.task}") if each.set else config


def _check_sources(sources: TaskSources, names: Sequence[str]) -> None:
    for name in (*sources.test, *sources.train):
        if name and name not in names:
            raise ConfigError(
                f"data is given for the task {name!r}, which is not evaluated", expected=f"one of: {', '.join(names)}"
            )  # fmt: skip
    for given in (sources.test, sources.train):
        if "" in given and len(names) > 1:
            raise ConfigError(
                f"one path of data is given for {len(names)} tasks", expected="NAME=PATH for each",
                do=f"for example --data {names[0]}=FILE",
            )  # fmt: skip
