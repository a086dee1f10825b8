"""Test-time scaling: how much better a model answers if it may spend more on an answer, all from one set of samples.

In depth, a budget of b ids of thinking (Muennighoff et al. 2025, arXiv:2501.19393, "budget forcing"):

    stopped      the first b ids of what the model thought, then the answer's marker, then an answer is sampled; a sample
                 that came to its answer within b ids is left as it is
    continued    where thinking ends before b, its end is taken off, a word that goes on ("Wait") is put there, and it
                 thinks further, at most `continuations` times; then as above

In breadth, n samples: the vote, any of them by the verifier, the best by a score (`of_n.py`).

One set of N samples a task serves all. The n curves are means over its subsets. Every budget cuts the same samples, so two
budgets differ by the cut and not by luck; and since the path of the largest budget passes through all smaller ones, each
sample is continued once, and only the short answers after the marker are sampled anew.

`tokens` is what a point costs: ids sampled for one answer to one task. That is what the two ways have in common.

The subtle part is the border. What a model thought ends where the marker begins, and a token may span the two, so the border
is looked for in bytes, and thinking ends before the first id that reaches over it. A cut falls in the middle of a line: the
marker is put at the start of the next, as the model has learnt it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from whorl.align.model.example import Scribe, Text, joined
from whorl.align.model.sampling import Answer, answer
from whorl.align.test_time.pass_at_k import any_of, best_of, estimate, majority_of
from whorl.engine.engine import Engine
from whorl.engine.sampling_params import Sampling
from whorl.errors import ConfigError, DataError
from whorl.evals.verify.task import Task, Verdict
from whorl.evals.verify.text_verifiers import last_number, said
from whorl.tracking.seeds import derive, numpy_rng

Judge = Callable[[Sequence[Task], Sequence[str]], Sequence[Verdict]]
Scorer = Callable[[Sequence[Text]], Sequence[float]]  # higher is better: a reward model
CURVES = {
    "stopped": "thinking cut at the budget",
    "continued": "thinking made to last the budget",
    "majority": "majority of n",
    "any": "any of n right, by the verifier",
    "likeliest": "best of n by its own log-probability",
}


class ScalingConfig(BaseModel):
    """What is measured."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    samples: int = Field(default=16, ge=1, description="a task; n goes up to it by powers of two")
    max_tokens: int = Field(default=128, ge=1, description="of a sample")
    temperature: float = Field(default=1.0, gt=0, description="of all sampling")
    budgets: tuple[int, ...] = Field(default=(), description="ids of thinking; none: breadth alone")
    marker: str = Field(default="#### ", min_length=1, description="what stands before an answer")
    again: str = Field(default="Wait, ", min_length=1, description="what is put in place of an end")
    continuations: int = Field(default=8, ge=0, description="of one sample at most")
    answer_tokens: int = Field(default=16, ge=1, description="after a marker that was put there")
    seed: int = 0

    @model_validator(mode="after")
    def _possible(self) -> ScalingConfig:
        if any(not 0 <= b <= self.max_tokens for b in self.budgets):
            raise ValueError(
                f"budgets are {list(self.budgets)}: 0 to max_tokens = {self.max_tokens}, all that is thought"
            )
        return self

    @property
    def longest(self) -> int:
        """Ids that may follow a prompt, a marker left out."""
        return self.max_tokens + self.answer_tokens


@dataclass(frozen=True)
class Point:
    """at: the budget, or n; accuracy with its 95 % interval over tasks; tokens: sampled for one answer, on the mean."""

    at: int
    accuracy: float
    low: float
    high: float
    tokens: float


@dataclass(frozen=True)
class Scaling:
    """curves: by name (`CURVES`, or a scorer's). failed: verifications that raised or hung, which count as wrong, of
    samples and of cut ones; why: what the first of them said. cut_off: share of samples."""

    tasks: int
    samples: int
    curves: Mapping[str, tuple[Point, ...]]
    failed: int
    why: str
    cut_off: float

    def best(self) -> tuple[str, Point]:
        """The most accurate point that asks no verifier, the cheapest among equals."""
        found = [(name, p) for name, points in self.curves.items() if name != "any" for p in points]
        return max(found, key=lambda pair: (pair[1].accuracy, -pair[1].tokens))


@dataclass
class _Path:
    """thought: ids before the answer; rest: what followed (marker, answer, end), empty where the limit cut it off."""

    thought: list[int] = field(default_factory=list)
    rest: list[int] = field(default_factory=list)


