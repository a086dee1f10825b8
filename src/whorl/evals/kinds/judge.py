"""The kind `judge`: a model with the role "judge" compares each answer with another one, in both orders.

    template          the request that the evaluated model answers
    options.baseline  the other answer: an expression over the fields of the record

Every pair is shown twice, so a judge that always prefers the first one gives each model half of its verdicts. With v_1 the
verdict where the model's answer is shown first and v_2 where it is shown second (1 win, 1/2 tie, 0 loss):

    win_rate_lc      win_rate without the length bias (`evals/judge.py`); the first metric, so comparisons use it
    win_rate         mean of (v_1 + v_2) / 2
    ties             share of verdicts that are ties
    consistency      share of items with v_1 = v_2
    position_bias    mean of (v_1 - v_2) / 2: the share of first answers that the judge prefers, less 1/2
    length_bias      of `length_probes` items, where the judge compares an answer with a longer copy of it: the share of
                     longer copies that it prefers, less 1/2
    agreement        on the gold set: share of verdicts of both orders together that equal the human one

The gold set is part of the data: records with a fixed answer (the field `options.answer`), which no model generates,
and a human verdict (the field `options.preference`: answer, baseline or tie). They count for the agreement and for the
biases, and not for the win rates. Verdicts are those of a judge without temperature. A reply without a verdict
gets a reminder, `retries` times; then the item is missing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from whorl.errors import ConfigError, DataError, one_of, shorten
from whorl.evals.judge import (
    TEMPLATE,
    LengthControl,
    Verdicts,
    cohen_kappa,
    compare_pairs,
    control_length,
    lengthen,
)
from whorl.evals.kinds.kind import Answered, Kind, Metric, Round, Steps
from whorl.evals.model.requests import Completion, Response
from whorl.evals.results import ItemResult, Outcome, TaskMeasure
from whorl.evals.statistics.intervals import mean_interval
from whorl.evals.tasks.records import Item

JUDGE = "judge"  # role of the back end
PREFERENCES = ("answer", "baseline", "tie")


class JudgeOptions(BaseModel):
    """Settings of the kind `judge`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    baseline: str = Field(description="expression of the other answer")
    answer: str = Field(
        default="answer", description="field with the fixed answer of a record of the gold set"
    )
    preference: str = Field(
        default="preference", description="field with the human verdict: answer, baseline or tie"
    )
    judge_template: str = Field(
        default=TEMPLATE, description="the judge's prompt, with question, first and second"
    )
    judge_tokens: int = Field(default=512, ge=1, description="of a reply of the judge, at most")
    retries: int = Field(default=2, ge=0, description="further requests after a reply without a verdict")
    length_probes: int = Field(
        default=100,
        ge=0,
        description="items on which the length bias is measured; 0: from the answers themselves",
    )


@dataclass(frozen=True)
class Judged:
    """Verdicts on an item. answer: of the model, or the fixed one. probe: longer copy against the original."""

    answer: str
    baseline: str
    pair: Verdicts
    probe: Verdicts | None = None


