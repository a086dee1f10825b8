"""Read the folders of evaluations for the page: `results.json` and `items-TASK.jsonl` (`whorl.evals.results`).

Fields of `results.json` that the page reads. Others are ignored; those of `cost` are optional:

    {"cost": {"seconds": 12.5, "tokens_per_second": 810, "memory_bytes": 4e8, "joules": 90},
     "tasks": [{"task": "arc", "model": "a", "address": "3f...", "hash": "9c...", "kind": "choice", "requests": 100,
                "measures": [{"metric": "acc", "value": 0.61, "low": 0.51, "high": 0.7, "chance": 0.25, "unit": "share",
                              "about": "share of right choices", "bounds": [0.6, 0.63]}],
                "metrics": ["acc"], "outcomes": {"right": 61, "wrong": 39},
                "by_group": {"physics": {"metric": "acc", "value": 0.7}},
                "notes": ["3 contexts exceed the window"]}]}

Without `cost` the time is that of the tasks, unless responses came from the cache.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from whorl.errors import DataError

RESULTS_FILE = "results.json"
OUTCOMES = ("right", "wrong", "not_found", "truncated", "refused", "error", "missing", "scored")


class _Read(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class PageMeasure(_Read):
    """One figure with its interval, and the value of guessing. Fields of `whorl.evals.results.TaskMeasure`."""

    metric: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    about: str = ""
    unit: str = "share"
    higher_is_better: bool | None = True
    chance: float | None = None
    bounds: tuple[float, float] | None = None


class PageTask(_Read):
    """One task of one model. Fields of `whorl.evals.results.TaskResult`."""

    name: str = Field(alias="task")
    model: str = ""
    address: str = ""
    hash: str = ""
    kind: str = ""
    about: str = ""
    metrics: tuple[str, ...] = ()
    measures: tuple[PageMeasure, ...] = ()
    by_group: dict[str, PageMeasure] = {}
    outcomes: dict[str, int] = {}
    requests: int = 0
    cached: int = 0
    seconds: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def first(self) -> PageMeasure | None:
        """The figure of the first metric, which decides the outcome of an item."""
        name = self.metrics[0] if self.metrics else ""
        return next((m for m in self.measures if m.metric == name), next(iter(self.measures), None))


class PageCost(_Read):
    """Resources of the evaluation; energy is that of the processor package where it can be read."""

    seconds: float | None = None
    tokens_per_second: float | None = None
    memory_bytes: float | None = None
    joules: float | None = None


class _Results(_Read):
    tasks: tuple[PageTask, ...]
    cost: PageCost = PageCost()


@dataclass(frozen=True)
class EvaluatedModel:
    """One folder. label: name of the model, unique on the page."""

    folder: Path
    label: str
    address: str
    tasks: Mapping[str, PageTask]
    cost: PageCost

    def items(self, task: str) -> Iterator[dict[str, Any]]:
        """Yield the items of a task as records; none if the model has not run the task.

        Raises:
            DataError: a line is damaged, or the file is missing.
        """
        if task not in self.tasks:
            return
        path = self.folder / f"items-{task}.jsonl"
        try:
            with path.open(encoding="utf-8") as lines:
                for number, line in enumerate(lines, 1):
                    yield _item(line, f"{path}, line {number}")
        except FileNotFoundError as error:
            raise DataError(
                f"{path} is missing", expected="one file of items for each task of results.json",
                do="run the evaluation again; responses in the cache are not requested again",
            ) from error  # fmt: skip


def _item(line: str, where: str) -> dict[str, Any]:
    try:
        item = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: {error}", expected="one JSON object, an ItemResult") from error
    if not isinstance(item, dict) or not isinstance(item.get("item"), str):
        raise DataError(f"{where}: {line[:80]!r}", expected="a JSON object with the text `item`")
    if item.get("outcome") not in OUTCOMES:
        raise DataError(f"{where}: outcome is {item.get('outcome')!r}", expected=", ".join(OUTCOMES))
    return item


def read_evaluations(folders: list[Path]) -> list[EvaluatedModel]:
    """Return the models of the folders, in order. Equal names get a number.

    Raises:
        DataError: a folder has no `results.json`, or a field is wrong.
    """
    found: list[EvaluatedModel] = []
    for folder in folders:
        path = folder / RESULTS_FILE
        try:
            results = _Results.model_validate_json(path.read_bytes())
        except FileNotFoundError as error:
            raise DataError(
                f"{path} does not exist", expected="a folder of an evaluation", do="run whorl eval first"
            ) from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise DataError(
                f"{path}: {where}: {first['msg']}", expected="the results of whorl eval"
            ) from error
        top = results.tasks[0] if results.tasks else None
        name, labels = (top.model if top else "") or folder.name, {model.label for model in found}
        label, number = name, 2
        while label in labels:
            label, number = f"{name} ({number})", number + 1
        tasks = {task.name: task for task in results.tasks}
        cost = _with_seconds(results.cost, results.tasks)
        found.append(EvaluatedModel(folder, label, top.address if top else "", tasks, cost))
    return found


def _with_seconds(cost: PageCost, tasks: Sequence[PageTask]) -> PageCost:
    """Return the cost with the time of the tasks, if it has none and no response came from the cache."""
    if cost.seconds is not None or not tasks or any(task.cached or not task.requests for task in tasks):
        return cost
    return cost.model_copy(update={"seconds": sum(task.seconds for task in tasks)})