def measure_scaling(
    engine: Engine,
    scribe: Scribe,
    tasks: Sequence[Task],
    config: ScalingConfig,
    judge: Judge,
    *,
    scorers: Mapping[str, Scorer] | None = None,
    advance: Callable[[int], None] = lambda _: None,
) -> Scaling:
    """Accuracy against what is spent.

    Args:
        judge: as `verify_all`.
        scorers: name -> scores of (prompt, answer) texts, for best of n by each.
        advance: told how many further samples have come to an end.

    Raises:
        DataError: there are no tasks.
        ConfigError: the engine has no room for a task; it is named.
    """
    if not tasks:
        raise DataError("there are no tasks to measure on", expected="one at least")
    n = config.samples
    prompts = [scribe.prompt(task.prompt or task.messages) for task in tasks]
    again, marker = _ids(scribe, config.again), _ids(scribe, "\n" + config.marker)
    room = engine.longest - config.longest - len(marker)
    for task, ids in zip(tasks, prompts, strict=True):
        if len(ids) > room:
            raise ConfigError(
                f"task {task.id!r} has a prompt of {len(ids):,} ids, and there is room for {room:,}",
                expected=f"a context of {engine.longest - room + len(ids):,}",
                do="leave it out, or take smaller budgets and max_tokens",
            )
    sampling = Sampling(temperature=config.temperature, top_p=1.0)
    each = [(task, prompt) for task, prompt in zip(tasks, prompts, strict=True) for _ in range(n)]
    drawn = answer(
        engine, [p for _, p in each], sampling, max_tokens=config.max_tokens, ends=scribe.ends,
        seed=derive(config.seed, "samples"), advance=advance,
    )  # fmt: skip
    texts = [scribe.words(one.ids) for one in drawn]
    failures = list[str]()

    def judged(some: Sequence[Task], said: Sequence[str]) -> Sequence[Verdict]:
        verdicts = judge(some, said)
        failures.extend(v.reason for v in verdicts if v.failed)
        return verdicts

    verdicts = judged([task for task, _ in each], texts)
    right = np.array([v.passed for v in verdicts], np.bool_)
    curves = _breadth(config, tasks, [p for _, p in each], drawn, texts, right, scorers or {})
    if config.budgets:
        walker = _Walker(engine, scribe, config, sampling, judged, advance)
        curves = walker.depth(each, drawn, again) | curves
    cut_off = float(np.mean([not one.finished for one in drawn]))
    return Scaling(len(tasks), n, curves, len(failures), "".join(failures[:1]), cut_off)


def vote(task: Task, text: str) -> str:
    """What a sample answers, so that equal answers are equal texts; empty if it answers nothing."""
    answer_ = said(text)
    if "numeric" not in task.verifier:
        return answer_
    number = last_number(answer_)
    return "" if number is None else str(number)