class Judge(Kind):
    """See the top of this file."""

    Options = JudgeOptions
    roles = (JUDGE,)
    metrics: Mapping[str, Metric] = {
        "win_rate_lc": Metric("wins against the other answer, without the judge's length bias; a tie is half a win"),
        "win_rate": Metric("wins against the other answer, of both orders"),
        "ties": Metric("verdicts that are ties", higher_is_better=None),
        "consistency": Metric("items with the same verdict in both orders"),
        "position_bias": Metric("preference for the first answer: its share less a half", "share", None, -0.5, 0.5),
        "length_bias": Metric("preference for a longer copy: its share less a half", "share", None, -0.5, 0.5),
        "agreement": Metric("verdicts of the gold set that equal the human one"),
    }  # fmt: skip

    def __init__(self, task: Any) -> None:
        super().__init__(task)
        options = self.options
        self._baseline = self.add_template("options.baseline", options.baseline, expression=True)
        self._prompt = task.template("options.judge_template", options.judge_template)
        names = self._prompt.names
        if not {"first", "second"} <= names <= {"question", "first", "second"}:
            raise ConfigError(
                f"task {self.config.name}: options.judge_template names {', '.join(sorted(names)) or 'nothing'}",
                expected="{{ first }} and {{ second }}, and {{ question }}", do="correct the template",
            )  # fmt: skip
        if self.config.generation.samples > 1:
            raise ConfigError(
                f"task {self.config.name}: a judge compares one answer", expected="generation.samples = 1"
            )
        self._probed: frozenset[str] | None = None

    def check(self, item: Item) -> None:
        """Raises DataError: there is no other answer, or an unknown human verdict, or a human verdict on no answer."""
        where = f"task {self.config.name}, item {item.id!r}"
        if not isinstance(self.baseline(item), str):
            raise DataError(
                f"{where}: the baseline is {shorten(repr(self.baseline(item)), 60)}", expected="a text",
                do="correct options.baseline",
            )  # fmt: skip
        preference, name = self.preference(item), self.options.preference
        if preference is not None and preference not in PREFERENCES:
            raise DataError(
                f"{where}: {name} is {preference!r}", expected=one_of(str(preference), PREFERENCES)
            )
        if preference is not None and self.fixed_answer(item) is None:
            raise DataError(
                f"{where}: {name} is given for no answer", expected=f"an answer in the field {self.options.answer}",
            )  # fmt: skip

    def baseline(self, item: Item) -> Any:
        """Return the answer to compare with."""
        return self._baseline(item.variables, item.id)

    def fixed_answer(self, item: Item) -> str | None:
        """Return the answer of a record of the gold set, or None."""
        found = item.fields.get(self.options.answer)
        return None if found is None else str(found)

    def preference(self, item: Item) -> Any:
        """Return the human verdict, or None."""
        return item.fields.get(self.options.preference)

    def steps(self, item: Item) -> Steps:
        """See `Kind`: the answer, then rounds of the judge until each conversation has a verdict."""
        responses: tuple[Response, ...] = ()
        answer = self.fixed_answer(item)
        if answer is None:
            [response] = yield Round([self.generate_request(item, self.prompt(item))])
            responses = (response,)
            if not isinstance(response, Completion):
                return Answered(item, responses)
            answer = response.text
        baseline = str(self.baseline(item))
        pairs = [(answer, baseline)]
        if item.id in self._probe_items():
            shorter = min((baseline, answer), key=len)
            size = max(len(answer), len(baseline))
            if (longer := lengthen(shorter, size)) != shorter:
                pairs.append((longer, shorter))
        question = str(self.template(item.variables, item.id))
        found = yield from compare_pairs(
            self._prompt, question, pairs, max_tokens=self.options.judge_tokens, retries=self.options.retries,
            wrap=lambda requests: Round(requests, JUDGE),
        )  # fmt: skip
        return Answered(item, responses, Judged(answer, baseline, found[0], *found[1:]))

    def _probe_items(self) -> frozenset[str]:
        """Return the ids of the items with a probe, by a hash of the id."""
        if self._probed is None:
            ids = sorted(
                (item.id for item in self.task.items), key=lambda i: sha256(f"probe\0{i}".encode()).digest()
            )
            self._probed = frozenset(ids[: self.options.length_probes])
        return self._probed

    # -- scores --------------------------------------------------------------------------------------------------------

    def score(self, answered: Sequence[Answered]) -> list[ItemResult]:
        """See `Kind`: the length bias is that of all items."""
        control, places = self._length_control(answered)
        found = []
        for number, each in enumerate(answered):
            result = self._item_result(each)
            if number in places and control.values is not None:
                value = float(control.values[places[number]])
                result = replace(result, scores={"win_rate_lc": value, **result.scores})
            found.append(result)
        return found

    def _length_control(self, answered: Sequence[Answered]) -> tuple[LengthControl, dict[int, int]]:
        """Return the length-controlled values, and their places by the number of the item."""
        own = [
            n for n, each in enumerate(answered)
            if isinstance(each.extra, Judged) and each.extra.pair.points and self.fixed_answer(each.item) is None
        ]  # fmt: skip
        wins, longer, probes = [], [], []
        for n in own:
            judged: Judged = answered[n].extra
            points = judged.pair.points or (math.nan, math.nan)
            probe = judged.probe.points if judged.probe else None
            wins.append(sum(points) / 2)
            longer.append(_sign(len(judged.answer), len(judged.baseline)))
            probes.append(sum(probe) / 2 if probe else math.nan)
        return control_length(wins, longer, probes), {n: place for place, n in enumerate(own)}

    def _item_result(self, answered: Answered) -> ItemResult:
        if answered.missing is not None:
            return self.missing(answered, answered.missing.reason)
        judged: Judged = answered.extra
        points = judged.pair.points
        details: dict[str, Any] = {
            "judge": judged.pair.replies,
            "characters": [len(judged.answer), len(judged.baseline)],
        }
        if judged.probe is not None:
            details["length_probe"] = judged.probe.replies

        def result(scores: Mapping[str, float], outcome: Outcome, reason: str) -> ItemResult:
            return self.result(
                answered,
                scores,
                outcome,
                reason,
                answers=(judged.answer,),
                gold=judged.baseline,
                details=details,
            )

        if points is None:
            return result({}, "missing", judged.pair.reason)
        win, shift = sum(points) / 2, (points[0] - points[1]) / 2
        scores = {
            "ties": sum(v == 0.5 for v in points) / 2, "consistency": float(shift == 0), "position_bias": shift,
        }  # fmt: skip
        if judged.probe is not None and (probe := judged.probe.points) is not None:
            scores["length_bias"] = sum(probe) / 2 - 0.5
        verdict = "answer" if win > 0.5 else "baseline" if win < 0.5 else "tie"
        reason = {"answer": "preferred", "baseline": "the other answer is preferred", "tie": "a tie"}[verdict]
        if shift:
            reason += f", the {'first' if shift > 0 else 'second'} answer in {'both orders' if abs(shift) == 0.5 else 'one'}"
        preference = self.preference(answered.item)
        if self.fixed_answer(answered.item) is not None:
            details["verdict"], details["human"] = verdict, preference
            if preference is None:
                return result(scores, "scored", reason)
            scores["agreement"] = float(verdict == preference)
            outcome: Outcome = "right" if verdict == preference else "wrong"
            return result(scores, outcome, f"{reason}; human: {preference}")
        scores = {"win_rate": win, **scores}
        outcome = "right" if win > 0.5 else "wrong" if win < 0.5 else "scored"
        return result(scores, outcome, reason)

    def chance(self, items: Sequence[Item]) -> Mapping[str, float]:
        """See `Kind`: equal answers win half."""
        return {"win_rate_lc": 0.5, "win_rate": 0.5, "position_bias": 0.0, "length_bias": 0.0}

    def more_measures(self, results: Sequence[ItemResult]) -> list[TaskMeasure]:
        """See `Kind`: kappa of the gold set, and the length bias of the items where there are no probes."""
        nan, found = math.nan, []
        human = [(r.details["verdict"], r.details["human"]) for r in results if "agreement" in r.scores]
        if human:
            kappa = cohen_kappa([v for v, _ in human], [h for _, h in human])
            about = "Cohen's kappa: agreement beyond chance; 1 is perfect, 0 is chance"
            found.append(TaskMeasure("kappa", kappa, nan, nan, len(human), about, "", True))
        own = [r for r in results if "win_rate" in r.scores]
        if own and not any("length_bias" in r.scores for r in results):
            longer = [_sign(*r.details["characters"]) for r in own]
            control = control_length([r.scores["win_rate"] for r in own], longer, [])
            about = "wins of the longer answers above those of the shorter ones, halved; quality may be a part of it"
            found.append(
                TaskMeasure("length_bias_items", control.bias, nan, nan, len(own), about, "share", None)
            )
        return found

    def notes(self, results: Sequence[ItemResult]) -> list[str]:
        """See `Kind`: the verdict on the model, and how far the judge can be trusted."""
        found = []
        own = [r for r in results if "win_rate" in r.scores]
        values = [r.scores["win_rate_lc"] for r in own if "win_rate_lc" in r.scores]
        if own and not values:
            found.append(
                "One side has the longer answer in every item, so length and quality cannot be told apart: set "
                "options.length_probes"
            )
        elif len(values) > 1:
            interval = mean_interval(values, [r.cluster for r in own])
            word = "better" if interval.low > 0.5 else "worse" if interval.high < 0.5 else ""
            found.append(
                f"The model is {word} than the baseline for this judge, at equal length and in both orders"
                if word else "The model and the baseline are not distinguishable for this judge, at equal length"
            )  # fmt: skip
        for name, what in (("position_bias", "first answer"), ("length_bias", "longer copy of an answer")):
            biases = [r.scores[name] for r in results if name in r.scores]
            if biases:
                share = 50 + 100 * sum(biases) / len(biases)
                found.append(
                    f"The judge prefers the {what} in {share:.1f} % of {len(biases):,} items (50 % is no bias)"
                )
        if own and not any("agreement" in r.scores for r in results):
            found.append("The task has no gold set, so the agreement of this judge with people is unknown")
        return found


def _sign(a: int, b: int) -> int:
    return (a > b) - (a < b)
