"""Results of an evaluation: one record for each item, kept as JSON lines with the summary of the task.

    FOLDER/results.json           tasks with their hashes, metrics with intervals, counts of outcomes, model and settings
    FOLDER/items-TASK.jsonl       one `ItemResult` a line

Comparisons, the page and the arena read these files and send no request to a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import nan
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

Outcome = Literal["right", "wrong", "not_found", "truncated", "refused", "error", "missing", "scored"]
OUTCOMES: tuple[Outcome, ...] = (
    "right", "wrong", "not_found", "truncated", "refused", "error", "missing", "scored",
)  # fmt: skip


Number = Annotated[float, BeforeValidator(lambda value: nan if value is None else value)]  # JSON has no NaN


@dataclass(frozen=True)
class ItemResult:
    """One item of a task under one model.

    Attributes:
        item: id within the task.
        scores: metric -> value; empty if the outcome is "missing".
        outcome: of the task's first metric. not_found: no answer could be extracted. truncated: the limit of tokens cut
            the answer before one was found. refused: the model declined. error: the metric failed, which is no statement
            about the answer. missing: no response. scored: neither right nor wrong, such as the likelihood of a text.
        reason: in a few words.
        cluster: items of one cluster share a text, so their scores are correlated; "" is a separate cluster.
        group: label for tables (subject, language, transformation).
        prompt, answers, gold: as shown to a reader; several answers if sampled.
        details: JSON values for the page: tokens with log-probabilities, scores of each choice, a trajectory.
        weights: metric -> weight of the item in the mean, if it is not 1: the bytes of its text for bits per byte.
    """

    item: str
    scores: Mapping[str, Number]
    outcome: Outcome
    reason: str = ""
    cluster: str = ""
    group: str = ""
    prompt: str = ""
    answers: tuple[str, ...] = ()
    gold: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskMeasure:
    """A figure of a task.

    Attributes:
        metric, value: after the transform.
        low, high: 95 % interval over items, over clusters if items have them; NaN if undefined.
        n: items behind it.
        chance: value of a model that answers at random; None if undefined.
        bounds: value with all missing responses wrong, and all right; None if none is missing, or undefined.
        standard_error: of the mean before the transform.
        method: of the interval, in words.
    """

    metric: str
    value: Number
    low: Number
    high: Number
    n: int
    about: str = ""
    unit: str = "share"
    higher_is_better: bool | None = True
    chance: float | None = None
    bounds: tuple[float, float] | None = None
    standard_error: Number = nan
    method: str = ""


@dataclass(frozen=True)
class TaskResult:
    """A task under one model.

    Attributes:
        task, kind, version, hash, about: of the task; figures with equal hashes are comparable.
        model, address: name as given, and address of weights and tokenizer.
        metrics: the shown ones; the first decides the outcome of an item.
        measures: figures of the task, at least those of `metrics`.
        by_group: group -> figure of the first metric, if items have groups.
        outcomes: outcome -> number of items.
        requests: distinct requests, and how many of them the cache answered.
        notes: sentences for the reader, such as the number of contexts that were cut.
        settings: of the run, such as the limit of items.
        items: in the order of the task.
    """

    task: str
    kind: str
    version: str
    hash: str
    about: str
    model: str
    address: str
    metrics: tuple[str, ...]
    measures: tuple[TaskMeasure, ...]
    outcomes: Mapping[str, int]
    items: tuple[ItemResult, ...] = ()
    by_group: Mapping[str, TaskMeasure] = field(default_factory=dict)
    requests: int = 0
    cached: int = 0
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    def measure(self, metric: str) -> TaskMeasure:
        """Return the figure of a metric. Raises KeyError."""
        return next(m for m in self.measures if m.metric == metric)

    @property
    def first(self) -> TaskMeasure | None:
        """The figure of the first metric, which decides the outcome of an item."""
        name = self.metrics[0] if self.metrics else ""
        return next((m for m in self.measures if m.metric == name), next(iter(self.measures), None))
