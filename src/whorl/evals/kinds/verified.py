"""The kind `verify`: each item names its graders with their weights, as a task of training with verifiable rewards.

    kind = "verify"
    template = "{{ prompt }}"
    gold = "answer"
    options.verifier = "{{ verifier }}"        or a name for all items, such as "numeric" or "doctest"

With `trim`, an answer that continues a function ends where its indentation closes the function (`code/parse_rate.py`): a
model of text writes on after it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from pydantic import Field

from whorl.errors import DataError, WhorlError
from whorl.evals.code.parse_rate import END_OF_DOCUMENT, trim_to_function
from whorl.evals.grading import Grade, VerifiableTask, grade_tasks, needs_sandbox, parse_graders
from whorl.evals.grading.grade import UNANSWERED
from whorl.evals.kinds.generate import Generate
from whorl.evals.kinds.scaling import SampleOptions
from whorl.evals.model.requests import Completion, Message
from whorl.evals.tasks import EvalTask, make_task
from whorl.evals.tasks.config import parse_task
from whorl.sandbox import Sandbox


class VerifyOptions(SampleOptions):
    """Settings of the kind `verify`."""

    verifier: str = Field(default="{{ verifier }}", description="template of the verifier's name")
    trim: bool = Field(default=False, description="end an answer with the function that the prompt begins")


class Verified(Generate):
    """See the top of this file."""

    Options, fixed_metric = VerifyOptions, "verified"

    def __init__(self, task: Any) -> None:
        super().__init__(task)
        self._verifier = task.template("options.verifier", self.options.verifier)

    def load_metric(self) -> Any:
        """See `Generate`: none, since `grade` calls the verifiers of the items."""

    def check_fields(self, fields: Collection[str]) -> None:
        """See `Kind`."""
        super().check_fields(fields)
        self._verifier.check_fields(fields, required=False)

    def prepare(self, item: Any) -> Any:
        """See `Kind`: a verifier may need no gold answer."""
        return item

    def check(self, item: Any) -> None:
        """Raises DataError: no such verifier, or no prompt."""
        try:
            parse_graders(self._task_of(item).verifier)
        except WhorlError as error:
            raise DataError(
                f"task {self.config.name}, item {item.id!r}: {error.what}", expected=error.expected, do=error.do
            ) from error  # fmt: skip

    def prompt(self, item: Any) -> str | tuple[Message, ...]:
        """See `Kind`: the messages of a record that has some."""
        messages: Sequence[Message] = item.fields.get("messages") or ()
        return tuple(messages) or super().prompt(item)

    def _task_of(self, item: Any) -> VerifiableTask:
        prompt: str = self.template(item.variables, item.id)
        answer = "" if item.gold is None else str(item.gold)
        verifier: str = self._verifier(item.variables, item.id)
        if self.config.chat or not prompt:
            messages = item.fields.get("messages") or ({"role": "user", "content": prompt},)
            return VerifiableTask(item.id, messages=messages, verifier=verifier, answer=answer)
        return VerifiableTask(item.id, prompt, verifier=verifier, answer=answer)

    def grade(self, items: Sequence[Any], completions: Sequence[Completion]) -> list[Grade]:
        """See `Generate`."""
        tasks = [self._task_of(item) for item in items]
        texts = [self._trimmed(t, c) for t, c in zip(tasks, completions, strict=True)]
        with Sandbox() if needs_sandbox(tasks) else nullcontext() as sandbox:
            grades = grade_tasks(tasks, texts, sandbox)
        votes = texts
        if self.config.generation.samples > 1:
            votes = [vote_key(grade, text) for grade, text in zip(grades, texts, strict=True)]
        return [_scored(g, t, c) for g, t, c in zip(grades, votes, completions, strict=True)]

    def _trimmed(self, task: VerifiableTask, completion: Completion) -> str:
        if not self.options.trim:
            return completion.text
        end = b"" if completion.finish == "length" else END_OF_DOCUMENT
        body = trim_to_function(task.prompt.encode(), completion.text.encode("utf-8", "replace") + end)
        return completion.text if body is None else body.decode()


def _scored(grade: Grade, text: str, completion: Completion) -> Grade:
    if grade.failed:
        return grade
    cut = not grade.passed and completion.finish == "length"
    scores = {"passed": float(grade.passed), "reward": grade.value}
    return replace(
        grade, scores=scores, answer=text, weights={}, outcome="truncated" if cut else grade.outcome
    )


def vote_key(grade: Grade, text: str) -> str:
    """Return the answer of a sample in a form where equal answers are equal strings; empty without an answer."""
    return "" if grade.outcome in UNANSWERED else grade.answer or text.strip()


def verifiable_task(name: str, tasks: Sequence[VerifiableTask], generation: Mapping[str, Any]) -> EvalTask:
    """Return the task of the kind `verify` with the prompts and verifiers of `tasks`.

    Raises:
        DataError: a task has tools, which a conversation of one message cannot offer.
    """
    records = []
    for task in tasks:
        if task.tools or task.chat_template_kwargs:
            raise DataError(f"task {task.id!r} has tools", expected="a prompt or messages alone")
        messages = [dict(message) for message in task.messages]
        records.append(
            {"id": task.id, "prompt": task.prompt, "messages": messages, "verifier": task.verifier, "answer": task.answer}
        )  # fmt: skip
    config = {
        "name": name,
        "kind": "verify",
        "template": "{{ prompt }}",
        "gold": "answer",
        "generation": generation,
    }
    return make_task(parse_task(config, name), records)
