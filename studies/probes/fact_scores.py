"""Scores of answers to questions with facts, and of answers about unknown people (`evals/suites/biographies.py`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from whorl.evals.suites.biographies import ATTRIBUTES, REFUSAL, Question


@dataclass(frozen=True)
class FactScores:
    """Results of questions with facts and of questions about unknown people.

    Attributes:
        correct, wrong, refused: fractions of n_facts; refused is the over-refusal rate.
        hallucinated: fraction of n_strangers that was answered; the rest was refused.
    """

    n_facts: int
    correct: float
    wrong: float
    refused: float
    n_strangers: int
    hallucinated: float


def score_answers(questions: Sequence[Question], answers: Iterable[str]) -> FactScores:
    """Return the scores of answers, ignoring case, outer white space and a final full stop.

    A fraction of 0 items is NaN.
    """
    counts = Counter[tuple[str, str]]()
    for question, answer in zip(questions, answers, strict=True):
        kind = "stranger" if question.answer == REFUSAL else "fact"
        if _normalize(answer) == _normalize(REFUSAL):
            counts[kind, "refused"] += 1
        else:
            counts[kind, "right" if _normalize(answer) == _normalize(question.answer) else "wrong"] += 1
    n = sum(counts["fact", k] for k in ("right", "wrong", "refused"))
    m = counts["stranger", "refused"] + counts["stranger", "wrong"]

    def share(k: int, of: int) -> float:
        return k / of if of else float("nan")

    return FactScores(
        n,
        share(counts["fact", "right"], n),
        share(counts["fact", "wrong"], n),
        share(counts["fact", "refused"], n),
        m,
        share(counts["stranger", "wrong"], m),
    )


def chance_accuracy() -> dict[str, float]:
    """Return attribute -> accuracy of a random answer."""
    return {attribute: 1 / len(values) for attribute, values in ATTRIBUTES.items()}


def _normalize(text: str) -> str:
    return text.strip().removesuffix(".").casefold()
