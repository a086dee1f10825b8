"""Results of an evaluation on disk: `results.json` and one file of items for each task (see `results.py`).

Numbers that JSON lacks (NaN, infinity) are written as null and read as NaN.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from whorl.errors import DataError
from whorl.evals.results import ItemResult, TaskMeasure, TaskResult
from whorl.files import write_atomic

RESULTS_FILE = "results.json"
FORMAT = 1


def items_file(task: str) -> str:
    """Return the name of the file of a task's items."""
    return f"items-{task}.jsonl"


def save_results(folder: Path, results: Sequence[TaskResult], about: Mapping[str, Any] | None = None) -> None:
    """Write the results of one model.

    Args:
        about: more fields of `results.json`, such as the suite.

    Raises:
        DataError: two tasks have the same name.
    """
    names = [result.task for result in results]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"two results have the name {twice!r}", expected="different names of tasks")
    folder.mkdir(parents=True, exist_ok=True)
    for result in results:
        lines = (json.dumps(_finite(asdict(item)), ensure_ascii=False) + "\n" for item in result.items)
        write_atomic(folder / items_file(result.task), "".join(lines))
    tasks = [_finite({k: v for k, v in asdict(result).items() if k != "items"}) for result in results]
    content = {"format": FORMAT, **(about or {}), "tasks": tasks}
    write_atomic(folder / RESULTS_FILE, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def load_results(folder: Path) -> list[TaskResult]:
    """Return the results of a folder, with their items.

    Raises:
        DataError: a file is missing or damaged.
    """
    path = folder / RESULTS_FILE
    try:
        content = json.loads(path.read_text("utf-8"))
        return [_task_result(folder, fields) for fields in content["tasks"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise DataError(
            f"the results in {folder} cannot be read: {reason}", expected=f"{RESULTS_FILE} and its files of items",
            do="run `whorl eval` with --out and this folder again",
        ) from error  # fmt: skip


def load_cost(folder: Path, address: str) -> dict[str, Any]:
    """Return the cost in a folder's results, if they are of the model at `address`; else an empty mapping."""
    try:
        content = json.loads((folder / RESULTS_FILE).read_text("utf-8"))
        same = all(task["address"] == address for task in content["tasks"])
        return dict(content.get("cost", {})) if same else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def load_items(path: Path) -> list[ItemResult]:
    """Return the items of a file. Raises OSError, ValueError and TypeError for a missing or damaged file."""
    with path.open(encoding="utf-8") as lines:
        return [_item(json.loads(line)) for line in lines]


def _task_result(folder: Path, content: dict[str, Any]) -> TaskResult:
    def measure(given: dict[str, Any]) -> TaskMeasure:
        bounds = given.pop("bounds")
        numbers = {f.name for f in fields(TaskMeasure) if f.type == "float"}
        given = {k: math.nan if v is None and k in numbers else v for k, v in given.items()}
        return TaskMeasure(**given, bounds=None if bounds is None else (bounds[0], bounds[1]))

    measures = tuple(measure(each) for each in content.pop("measures"))
    by_group = {group: measure(each) for group, each in content.pop("by_group").items()}
    for name in ("metrics", "notes"):
        content[name] = tuple(content[name])
    items = tuple(load_items(folder / items_file(content["task"])))
    return TaskResult(**content, measures=measures, by_group=by_group, items=items)


def _item(given: dict[str, Any]) -> ItemResult:
    scores = {name: math.nan if value is None else value for name, value in given["scores"].items()}
    return ItemResult(**{**given, "scores": scores, "answers": tuple(given["answers"])})


def _finite(value: Any) -> Any:
    """Return a JSON value with null for numbers that are not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value
