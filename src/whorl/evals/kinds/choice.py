"""The kind `choice`: one right answer among several, by likelihood. All figures come from one pass over the requests.

Forms. Cloze: each choice is a continuation of the prompt. Letters: the prompt lists the choices, and each letter is a
continuation. With l_c = log p(choice c | prompt) and u_c = log p(choice c | `unconditional`), the chosen one is the
largest of:

    acc               l_c                                    ties: the first one
    acc_norm          l_c / characters of c                  as lm-evaluation-harness
    acc_bytes         l_c / bytes of c
    acc_token         l_c / tokens of c                      Brown et al. 2020, arXiv:2005.14165, section 2.4
    acc_mutual_info   l_c - u_c                              Holtzman et al. 2021, arXiv:2104.08315
    acc_prior         u_c                                    the choices alone, without the question
    letter_acc        l of the letter
    letter_acc_mutual_info, letter_acc_prior                 the same with u = log p(letter | last line of the prompt)

`acc_prior` above chance shows that the choices alone identify the answers. Probabilities are the softmax of the
first form's l_c. They give `brier`, `log_score`, and the calibration errors `ece` and `ace` (`statistics/calibration.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from whorl.errors import ConfigError, DataError, shorten
from whorl.evals.kinds.gold import gold_index, shuffled_order
from whorl.evals.kinds.kind import Answered, Kind, Metric
from whorl.evals.model.requests import Message, Request, Score, ScoreRequest
from whorl.evals.results import ItemResult, TaskMeasure
from whorl.evals.statistics.calibration import calibration, probabilities
from whorl.evals.tasks.records import LETTERS

Form = Literal["cloze", "letters"]
_CLOZE = {
    "acc": "share of right choices by likelihood",
    "acc_norm": "normalized by characters",
    "acc_bytes": "normalized by bytes",
    "acc_token": "normalized by tokens",
}
_PRIOR = {
    "acc_mutual_info": "relative to the likelihood without the question",
    "acc_prior": "without the question",
}


class ChoiceOptions(BaseModel):
    """Settings of the kind `choice`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    forms: tuple[Form, ...] = Field(default=("cloze",), description="the first one gives the probabilities")
    letters_template: str = Field(default="", description="prompt of the form letters; default: `template`")
    delimiter: str = Field(default=" ", description="between the prompt and a choice")
    prior: bool = Field(default=True, description="score the choices without the question, too")
    unconditional: str = Field(
        default="", description="template of the context without the question, for cloze"
    )
    shuffle: bool = Field(default=False, description="order the choices by a hash of the item's id")

    @field_validator("forms")
    @classmethod
    def _forms(cls, forms: tuple[Form, ...]) -> tuple[Form, ...]:
        if not forms or len(set(forms)) < len(forms):
            raise ValueError("expected cloze, letters, or both once")
        return forms


