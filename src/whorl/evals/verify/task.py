"""A task whose answer can be checked, and what a check says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from whorl.errors import DataError


@dataclass(frozen=True)
class VerifiableTask:
    """Something to be answered, and how the answer is judged.

    Attributes:
        id: names it in messages and counts.
        prompt: a text to be continued; or
        messages: a conversation to be answered. Exactly one of both is given.
        verifier: the name of a check in the register (`evals/verify`).
        answer: what the check compares with: the answer, the source of tests, a pattern.
        difficulty: as its maker sees it, in units of its own; larger is harder.

    Raises:
        DataError: both or neither of prompt and messages.
    """

    id: str
    prompt: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()
    verifier: str = "exact"
    answer: str = ""
    difficulty: float = 0.0

    def __post_init__(self) -> None:
        if bool(self.prompt) == bool(self.messages):
            raise DataError(
                f"task {self.id!r} has {'both' if self.prompt else 'neither'} of prompt and messages",
                expected="exactly one of them",
            )


@dataclass(frozen=True)
class Verdict:
    """reward: what the answer is worth, 1 for a right one as a rule; passed: whether it is right; reason: in a few words;
    failed: the verifier itself raised or hung, so that the 0 says nothing of the answer (a program of the model's own that
    raises is a wrong answer, and no failure)."""

    reward: float
    passed: bool
    reason: str = ""
    failed: bool = False
