"""Results of an evaluation: one record for each item, kept as JSON lines with the summary of the task.

    FOLDER/results.json           tasks with their hashes, metrics with intervals, counts of outcomes, model and settings
    FOLDER/items-TASK.jsonl       one `ItemResult` a line

Comparisons, the page and the arena read these files and send no request to a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Outcome = Literal["right", "wrong", "not_found", "truncated", "refused", "error", "missing"]


@dataclass(frozen=True)
class ItemResult:
    """One item of a task under one model.

    Attributes:
        item: id within the task.
        scores: metric -> value; empty if the outcome is "missing".
        outcome: of the task's first metric. not_found: no answer could be extracted. truncated: the limit of tokens cut
            the answer before one was found. refused: the model declined. error: the metric failed, which is no statement
            about the answer. missing: no response.
        reason: in a few words.
        cluster: items of one cluster share a text, so their scores are correlated; "" is a separate cluster.
        group: label for tables (subject, language, transformation).
        prompt, answers, gold: as shown to a reader; several answers if sampled.
        details: JSON values for the page: tokens with log-probabilities, scores of each choice, a trajectory.
        weights: metric -> weight of the item in the mean, if it is not 1: the bytes of its text for bits per byte.
    """

    item: str
    scores: Mapping[str, float]
    outcome: Outcome
    reason: str = ""
    cluster: str = ""
    group: str = ""
    prompt: str = ""
    answers: tuple[str, ...] = ()
    gold: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
