"""Results of an evaluation on disk: `results.json` and one file of items for each task (see `results.py`).

Numbers that JSON lacks (NaN, infinity) are written as null and read as NaN.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from whorl.errors import DataError
from whorl.evals.results import ItemResult, TaskResult
from whorl.files import write_atomic

RESULTS_FILE = "results.json"
FORMAT = 1


_ITEM = TypeAdapter(ItemResult)


class _Results(BaseModel):
    tasks: list[TaskResult]
    cost: dict[str, float] = {}


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
        DataError: a file is missing or damaged. The message names the file and the field, or the line.
    """
    path = folder / RESULTS_FILE
    try:
        found = _Results.model_validate_json(path.read_bytes()).tasks
        for number, result in enumerate(found):
            path = folder / items_file(result.task)
            found[number] = replace(result, items=tuple(_items(path)))
    except (OSError, ValidationError) as error:
        reason = error.strerror if isinstance(error, OSError) else _first_error(error)
        raise DataError(
            f"{path} cannot be read: {reason}", expected=f"the results of whorl eval: {RESULTS_FILE} and its files of items",
            do="run `whorl eval` with --out and this folder again; responses in the cache are not requested again",
        ) from error  # fmt: skip
    return found


def load_cost(folder: Path, address: str) -> dict[str, float]:
    """Return the cost in a folder's results, if they are of the model at `address`; else an empty mapping."""
    try:
        content = _Results.model_validate_json((folder / RESULTS_FILE).read_bytes())
    except (OSError, ValidationError):
        return {}
    return content.cost if all(task.address == address for task in content.tasks) else {}


def _items(path: Path) -> Iterator[ItemResult]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield _ITEM.validate_json(line)
            except ValidationError as error:
                raise DataError(
                    f"{path}, line {number}: {_first_error(error)}", expected="one JSON object, an ItemResult"
                ) from error


def _first_error(error: ValidationError) -> str:
    """Return the field and what is wrong with it."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")


def _finite(value: Any) -> Any:
    """Return a JSON value with null for numbers that are not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value
