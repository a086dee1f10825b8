"""The kind `generate`: answers as text, graded by a grader of `whorl.evals.grading`; and its variants.

    generate       any metric: exact, numeric, choice, refusal, repetition, "custom:MODULE:FUNCTION"
    program        tests of a program, in the sandbox
    constraints    the instructions of IFEval

With `options.verifier`, a template, each item names its graders with their weights, as a task of training with verifiable
rewards: "{{ verifier }}", or "doctest" for all items. Such an item may have `messages` in place of a prompt.

With n samples of an item, each score is the mean over its samples, and there are further figures:

    pass@k          1 - C(n - c, k) / C(n, k), for c right samples     Chen et al. 2021, arXiv:2107.03374, eq. 1
    first_answer    the first sample alone: what one answer of the model is worth
    majority        the most frequent extracted answer is right        Wang et al. 2022, arXiv:2203.11171

`not_found`, `truncated` and `refused` are shares of answers without a verdict on the matter. A metric of a user has an
attribute `scores`, a mapping of names to `Metric`, or one score with the metric's name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from string import ascii_uppercase
from typing import Any, ClassVar

import numpy as np
from pydantic import BaseModel, Field

from whorl.errors import ConfigError, DataError, WhorlError
from whorl.evals.grading import (
    CUSTOM,
    UNANSWERED,
    Grade,
    VerifiableTask,
    get_grader,
    grade_all,
    grade_tasks,
    needs_sandbox,
    parse_graders,
    takes,
)
from whorl.evals.grading.parse_rate import END_OF_DOCUMENT, trim_to_function
from whorl.evals.grading.programs import ProgramGrader
from whorl.evals.kinds.gold import gold_index, one_gold
from whorl.evals.kinds.kind import Answered, EvalTask, Kind, Metric, Steps
from whorl.evals.kinds.scaling import (
    REWARD,
    SampleOptions,
    Scaled,
    best_point,
    curve_metrics,
    curve_scores,
    scaled_steps,
)
from whorl.evals.kinds.scores import SCORES
from whorl.evals.model.requests import Completion, GenerateRequest, Message
from whorl.evals.results import ItemResult
from whorl.evals.statistics.pass_at_k import majority_at_k, pass_at_k
from whorl.evals.statistics.seeds import variance_components
from whorl.evals.tasks.config import parse_task
from whorl.evals.tasks.task import make_task
from whorl.sandbox import ResourceLimits, Sandbox


class GenerateOptions(SampleOptions):
    """Settings of the kind `generate`."""

    metric: str = Field(
        default="exact", description='a name of whorl.evals.grading.GRADERS, or "custom:MODULE:FUNCTION"'
    )
    metric_options: dict[str, Any] = Field(default={}, description="arguments of the metric, such as form")
    metric_fields: tuple[str, ...] = Field(
        default=(), description="fields of a record that are arguments, too"
    )
    verifier: str = Field(
        default="", description="template of an item's weighted graders, in place of the metric"
    )
    trim: bool = Field(default=False, description="end an answer with the function that the prompt begins")


class Generate(Kind):
    """See the top of this file."""

    Options: ClassVar[type[BaseModel]] = GenerateOptions

    def __init__(self, task: Any) -> None:
        super().__init__(task)
        verifier = self.options.verifier
        self._verifier = self.add_template("options.verifier", verifier, required=False)
        self.metric_name: str = "verified" if verifier else self.options.metric
        self._metric = None if verifier else self._load_metric()
        n = self.config.generation.samples
        if n > 1 and not self.config.generation.temperature:
            raise ConfigError(
                f"task {self.config.name}: {n} samples at temperature 0 are equal",
                expected="generation.temperature above 0", do="set it, or generation.samples = 1",
            )  # fmt: skip
        self._ks = self.options.k or ((1, n) if n > 1 else ())
        for k in self._ks:
            if not 1 <= k <= n:
                raise ConfigError(
                    f"task {self.config.name}: pass@{k} of {n} samples", expected=f"k from 1 to {n}"
                )
        own = dict(SCORES.get(self.metric_name) or getattr(self._metric, "scores", {}))
        own = own or {self.metric_name.rpartition(":")[2]: Metric("a metric of the user")}
        self.primary = next(iter(own))
        samples: dict[str, Metric] = {}
        if n > 1:
            samples = {f"pass@{k}": Metric(f"at least one of {k} answers is right") for k in self._ks}
            samples["first_answer"] = Metric("the first answer is right")
            samples["majority"] = Metric(f"the most frequent of {n} answers is right")
        ks = self._ks or (1,)
        samples |= curve_metrics(self.options, ks)
        self.roles = (REWARD,) if self.options.reward else ()
        shares = {name: Metric("of the answers", higher_is_better=False) for name in UNANSWERED}
        self.metrics = {**own, **samples, **{name: m for name, m in shares.items() if name not in own}}
        self.default_metrics = (*own, *samples)

    def _load_metric(self) -> Any:
        """Return the metric. Raises ConfigError: it does not exist, or has no such option."""
        try:
            return get_grader(self.metric_name, self.options.metric_options, named_by="options.metric")
        except ConfigError as error:
            raise ConfigError(
                f"task {self.config.name}: {error.what}", expected=error.expected, do=error.do
            ) from error

    def sandbox(self) -> Sandbox | None:
        """Return a new sandbox, or None if the metric runs no programs."""
        return Sandbox() if isinstance(self._metric, ProgramGrader) else None

    def prepare(self, item: Any) -> Any:
        """See `Kind`: one gold answer; that of an item with choices is a letter."""
        where = f"task {self.config.name}, item {item.id!r}"
        if item.choices:
            return replace(item, gold=ascii_uppercase[gold_index(item.gold, item.choices, where)])
        return (
            item
            if self.metric_name in ("constraints", "repetition", "compiles", "doctest", "verified")
            else replace(item, gold=self._one(item.gold, where))
        )

    def _one(self, gold: Any, where: str) -> Any:
        if isinstance(gold, list | tuple) and any(isinstance(each, list | tuple | Mapping) for each in gold):
            return gold  # a nested value, such as grids
        return one_gold(gold, where)

    def check(self, item: Any) -> None:
        """Raises DataError: the metric cannot compare with the gold answer, or the item has no verifier or prompt."""
        if self.metric_name.startswith(CUSTOM):
            return  # it runs in its own process
        function: Any = self._metric.build if isinstance(self._metric, ProgramGrader) else self._metric
        try:
            if function is None:
                parse_graders(self._verifiable(item).verifier)
            else:
                function(self._gold(item), "", **self._item_options(item))
        except WhorlError as error:
            raise DataError(
                f"task {self.config.name}, item {item.id!r}: {error.what}",
                expected=error.expected,
                do=error.do,
            ) from error

    def _gold(self, item: Any) -> Any:
        return str(item.gold) if self.metric_name in ("exact", "numeric", "choice") else item.gold

    def _item_options(self, item: Any) -> dict[str, Any]:
        """Return the arguments of the metric for one item: also its prompt and choices, where the metric takes them."""
        found = dict(self.options.metric_options)
        for name in self.options.metric_fields:
            found[name] = item.fields.get(name, "")
        if item.choices and takes(self._metric, "options"):
            found.setdefault("options", list(item.choices))
        if takes(self._metric, "prompt"):
            found.setdefault("prompt", self.template(item.variables, item.id))
        return found

    def prompt(self, item: Any) -> str | tuple[Message, ...]:
        """See `Kind`; with a verifier the messages of a record that has some."""
        messages = () if self._verifier is None else tuple(item.fields.get("messages") or ())
        return messages or super().prompt(item)

    def _verifiable(self, item: Any) -> VerifiableTask:
        """Return an item as a task of training. Raises DataError: it has no prompt."""
        assert self._verifier is not None
        prompt: str = self.template(item.variables, item.id)
        verifier: str = self._verifier(item.variables, item.id)
        messages: Sequence[Message] = ()
        if self.config.chat or not prompt:
            messages = item.fields.get("messages") or ({"role": "user", "content": prompt},)
            prompt = ""
        answer = "" if item.gold is None else str(item.gold)
        return VerifiableTask(item.id, prompt, tuple(messages), verifier, answer)

    def requests(self, item: Any) -> Sequence[GenerateRequest]:
        """See `Kind`: one for each sample."""
        prompt = self.prompt(item)
        return [self.generate_request(item, prompt, k) for k in range(self.config.generation.samples)]

    def steps(self, item: Any) -> Steps:
        """See `Kind`."""
        if not self.options.curves:
            return super().steps(item)
        return scaled_steps(item, self.requests(item), self.options, self.tokenizer)

    def score(self, answered: Sequence[Answered]) -> list[ItemResult]:
        """See `Kind`: all answers are graded together."""
        complete = [each for each in answered if each.missing is None]
        pairs = [(each, r) for each in complete for r in each.responses if isinstance(r, Completion)]
        pairs += [(each, Completion(f.text)) for each in complete for f in (each.extra or Scaled()).forced]
        graded = iter(self.grade([each.item for each, _ in pairs], [r for _, r in pairs]))
        own = [[next(graded) for _ in each.responses] for each in complete]
        forced = [[next(graded) for _ in (each.extra or Scaled()).forced] for each in complete]
        rows = iter(zip(own, forced, strict=True))
        return [
            self.missing(each, each.missing.reason) if each.missing else self._item_result(each, *next(rows))
            for each in answered
        ]

    def grade(self, items: Sequence[Any], completions: Sequence[Completion]) -> list[Grade]:
        """Return the scores of each completion of the item at the same index."""
        if self.options.trim:
            prompts = [self.template(item.variables, item.id) for item in items]
            completions = [_trimmed(*pair) for pair in zip(prompts, completions, strict=True)]
        if self._verifier is not None:
            tasks = [self._verifiable(item) for item in items]
            with Sandbox() if needs_sandbox(tasks) else nullcontext() as sandbox:
                grades = grade_tasks(tasks, completions, sandbox)
            return [_verified(*pair) for pair in zip(grades, completions, strict=True)]
        options = [self._item_options(item) for item in items]
        with self.sandbox() or nullcontext() as sandbox:
            golds = [self._gold(item) for item in items]
            grades = grade_all(self.metric_name, golds, completions, options, sandbox)
        return [g if g.scores or g.failed else replace(g, scores={self.primary: g.value}) for g in grades]

    def _item_result(
        self, answered: Answered, graded: Sequence[Grade], forced: Sequence[Grade]
    ) -> ItemResult:
        texts = [r.text for r in answered.responses if isinstance(r, Completion)]
        first = graded[0]
        scores = _mean_scores(graded)
        judged = [each for each in graded if each.outcome != "error"]
        for name in UNANSWERED:
            if judged and name in self.metrics and name not in scores:
                scores[name] = sum(each.outcome == name for each in judged) / len(judged)
        if len(graded) > 1 and len(judged) == len(graded):
            right = np.array([[each.outcome == "right" for each in graded]])
            scores |= {f"pass@{k}": float(pass_at_k(right, k)[0]) for k in self._ks}
            scores["first_answer"] = float(right[0, 0])
            votes = [[each.answer for each in graded]]
            rng = np.random.default_rng(0)
            scores["majority"] = float(majority_at_k(right, votes, [len(graded)], rng)[len(graded)][0])
        if self.options.curves:
            given = [r for r in answered.responses if isinstance(r, Completion)]
            right = np.array([each.outcome == "right" for each in graded])
            fits = [each.outcome == "right" for each in forced]
            votes = [[each.answer for each in graded]]
            scores |= curve_scores(self._ks or (1,), given, right, votes[0], answered.extra, fits)
        order = [name for name in self.metrics if name in scores]
        details: dict[str, Any] = {"extracted": [each.answer for each in graded]}
        answer = answered.responses[0]
        if isinstance(answer, Completion) and (tokens := self.tokens(answer)):
            details["tokens"] = tokens  # of the first answer
        if n_cut := max(r.n_cut for r in answered.responses if isinstance(r, Completion)):
            details["n_cut"] = n_cut
        if len(graded) > 1:
            details["outcomes"] = dict(Counter(each.outcome for each in graded))
            details["samples"] = [each.scores.get(self.primary, np.nan) for each in graded]
        weights = {name: w for name, w in first.weights.items() if name in scores}
        return self.result(
            answered, {name: scores[name] for name in order}, first.outcome, first.reason, answers=texts,
            gold=shown_gold(answered.item.gold), details=details, weights=weights,
        )  # fmt: skip

    def notes(self, results: Sequence[ItemResult]) -> list[str]:
        """See `Kind`: with several samples, the parts of the uncertainty from items and from samples."""
        scaled = [r.scores for r in results if "tokens" in r.scores] if self.options.curves else []
        if scaled:
            means = {name: sum(each[name] for each in scaled) / len(scaled) for name in scaled[0]}
            return [best_point(means), *self._spread(results)]
        return self._spread(results)

    def _spread(self, results: Sequence[ItemResult]) -> list[str]:
        rows = [r.details["samples"] for r in results if np.isfinite(r.details.get("samples", np.nan)).all()]
        if len(rows) < 2 or self.metrics[self.primary].unit != "share":
            return []
        found = variance_components(rows)
        return [
            f"{self.primary}: the standard error is {found.se:.2%} for new items and samples, {found.se_rerun:.2%} for a "
            f"rerun of these items, and {found.se_one_sample:.2%} with one sample of each item"
        ]


class ProgramOptions(GenerateOptions):
    """Settings of the kind `program`."""

    metric: str = "program"
    seconds: float = Field(default=5.0, gt=0, description="time of one program with its tests")
    memory_bytes: int = Field(default=512 << 20, ge=1 << 20)
    workers: int = Field(default=2, ge=1, description="programs that run at once")


class ProgramTests(Generate):
    """The kind `program`: the gold answer is the source of the tests, or a record of HumanEval."""

    Options = ProgramOptions

    def sandbox(self) -> Sandbox | None:
        """See `Generate`."""
        options = self.options
        limits = ResourceLimits(options.seconds, options.seconds, options.memory_bytes)
        return Sandbox(limits, workers=options.workers)


class ConstraintOptions(GenerateOptions):
    """Settings of the kind `constraints`."""

    metric: str = "constraints"


class Constraints(Generate):
    """The kind `constraints`: the gold answer is the list of constraints, or a record of IFEval."""

    Options = ConstraintOptions


def verifiable_task(name: str, tasks: Sequence[VerifiableTask], generation: Mapping[str, Any]) -> EvalTask:
    """Return the task of the kind `generate` with the prompts and verifiers of `tasks`.

    Raises:
        DataError: a task has tools, which a conversation of one message cannot offer.
    """
    for task in tasks:
        if task.tools or task.chat_template_kwargs:
            raise DataError(f"task {task.id!r} has tools", expected="a prompt or messages alone")
    names = ("id", "prompt", "messages", "verifier", "answer")
    records = [{name: getattr(task, name) for name in names} for task in tasks]
    config = {
        "name": name, "kind": "generate", "template": "{{ prompt }}", "gold": "answer", "generation": generation,
        "options": {"verifier": "{{ verifier }}"},
    }  # fmt: skip
    return make_task(parse_task(config, name), records)


def shown_gold(gold: Any) -> str:
    """Return a gold answer as text for a reader."""
    if isinstance(gold, Mapping) and "test" in gold:
        return str(gold["test"])
    return "" if gold is None else str(gold)


def _mean_scores(graded: Sequence[Grade]) -> dict[str, float]:
    """Return metric -> mean over the samples that have it."""
    names = dict.fromkeys(name for each in graded for name in each.scores)
    found = {}
    for name in names:
        values = [each.scores[name] for each in graded if name in each.scores]
        found[name] = sum(values) / len(values)
    return found


def _trimmed(prompt: str, completion: Completion) -> Completion:
    """Return a completion that ends where its indentation closes the function of the prompt: a model writes on after it."""
    end = b"" if completion.finish == "length" else END_OF_DOCUMENT
    body = trim_to_function(prompt.encode(), completion.text.encode("utf-8", "replace") + end)
    return completion if body is None else replace(completion, text=body.decode())


def _verified(grade: Grade, completion: Completion) -> Grade:
    """Return the grade of a verifier with its scores, and the answer that counts as a vote; "" without one."""
    if grade.failed:
        return grade
    answer = "" if grade.outcome in UNANSWERED else grade.answer or completion.text.strip()
    cut = not grade.passed and completion.finish == "length"
    scores = {"passed": float(grade.passed), "reward": grade.value}
    return replace(
        grade, scores=scores, answer=answer, weights={}, outcome="truncated" if cut else grade.outcome
    )