class Choice(Kind):
    """See the top of this file."""

    Options = ChoiceOptions

    def __init__(self, task: Any) -> None:
        super().__init__(task)
        options, forms = self.options, self.options.forms
        if len(forms) > 1 and not options.letters_template:
            raise ConfigError(
                f"task {self.config.name}: two forms have one template", expected="options.letters_template, which lists "
                "the choices, apart from `template`, which does not", do="set it, or choose one of the forms",
            )  # fmt: skip
        letters = options.letters_template or self.config.template
        self._letters = self.add_template("options.letters_template", letters)
        self._unconditional = self.add_template(
            "options.unconditional", options.unconditional, required=False
        )
        names: dict[str, str] = {}
        for form in forms:
            if form == "cloze":
                names |= _CLOZE | (_PRIOR if options.prior else {})
            else:
                names["letter_acc"] = "share of right letters by likelihood"
                names |= {f"letter_{name}": about for name, about in _PRIOR.items() if options.prior}
        self.metrics = {name: Metric(about) for name, about in names.items()}
        self.metrics |= {
            "brier": Metric("squared error of the probabilities", "", False, 0.0, 2.0),
            "log_score": Metric("nats of the right choice", "nats", False, 0.0, None),
        }
        self.default_metrics = tuple(
            name
            for name in ("acc", "acc_norm", "letter_acc", "acc_prior", "letter_acc_prior")
            if name in names
        )
        if forms[0] == "letters":
            self.default_metrics = tuple(
                sorted(self.default_metrics, key=lambda name: not name.startswith("letter"))
            )

    def prepare(self, item: Any) -> Any:
        """See `Kind`: the gold becomes an index, and the choices are shuffled if `shuffle` is set."""
        where = f"task {self.config.name}, item {item.id!r}"
        choices = item.choices
        if len(choices) < 2:
            raise DataError(
                f"{where} has {len(choices)} choices", expected="at least 2", do="correct `choices`"
            )
        if len(choices) > len(LETTERS):
            raise DataError(f"{where} has {len(choices)} choices", expected=f"at most {len(LETTERS)}")
        if any(not choice.strip() for choice in choices):
            raise DataError(
                f"{where}: choice {LETTERS[[bool(c.strip()) for c in choices].index(False)]} is empty, so it has no tokens",
                expected="choices with text", do="correct the record",
            )  # fmt: skip
        stripped = [choice.strip() for choice in choices]
        if len(set(stripped)) < len(stripped):
            twice = next(choice for choice in stripped if stripped.count(choice) > 1)
            raise DataError(
                f"{where}: two choices are {shorten(twice)!r}, so neither can be right alone",
                expected="different choices", do="correct the record, or remove it with data.where",
            )  # fmt: skip
        index = gold_index(item.gold, choices, where)
        if not self.options.shuffle:
            return replace(item, gold=index)
        order = shuffled_order(self.config.name, item.id, len(choices))
        return replace(item, gold=order.index(index), choices=tuple(choices[i] for i in order))

    def example_answer(self, item: Any) -> str:
        """See `Kind`: the right choice."""
        if self._example_answer is not None:
            return super().example_answer(item)
        return f"{self.options.delimiter}{item.choices[item.gold]}"

    def prompt(self, item: Any) -> str | tuple[Message, ...]:
        """See `Kind`: the prompt of the first form."""
        return self._prompt(item, self.options.forms[0])

    def _prompt(self, item: Any, form: Form) -> str | tuple[Message, ...]:
        make = self.task.messages if self.config.chat else self.task.prompt
        if form == "cloze":
            return make(self.template, item, self.example_answer)
        answer = self.example_answer if self._example_answer is not None else self._letter_answer
        return make(self._letters, item, answer)

    def _letter_answer(self, item: Any) -> str:
        return f"{self.options.delimiter}{LETTERS[item.gold]}"

    def _continuations(self, item: Any, form: Form) -> list[str]:
        texts = item.choices if form == "cloze" else LETTERS[: len(item.choices)]
        return [text if self.config.chat else self.options.delimiter + text for text in texts]

    def _no_question(self, item: Any, form: Form) -> str:
        """Return the context without the question."""
        if form == "cloze":
            return "" if self._unconditional is None else str(self._unconditional(item.variables, item.id))
        own: str = self._letters(item.variables, item.id)
        prompt, last = self._prompt(item, form), own.rstrip().rpartition("\n")[2]
        return prompt[: len(prompt) - len(own)] + last if isinstance(prompt, str) else last

    def requests(self, item: Any) -> Sequence[Request]:
        """See `Kind`: for each form the choices after the prompt, then without the question."""
        found = []
        for form in self.options.forms:
            contexts = [self._prompt(item, form)] + [self._no_question(item, form)] * self.options.prior
            found += [ScoreRequest(c, text) for c in contexts for text in self._continuations(item, form)]
        return found

    def score_item(self, answered: Answered) -> ItemResult:
        """See `Kind`."""
        item, n = answered.item, len(answered.item.choices)
        responses, step = answered.responses, 1 + self.options.prior
        rows = [
            [r for r in responses[i : i + n] if isinstance(r, Score)] for i in range(0, len(responses), n)
        ]
        lacks = answered.missing.reason if answered.missing is not None else ""
        if any(len(row) < n for row in rows[::step]):
            return self.missing(answered, lacks)
        picks: dict[str, int] = {}
        for number, form in enumerate(self.options.forms):
            own = rows[number * step : (number + 1) * step]
            alone = own[1] if self.options.prior and len(own[1]) == n else None
            picks |= _picks(form, item.choices, own[0], alone)
        first_metric = self.chosen_metrics()[0]
        if first_metric.endswith(tuple(_PRIOR)) and first_metric not in picks:
            return self.missing(answered, lacks)
        scores = {name: float(pick == item.gold) for name, pick in picks.items()}
        chosen = {name: index for name, index in picks.items() if name in self.metrics}
        first = next((name for name in self.chosen_metrics() if name in chosen), next(iter(chosen)))
        p = probabilities([s.total for s in rows[0]])
        scores["brier"] = sum((q - (c == item.gold)) ** 2 for c, q in enumerate(p))
        scores["log_score"] = -math.log(max(p[item.gold], 1e-12))
        pick = chosen[first]
        details = {
            "probabilities": p, "confidence": max(p),
            "choices": [
                {"text": text, "log_prob": score.total, "tokens": len(score.ids), "chosen": c == pick}
                for c, (text, score) in enumerate(zip(item.choices, rows[0], strict=True))
            ],
            "gold": item.gold, "n_cut": max(s.n_cut for s in rows[0]),
        }  # fmt: skip
        if lacks:
            details["no_prior"] = lacks
        if tokens := self.tokens(rows[0][pick]):
            details["tokens"] = tokens  # of the chosen one
        return self.result(
            answered, scores, "right" if pick == item.gold else "wrong", f"by {first}", answers=(item.choices[pick],),
            gold=item.choices[item.gold], details=details,
        )  # fmt: skip

    def chance(self, items: Sequence[Any]) -> Mapping[str, float]:
        """See `Kind`."""
        if not items:
            return {}
        sizes = [len(item.choices) for item in items]
        right = sum(1 / n for n in sizes) / len(sizes)
        found = {name: right for name in self.metrics if "acc" in name}
        uniform = {"brier": [1 - 1 / n for n in sizes], "log_score": [math.log(n) for n in sizes]}
        return found | {name: sum(values) / len(values) for name, values in uniform.items()}

    def notes(self, results: Sequence[ItemResult]) -> list[str]:
        """See `Kind`: items whose choices alone were not scored."""
        reasons = [r.details["no_prior"] for r in results if "no_prior" in r.details]
        if not reasons:
            return []
        return [
            f"{len(reasons):,} of {len(results):,} items have no score without the question, and are left out of "
            f"acc_prior and acc_mutual_info: {reasons[0]}"
        ]

    def more_measures(self, results: Sequence[ItemResult]) -> list[TaskMeasure]:
        """See `Kind`: calibration errors."""
        has = [r for r in results if "probabilities" in r.details]
        if not has:
            return []
        found = calibration([r.details["probabilities"] for r in has], [r.details["gold"] for r in has])
        nan, about = (
            math.nan,
            f"expected calibration error; {found.expected_ece:.3f} for a calibrated model at this n",
        )
        return [
            TaskMeasure("ece", found.ece, nan, nan, found.n, about, "", False),
            TaskMeasure("ace", found.ace, nan, nan, found.n, "the same with bins of equal counts", "", False),
        ]


def _picks(
    form: Form, choices: Sequence[str], after: Sequence[Score], alone: Sequence[Score] | None
) -> dict[str, int]:
    """Return accuracy -> index of the chosen one, for the scores after the prompt and without the question."""
    totals = [score.total for score in after]
    prefix = "" if form == "cloze" else "letter_"
    found = {f"{prefix}acc": _largest(totals)}
    if form == "cloze":
        sizes = {
            "acc_norm": [len(choice) for choice in choices],
            "acc_bytes": [len(choice.encode("utf-8", "replace")) for choice in choices],
            "acc_token": [len(score.ids) for score in after],
        }
        for name, size in sizes.items():
            found[name] = _largest([total / n for total, n in zip(totals, size, strict=True)])
    if alone is not None:
        prior = [score.total for score in alone]
        found[f"{prefix}acc_mutual_info"] = _largest([a - b for a, b in zip(totals, prior, strict=True)])
        found[f"{prefix}acc_prior"] = _largest(prior)
    return found


def _largest(values: Sequence[float]) -> int:
    """Return the index of the first largest value."""
    return max(range(len(values)), key=lambda i: (values[i], -i))
