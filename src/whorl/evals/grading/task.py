"""Verifiable tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from whorl.errors import DataError


@dataclass(frozen=True)
class VerifiableTask:
    """A task and how its answer is graded.

    Attributes:
        id: identifies the task in messages and counts.
        prompt: a text to continue; or
        messages: a conversation to answer. Exactly one of the two is set.
        verifier: name of a grader, or a weighted sum (`evals/grading/registry.py`).
        answer: the reference of the grader: the answer, source of tests, or a pattern.
        tools, chat_template_kwargs: what the chat template renders in addition to the messages, as in an API request.
        difficulty: set by the task's generator, in arbitrary units; larger is harder.

    Raises:
        DataError: both or neither of prompt and messages are set.
    """

    id: str
    prompt: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()
    verifier: str = "exact"
    answer: str = ""
    difficulty: float = 0.0
    tools: tuple[Mapping[str, Any], ...] = ()
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if bool(self.prompt) == bool(self.messages):
            raise DataError(
                f"task {self.id!r} has {'both' if self.prompt else 'neither'} of prompt and messages",
                expected="exactly one of the two",
            )
