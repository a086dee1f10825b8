"""The evaluated models of a page: their results (`whorl.evals.results_io`), a unique label, and the cost.

Without a measured time the cost has that of the tasks, unless responses came from the cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from whorl.evals.results import ItemResult, TaskResult
from whorl.evals.results_io import load_cost, load_results


@dataclass(frozen=True)
class EvaluatedModel:
    """One folder.

    Attributes:
        label: name of the model, unique on the page.
        cost: "seconds", "tokens_per_second", "memory_bytes" and "joules", of those that were measured. Energy is that of
            the processor package.
    """

    label: str
    address: str
    tasks: Mapping[str, TaskResult]
    cost: Mapping[str, float]

    def items(self, task: str) -> Sequence[ItemResult]:
        """Return the items of a task; none if the model has not run it."""
        return self.tasks[task].items if task in self.tasks else ()


def read_evaluations(folders: Sequence[Path]) -> list[EvaluatedModel]:
    """Return the models of the folders, in order. Equal names get a number.

    Raises:
        DataError: a file of a folder is missing or damaged.
    """
    found: list[EvaluatedModel] = []
    for folder in folders:
        tasks = load_results(folder)
        name, address = (tasks[0].model or folder.name, tasks[0].address) if tasks else (folder.name, "")
        labels = {model.label for model in found}
        label, number = name, 2
        while label in labels:
            label, number = f"{name} ({number})", number + 1
        cost = load_cost(folder, address)
        if "seconds" not in cost and tasks and not any(task.cached or not task.requests for task in tasks):
            cost["seconds"] = sum(task.seconds for task in tasks)
        found.append(EvaluatedModel(label, address, {task.task: task for task in tasks}, cost))
    return found
