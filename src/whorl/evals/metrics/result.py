"""The result of a metric for one answer, and shares of outcomes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from whorl.evals.results import Outcome

UNANSWERED: tuple[Outcome, ...] = ("not_found", "truncated", "refused")


@dataclass(frozen=True)
class Graded:
    """Scores of one answer.

    Attributes:
        scores: metric -> value, larger is better unless the metric's documentation states otherwise.
        outcome: as in `ItemResult`, but never "missing".
        reason: in a few words.
        answer: the answer as extracted; "" if none was found.
        weights: metric -> weight of this answer in the mean over items, where it is not 1.
    """

    scores: Mapping[str, float] = field(default_factory=dict)
    outcome: Outcome = "wrong"
    reason: str = ""
    answer: str = ""
    weights: Mapping[str, float] = field(default_factory=dict)


def outcome_shares(outcomes: Iterable[Outcome]) -> dict[str, float]:
    """Return the share of each outcome among all items: right, wrong, not_found, truncated, refused, error, missing."""
    counts = Counter(outcomes)
    n = max(sum(counts.values()), 1)
    kinds: tuple[Outcome, ...] = ("right", "wrong", *UNANSWERED, "error", "missing")
    return {kind: counts[kind] / n for kind in kinds}
