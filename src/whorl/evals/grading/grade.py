"""The result of a grader for one answer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from whorl.errors import WhorlError
from whorl.evals.results import Outcome

UNANSWERED: tuple[Outcome, ...] = ("not_found", "truncated", "refused")


@dataclass(frozen=True)
class Grade:
    """The grade of one answer. A reward is a weighted sum of values.

    Attributes:
        value: usually 1 for a right answer, and 0 for a wrong one.
        passed: whether the answer is right.
        reason: a kind, and details after a colon.
        scores: metric -> value, larger is better unless the grader's documentation states otherwise.
        outcome: as in `ItemResult`, but never "missing"; by default right or wrong. "error": the grader raised or hung, so
            the value of 0 is no statement about the answer. (A program of the model that raises is a wrong answer.)
        answer: the answer as extracted; "" if none was found.
        weights: metric -> weight of this answer in the mean over items, where it is not 1.
    """

    value: float
    passed: bool
    reason: str = ""
    scores: Mapping[str, float] = field(default_factory=dict)
    outcome: Outcome = "scored"
    answer: str = ""
    weights: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.outcome == "scored":
            object.__setattr__(self, "outcome", "right" if self.passed else "wrong")

    @property
    def failed(self) -> bool:
        """Whether the grader failed."""
        return self.outcome == "error"

    @classmethod
    def of(
        cls, scores: Mapping[str, float], outcome: Outcome, reason: str = "", answer: str = "",
        weights: Mapping[str, float] | None = None,
    ) -> Self:  # fmt: skip
        """Return the grade of an outcome; its value is 1 if the answer is right."""
        right = outcome == "right"
        return cls(float(right), right, reason, scores, outcome, answer, weights or {})

    @classmethod
    def error(cls, reason: str | Exception) -> Self:
        """Return the grade of a grader that failed."""
        if isinstance(reason, Exception):
            what = reason.what if isinstance(reason, WhorlError) else str(reason)
            reason = f"raised: {type(reason).__name__}: {what}".splitlines()[0][:300]
        return cls(0.0, False, reason, outcome="error")

    @classmethod
    def read(cls, found: Any) -> Grade:
        """Return what a grader returned as a grade: a number of 1 or more has passed; one that is not finite is an error."""
        if isinstance(found, Grade):
            grade, value = found, float(found.value)
        else:
            value = float(found)
            grade = Grade(value, value >= 1.0, "passed" if value >= 1.0 else "below 1")
        if not math.isfinite(value):
            return cls.error(f"raised: the value is {value}")
        scores = {str(name): float(score) for name, score in grade.scores.items()}
        return replace(grade, value=value, passed=bool(grade.passed), scores=scores)
