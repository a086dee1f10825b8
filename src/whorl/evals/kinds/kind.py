"""The interface of a kind of task, and the task that has it.

A kind makes requests of an item (`steps`), and scores the responses of all items together (`score`). Scoring is a
function of the responses alone, so another metric needs no new response.

    class Length(Kind):
        '''Length of the answer.'''

        metrics = {"characters": Metric("length of the answer", unit="characters", low=None, high=None)}

        def requests(self, item):
            return [GenerateRequest(self.prompt(item))]

        def score_item(self, answered):
            answer = answered.responses[0]
            if isinstance(answer, Missing):
                return self.missing(answered, answer.reason)
            return self.result(answered, {"characters": len(answer.text)}, "right", answers=(answer.text,))

A kind of several rounds, such as a judge, writes `steps` as a generator: it yields each `Round`, receives its responses in
the order of the requests, and returns an `Answered`. All items of a task advance together, one round at a time, so that the
back end gets large batches. A kind of episodes writes `answer` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from whorl.errors import ConfigError, one_of, settings_error
from whorl.evals.kinds import KINDS
from whorl.evals.model.requests import Completion, GenerateRequest, Message, Missing, Request, Response, Score
from whorl.evals.results import ItemResult, Outcome, TaskMeasure
from whorl.evals.tasks.config import CORRECT_TASK, TaskConfig
from whorl.evals.tasks.records import Item
from whorl.evals.tasks.template import Template
from whorl.tracking.seeds import derive

MODEL = "model"  # role of the model under evaluation
SEEDS = 1 << 31  # an endpoint may take no larger one


@dataclass(frozen=True)
class Round:
    """Requests of one round. role: of the back end that answers, such as "model" or "judge"."""

    requests: Sequence[Request]
    role: str = MODEL


@dataclass(frozen=True)
class Answered:
    """An item with the responses to its requests, in order. extra: anything that the kind's `steps` adds."""

    item: Item
    responses: tuple[Response, ...]
    extra: Any = None

    @property
    def missing(self) -> Missing | None:
        """The first response that did not arrive."""
        return next((r for r in self.responses if isinstance(r, Missing)), None)


Steps = Generator[Round, Sequence[Response], Answered]
Respond = Callable[[Sequence[Request], str, str], Sequence[Response]]  # (requests, role, label)
Transform = Literal["", "exp"]
TokenTexts = Callable[[Sequence[int]], list[str]]


@dataclass(frozen=True)
class Metric:
    """A figure of each item, and how it is shown.

    Attributes:
        about: in a few words.
        unit: "share" is shown in percent.
        higher_is_better: None if neither is.
        low, high: least and greatest value of an item: they bound the figure where responses are missing. None: unbounded.
        transform: of the mean over items, with its interval: "exp" for a perplexity.
    """

    about: str
    unit: str = "share"
    higher_is_better: bool | None = True
    low: float | None = 0.0
    high: float | None = 1.0
    transform: Transform = ""