def _breadth(
    config: ScalingConfig,
    tasks: Sequence[Task],
    prompts: Sequence[Sequence[int]],
    drawn: Sequence[Answer],
    texts: Sequence[str],
    right: NDArray[np.bool_],
    scorers: Mapping[str, Scorer],
) -> dict[str, tuple[Point, ...]]:
    n, shape = config.samples, (len(tasks), config.samples)
    ns = [*(1 << i for i in range(n.bit_length()) if 1 << i < n), n]
    tokens = float(np.mean([len(one.ids) for one in drawn]))
    good = right.reshape(shape)
    votes = [[vote(task, t) for t in texts[i * n : (i + 1) * n]] for i, task in enumerate(tasks)]
    scores = {"likeliest": [float(np.sum(one.log_probs)) for one in drawn]}
    pairs = [joined(p, one.ids) for p, one in zip(prompts, drawn, strict=True)] if scorers else []
    scores |= {name: [float(x) for x in scorer(pairs)] for name, scorer in scorers.items()}
    counted = majority_of(good, votes, ns, numpy_rng(config.seed, "votes"))

    def points(values: Callable[[int], NDArray[np.float64]]) -> tuple[Point, ...]:
        return tuple(_point(k, values(k), n // k, k * tokens) for k in ns)

    found = {"majority": points(lambda k: counted[k]), "any": points(lambda k: any_of(good, k))}
    for name, row in scores.items():
        table = np.array(row, np.float64).reshape(shape)
        found[name] = points(lambda k, table=table: best_of(good, table, k))  # type: ignore[misc]
    return found


def _point(at: int, values: NDArray[np.float64], draws: int, tokens: float) -> Point:
    e = estimate(values, draws)
    return Point(at, e.mean, e.low, e.high, tokens)


class _Walker:
    """Samples as paths, cut at budgets and continued."""

    def __init__(
        self,
        engine: Engine,
        scribe: Scribe,
        config: ScalingConfig,
        sampling: Sampling,
        judge: Judge,
        advance: Callable[[int], None],
    ) -> None:
        self.engine, self.scribe, self.config = engine, scribe, config
        self.sampling, self.judge, self.advance = sampling, judge, advance
        self.bytes = scribe.tokenizer.token_bytes

    def depth(
        self,
        each: Sequence[tuple[Task, Sequence[int]]],
        drawn: Sequence[Answer],
        again: Sequence[int],
    ) -> dict[str, tuple[Point, ...]]:
        """The curves over budgets."""
        paths = [self.split(one.ids) for one in drawn]
        longer = self.continued([prompt for _, prompt in each], paths, again)
        return {
            "stopped": self.curve(each, paths, "stopped"),
            "continued": self.curve(each, longer, "continued"),
        }

    def split(self, ids: Sequence[int]) -> _Path:
        """A sample where its answer begins: before the marker, or before its end."""
        text = b"".join(b"" if i in self.scribe.ends else self.bytes[i] for i in ids)
        border = text.find(self.config.marker.strip().encode())
        at = 0
        for k, i in enumerate(ids):
            at += 0 if i in self.scribe.ends else len(self.bytes[i])
            if i in self.scribe.ends or 0 <= border < at:
                return _Path(list(ids[:k]), list(ids[k:]))
        return _Path(list(ids))

    def continued(
        self, prompts: Sequence[Sequence[int]], paths: Sequence[_Path], again: Sequence[int]
    ) -> list[_Path]:
        """The paths with their ends replaced until they are as long as the largest budget."""
        most = max(self.config.budgets)
        found = [_Path(list(p.thought), list(p.rest)) for p in paths]
        for attempt in range(self.config.continuations):
            short = [k for k, p in enumerate(found) if p.rest and len(p.thought) + len(again) < most]
            if not short:
                break
            for k in short:
                found[k].thought += again
            limit = max(most - len(found[k].thought) for k in short) + self.config.answer_tokens
            more = self.sample([[*prompts[k], *found[k].thought] for k in short], limit, f"again {attempt}")
            for k, one in zip(short, more, strict=True):
                step = self.split(one.ids)
                found[k] = _Path(found[k].thought + step.thought, step.rest)
        return found

    def curve(
        self, each: Sequence[tuple[Task, Sequence[int]]], paths: Sequence[_Path], name: str
    ) -> tuple[Point, ...]:
        """Accuracy at each budget along the paths."""
        budgets = sorted(set(self.config.budgets))
        forced: list[list[int]] = []  # prompts that end in a marker
        where: list[tuple[int, int]] = []  # (budget's number, path's number)
        texts = [[""] * len(paths) for _ in budgets]
        cost = np.zeros((len(budgets), len(paths)))
        for b, budget in enumerate(budgets):
            for k, ((_, prompt), path) in enumerate(zip(each, paths, strict=True)):
                thought = path.thought[:budget]
                if path.rest and len(path.thought) <= budget:
                    texts[b][k] = self.scribe.words([*thought, *path.rest])
                    cost[b, k] = len(thought) + len(path.rest)
                    continue
                forced.append([*prompt, *thought, *self.marker(thought)])
                where.append((b, k))
        found = self.sample(forced, self.config.answer_tokens, name)
        for (b, k), ids, one in zip(where, forced, found, strict=True):
            start = len(each[k][1])
            texts[b][k] = self.scribe.words([*ids[start:], *one.ids])
            cost[b, k] = min(budgets[b], len(paths[k].thought)) + len(one.ids)
        points = []
        n = self.config.samples
        for b, budget in enumerate(budgets):
            verdicts = self.judge([task for task, _ in each], texts[b])
            values = np.array([v.passed for v in verdicts], np.float64).reshape(-1, n).mean(1)
            points.append(_point(budget, values, n, float(cost[b].mean())))
        return tuple(points)

    def marker(self, thought: Sequence[int]) -> list[int]:
        """The marker, at the start of a line."""
        begun = bool(thought) and not self.bytes[thought[-1]].endswith(b"\n")
        return _ids(self.scribe, ("\n" if begun else "") + self.config.marker)

    def sample(self, prompts: Sequence[Sequence[int]], limit: int, name: str) -> list[Answer]:
        """Answers of at most `limit` ids."""
        return answer(
            self.engine, prompts, self.sampling, max_tokens=limit, ends=self.scribe.ends,
            seed=derive(self.config.seed, name), advance=self.advance,
        )  # fmt: skip


def _ids(scribe: Scribe, text: str) -> list[int]:
    return [int(i) for i in scribe.tokenizer.encode(text)]
