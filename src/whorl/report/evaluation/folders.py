"""Read the folders of evaluations for the page: `results.json` and `items-TASK.jsonl` (`whorl.evals.results`).

Fields of `results.json` that the page reads; others are ignored, and all but the names are optional:

    {"model": {"name": "a", "address": "3f..."},
     "cost": {"seconds": 12.5, "tokens_per_second": 810, "memory_bytes": 4e8, "joules": 90},
     "tasks": [{"name": "arc", "hash": "9c...", "kind": "choice", "items": 100,
                "metrics": {"accuracy": {"value": 0.61, "low": 0.51, "high": 0.7, "chance": 0.25}},
                "outcomes": {"right": 61, "wrong": 39},
                "bounds": [0.6, 0.63],
                "calibration": {"ece": 0.04, "brier": 0.2, "bins": [{"confidence": 0.3, "accuracy": 0.4, "items": 12}]},
                "notes": ["12 items were found in the training tokens"]}]}
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from whorl.errors import DataError

RESULTS_FILE = "results.json"
OUTCOMES = ("right", "wrong", "not_found", "truncated", "refused", "error", "missing")


class _Read(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class PageMetric(_Read):
    """One figure with its interval, and the value of guessing."""

    value: float | None = None
    low: float | None = None
    high: float | None = None
    chance: float | None = None


class PageBin(_Read):
    """One bin of a reliability diagram: mean confidence and share of right answers over its items."""

    confidence: float
    accuracy: float
    items: int


class PageCalibration(_Read):
    """Calibration of a choice task."""

    bins: tuple[PageBin, ...] = ()
    ece: float | None = None
    brier: float | None = None


class PageTask(_Read):
    """One task of one model. bounds: of the first metric, with all missing responses wrong, and all right."""

    name: str
    hash: str = ""
    kind: str = ""
    items: int = 0
    metrics: dict[str, PageMetric] = {}
    outcomes: dict[str, int] = {}
    bounds: tuple[float, float] | None = None
    calibration: PageCalibration | None = None
    notes: tuple[str, ...] = ()

    @field_validator("metrics", mode="before")
    @classmethod
    def _of_numbers(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {k: {"value": v} if v is None or isinstance(v, int | float) else v for k, v in value.items()}


class PageCost(_Read):
    """Resources of the evaluation; energy is that of the processor package where it can be read."""

    seconds: float | None = None
    tokens_per_second: float | None = None
    memory_bytes: float | None = None
    joules: float | None = None


class _Model(_Read):
    name: str = ""
    address: str = ""


class _Results(_Read):
    model: _Model
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
        name, labels = results.model.name or folder.name, {model.label for model in found}
        label, number = name, 2
        while label in labels:
            label, number = f"{name} ({number})", number + 1
        tasks = {task.name: task for task in results.tasks}
        found.append(EvaluatedModel(folder, label, results.model.address, tasks, results.cost))
    return found