class NoOptions(BaseModel):
    """A kind without settings."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass
class EvalTask:
    """A configuration with its items. Made by `load_task` and `make_task` (`tasks/task.py`).

    Attributes:
        examples: few-shot examples, in order.
        hash: see `tasks/task.py`.
        drawn: id of an item -> its own examples, where they are drawn for each item.
    """

    config: TaskConfig
    items: list[Item]
    examples: list[Item]
    hash: str = ""
    drawn: Mapping[str, Sequence[Item]] = field(default_factory=dict)
    _texts: dict[tuple[str, str], str] = field(default_factory=dict, repr=False)  # of examples

    @cached_property
    def kind(self) -> Kind:
        """The kind, which makes requests of items and scores responses."""
        try:
            found = KINDS.get(self.config.kind, named_by="kind")
        except ConfigError as error:
            raise ConfigError(
                f"task {self.config.name}: {error.what}", expected=error.expected, do=error.do
            ) from error
        made: Kind = found(self)
        return made

    def template(self, setting: str, source: str, *, expression: bool = False) -> Template:
        """Return a template of this task, for messages named after its setting."""
        return Template(source, f"task {self.config.name}: {setting}", expression=expression)

    def examples_of(self, item: Item) -> Sequence[Item]:
        """Return the few-shot examples of an item, in order."""
        return self.drawn.get(item.id, self.examples)

    def prompt(self, template: Template, item: Item, answer: Callable[[Item], str]) -> str:
        """Return `system`, the few-shot examples with their answers, and the item, as one text.

        answer: text that follows the prompt of an example.
        """
        config, parts = self.config, list[str]()
        if config.system:
            parts.append(
                config.system + (config.separator if config.system_end is None else config.system_end)
            )
        for e in self.examples_of(item):
            if (key := (template.source, e.id)) not in self._texts:
                self._texts[key] = template(e.variables, e.id) + answer(e)
            parts += [self._texts[key], config.separator]
        return "".join([*parts, template(item.variables, item.id)])

    def messages(self, template: Template, item: Item, answer: Callable[[Item], str]) -> tuple[Message, ...]:
        """Return the same as a conversation: each example is a message of the user and one of the assistant.

        The white space between a prompt and its answer is left out (as in lm-evaluation-harness 0.4.13).
        """
        found = [{"role": "system", "content": self.config.system}] if self.config.system else []
        for example in self.examples_of(item):
            found.append({"role": "user", "content": template(example.variables, example.id)})
            text = answer(example)
            found.append({"role": "assistant", "content": text[1:] if text[:1].isspace() else text})
        return (*found, {"role": "user", "content": template(item.variables, item.id)})


class Kind:
    """See the top of this file. A subclass has `metrics`, and `requests` or `steps`, and `score_item` or `score`.

    Class attributes:
        version: raised when the same responses give other scores; part of the task's hash.
        Options: model of the table [options].
        metrics: name -> metric. Those that depend on the options are set in `__init__`.
        default_metrics: shown if the task names none; empty for all.
        roles: of the further models that it needs, such as "judge".
    """

    version: ClassVar[int] = 1
    Options: ClassVar[type[BaseModel]] = NoOptions
    metrics: Mapping[str, Metric] = {}
    default_metrics: Sequence[str] = ()
    roles: Sequence[str] = ()

    def __init__(self, task: EvalTask) -> None:
        self.task, self.config = task, task.config
        self.token_texts: TokenTexts | None = None  # of the model's ids, for a reader
        self.tokenizer: Any = None  # of a local model
        self.sampler: Callable[[int], Any] | None = (
            None  # limit of a reply -> sampler of episodes, of an engine
        )
        try:
            self.options: Any = self.Options.model_validate(self.config.options)
        except ValidationError as error:
            where = f"task {self.config.name}: options of the kind {self.config.kind}"
            raise settings_error(error.errors()[0], where, self.Options, CORRECT_TASK) from error
        self._templates: list[tuple[Template, bool]] = []
        self.template = self.add_template("template", self.config.template)
        self._example_answer = self.add_template("example_answer", self.config.example_answer)

    def add_template(
        self, setting: str, source: str, *, expression: bool = False, required: bool = True
    ) -> Any:
        """Return the template of a setting, or None without a source. required: it must name a field of the records."""
        if not source:
            return None
        made = self.task.template(setting, source, expression=expression)
        self._templates.append((made, required))
        return made

    def chosen_metrics(self) -> list[str]:
        """Return the names of the shown metrics; the first one decides the outcome.

        Raises:
            ConfigError: the task names an unknown metric.
        """
        chosen = list(self.config.metrics or self.default_metrics or self.metrics)
        for name in chosen:
            if name not in self.metrics:
                raise ConfigError(
                    f"task {self.config.name}: the kind {self.config.kind} has no metric {name!r}",
                    expected=one_of(name, list(self.metrics)), do="correct `metrics`",
                )  # fmt: skip
        return chosen

    def check_fields(self, fields: Collection[str]) -> None:
        """Check templates and options against the fields of the records. Raises ConfigError."""
        for template, required in self._templates:
            template.check_fields(fields, required=required)
        self.chosen_metrics()

    def prepare(self, item: Item) -> Item:
        """Return an item with its gold in the form that the kind uses. Raises DataError: no gold, or two."""
        return item

    def check(self, item: Item) -> None:
        """Raises DataError: an item cannot be scored. The message names task and item."""

    def example_answer(self, item: Item) -> str:
        """Return the text that follows the prompt of a few-shot example."""
        if self._example_answer is not None:
            text: str = self._example_answer(item.variables, item.id)
            return text
        return f" {item.gold}"

    def prompt(self, item: Item) -> str | tuple[Message, ...]:
        """Return the prompt with its few-shot examples: a text, or messages if the task is a conversation."""
        make = self.task.messages if self.config.chat else self.task.prompt
        return make(self.template, item, self.example_answer)

    def generate_request(
        self, item: Item, prompt: str | tuple[Message, ...], sample: int = 0, **changes: Any
    ) -> GenerateRequest:
        """Return the request of one sample of an item.

        Each sample of each item has its own seed: equal ones would correlate the samples of different items, which
        intervals do not expect. Greedy requests need none, so equal ones stay equal.
        """
        each = self.config.generation
        request = GenerateRequest(
            prompt, each.max_tokens, each.stop, each.temperature, each.top_p, heal=each.heal, top_k=each.top_k
        )
        request = replace(request, **changes)
        seed = derive(each.seed, item.id, sample) % SEEDS if request.temperature else each.seed
        return replace(request, seed=seed)

    def requests(self, item: Item) -> Sequence[Request]:
        """Return the requests of an item, for a kind of one round."""
        raise NotImplementedError(f"{type(self).__name__} has neither requests nor steps")

    def steps(self, item: Item) -> Steps:
        """Yield the rounds of requests, and return everything that scoring needs."""
        responses = yield Round(self.requests(item))
        return Answered(item, tuple(responses))

    def answer(self, items: Sequence[Item], respond: Respond) -> list[Answered]:
        """Return the responses to the requests of all items, in order; all items advance one round at a time."""
        active: dict[int, Steps] = {n: self.steps(item) for n, item in enumerate(items)}
        inbox: dict[int, Sequence[Response] | None] = dict.fromkeys(active)
        done: dict[int, Answered] = {}
        number = 0
        while active:
            number += 1
            rounds = {}
            for n, steps in list(active.items()):
                try:
                    rounds[n] = next(steps) if (received := inbox[n]) is None else steps.send(received)
                except StopIteration as end:
                    done[n] = end.value
                    del active[n]
            for role in dict.fromkeys(each.role for each in rounds.values()):
                members = [n for n, each in rounds.items() if each.role == role]
                sent = [request for n in members for request in rounds[n].requests]
                responses = iter(respond(sent, role, self.round_label(number)))
                for n in members:
                    inbox[n] = [next(responses) for _ in rounds[n].requests]
        return [done[n] for n in range(len(items))]

    def round_label(self, number: int) -> str:
        """Return the label of a round of requests, from 1, in the progress."""
        return self.config.name if number == 1 else f"{self.config.name}, round {number}"

    def score_item(self, answered: Answered) -> ItemResult:
        """Return the result of one item, from its responses."""
        raise NotImplementedError(f"{type(self).__name__} has neither score_item nor score")

    def score(self, answered: Sequence[Answered]) -> list[ItemResult]:
        """Return the results of all items, in order. Programs of all items run together here."""
        return [self.score_item(each) for each in answered]

    def chance(self, items: Sequence[Item]) -> Mapping[str, float]:
        """Return metric -> value of a model that answers at random, where that is defined."""
        return {}

    def more_measures(self, results: Sequence[ItemResult]) -> list[TaskMeasure]:
        """Return figures of the task that are no means over its items, such as a calibration error."""
        return []

    def notes(self, results: Sequence[ItemResult]) -> list[str]:
        """Return sentences for the reader of the figures."""
        return []

    def result(
        self, answered: Answered, scores: Mapping[str, float], outcome: Outcome, reason: str = "",
        *, answers: Sequence[str] = (), gold: str = "", details: Mapping[str, Any] | None = None,
        weights: Mapping[str, float] | None = None,
    ) -> ItemResult:  # fmt: skip
        """Return the result of an item, with the fields that every kind fills equally."""
        item = answered.item
        return ItemResult(
            item.id, scores, outcome, reason, item.cluster, item.group, shown_prompt(self.prompt(item)), tuple(answers),
            gold, details or {}, weights or {},
        )  # fmt: skip

    def tokens(self, response: Score | Completion) -> list[tuple[str, float]]:
        """Return (text, log-probability) of each token of a response, for a reader; empty where the ids have no texts."""
        if self.token_texts is None or not response.ids or len(response.log_probs) != len(response.ids):
            return []
        texts = self.token_texts(response.ids)
        return [(text, round(p, 4)) for text, p in zip(texts, response.log_probs, strict=bool(texts))]

    def missing(self, answered: Answered, reason: str) -> ItemResult:
        """Return the result of an item without a response."""
        return self.result(answered, {}, "missing", reason)


def shown_prompt(prompt: str | tuple[Message, ...]) -> str:
    """Return a prompt as text for a reader."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"[{message['role']}]\n{message['content']}" for message in prompt)
