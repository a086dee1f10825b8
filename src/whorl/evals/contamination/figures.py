"""Figures of a task with and without the items that the model was trained on.

    METRIC              all items
    METRIC clean        the items that were not found in the training text
    METRIC found        those that were found

The clean figure is that of a model that never saw the items, if contamination does not depend on their difficulty. Where
only easy items are in the training text, both figures differ without any memory: compare with a model of other text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from whorl.evals.contamination.search import ContaminatedItems
from whorl.evals.measures import measure
from whorl.evals.results import ItemResult, TaskMeasure, TaskResult
from whorl.evals.tasks import EvalTask

CLEAN, FOUND = "clean", "found"
DETAIL = "contamination"  # key of an item's details


def with_contamination(task: EvalTask, result: TaskResult, contaminated: ContaminatedItems) -> TaskResult:
    """Return the result with figures of the clean and of the found items, a note, and the place of each found item."""
    items = tuple(_marked(item, contaminated) for item in result.items)
    clean = [item for item in items if item.item not in contaminated.found]
    found = [item for item in items if item.item in contaminated.found]
    parts = [(CLEAN, clean, "items not in the training text"), (FOUND, found, "items in the training text")]
    more = [
        _measure(task, name, suffix, part, about)
        for name in task.kind.chosen_metrics()
        for suffix, part, about in parts
        if found
    ]
    shown = [f"{name} {CLEAN}" for name in result.metrics] if found else []
    return replace(
        result, items=items, measures=(*result.measures, *more), metrics=(*result.metrics, *shown),
        notes=(*result.notes, _note(contaminated, len(items))),
    )  # fmt: skip


def _measure(task: EvalTask, name: str, suffix: str, items: Sequence[ItemResult], about: str) -> TaskMeasure:
    chance = task.kind.chance([item for item in task.items if item.id in {each.item for each in items}])
    made = measure(name, task.kind.metrics[name], items, chance.get(name))
    return replace(made, metric=f"{name} {suffix}", about=about)


def _marked(item: ItemResult, contaminated: ContaminatedItems) -> ItemResult:
    place = contaminated.found.get(item.item)
    if place is None:
        return item
    return replace(
        item, details={**item.details, DETAIL: {"place": place.place, "score": round(place.score, 3)}}
    )


def _note(contaminated: ContaminatedItems, n: int) -> str:
    text = f"{len(contaminated.found):,} of {n:,} items were found in the training tokens"
    if contaminated.too_short:
        text += f"; {len(contaminated.too_short):,} have too few words to be searched"
    return text
