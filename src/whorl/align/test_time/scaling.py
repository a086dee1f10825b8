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

from whorl.align.model.example import ExampleTokenizer, TokenizedExample, concat
from whorl.align.model.sampling import Completion, sample_completions
from whorl.align.test_time.pass_at_k import best_of_n, estimate, majority_at_k, pass_at_k
from whorl.engine.engine import Engine
from whorl.engine.sampling_params import SamplingParams
from whorl.errors import ConfigError, DataError
from whorl.evals.verify.task import Verdict, VerifiableTask
from whorl.evals.verify.text_verifiers import extract_answer, last_number
from whorl.tracking.seeds import derive, numpy_rng

TaskVerifier = Callable[[Sequence[VerifiableTask], Sequence[str]], Sequence[Verdict]]
Scorer = Callable[[Sequence[TokenizedExample]], Sequence[float]]  # higher is better: a reward model
CURVES = {
    "stopped": "thinking cut at the budget",
    "continued": "thinking made to last the budget",
    "majority_at_k": "majority of n",
    "pass_at_k": "any of n right, by the verifier",
    "max_log_prob": "best of n by its own log-probability",
}


class ScalingConfig(BaseModel):
    """What is measured."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    n_samples: int = Field(default=16, ge=1, description="a task; n goes up to it by powers of two")
    max_completion_tokens: int = Field(default=128, ge=1, description="of a sample")
    temperature: float = Field(default=1.0, gt=0, description="of all sampling")
    thinking_budgets: tuple[int, ...] = Field(default=(), description="ids of thinking; none: breadth alone")
    answer_marker: str = Field(default="#### ", min_length=1, description="what stands before an answer")
    continuation_text: str = Field(
        default="Wait, ", min_length=1, description="what is put in place of an end"
    )
    max_continuations: int = Field(default=8, ge=0, description="of one sample at most")
    max_answer_tokens: int = Field(default=16, ge=1, description="after a marker that was put there")
    seed: int = 0

    @model_validator(mode="after")
    def _possible(self) -> ScalingConfig:
        if any(not 0 <= b <= self.max_completion_tokens for b in self.thinking_budgets):
            raise ValueError(
                f"budgets are {list(self.thinking_budgets)}: 0 to max_tokens = {self.max_completion_tokens}, all that is thought"
            )
        return self

    @property
    def max_new_tokens(self) -> int:
        """Ids that may follow a prompt, a marker left out."""
        return self.max_completion_tokens + self.max_answer_tokens


@dataclass(frozen=True)
class ScalingPoint:
    """at: the budget, or n; accuracy with its 95 % interval over tasks; tokens: sampled for one answer, on the mean."""

    compute: int
    accuracy: float
    low: float
    high: float
    tokens: float


@dataclass(frozen=True)
class ScalingResult:
    """curves: by name (`CURVES`, or a scorer's). failed: verifications that raised or hung, which count as wrong, of
    samples and of cut ones; why: what the first of them said. cut_off: share of samples."""

    n_tasks: int
    samples: int
    curves: Mapping[str, tuple[ScalingPoint, ...]]
    n_failed: int
    first_failure: str
    truncated_fraction: float

    def best(self) -> tuple[str, ScalingPoint]:
        """The most accurate point that asks no verifier, the cheapest among equals."""
        found = [(name, p) for name, points in self.curves.items() if name != "pass_at_k" for p in points]
        return max(found, key=lambda pair: (pair[1].accuracy, -pair[1].tokens))


@dataclass
class _ThinkingTrace:
    """thought: ids before the answer; rest: what followed (marker, answer, end), empty where the limit cut it off."""

    thinking: list[int] = field(default_factory=list)
    answer_ids: list[int] = field(default_factory=list)


def measure_scaling(
    engine: Engine,
    example_tokenizer: ExampleTokenizer,
    tasks: Sequence[VerifiableTask],
    config: ScalingConfig,
    verify: TaskVerifier,
    *,
    scorers: Mapping[str, Scorer] | None = None,
    on_finished: Callable[[int], None] = lambda _: None,
) -> ScalingResult:
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
    n = config.n_samples
    prompts = [example_tokenizer.prompt(task.prompt or task.messages) for task in tasks]
    again, marker = (
        _encode(example_tokenizer, config.continuation_text),
        _encode(example_tokenizer, "\n" + config.answer_marker),
    )
    room = engine.max_positions - config.max_new_tokens - len(marker)
    for task, ids in zip(tasks, prompts, strict=True):
        if len(ids) > room:
            raise ConfigError(
                f"task {task.id!r} has a prompt of {len(ids):,} ids, and there is room for {room:,}",
                expected=f"a context of {engine.max_positions - room + len(ids):,}",
                do="leave it out, or take smaller budgets and max_tokens",
            )
    sampling = SamplingParams(temperature=config.temperature, top_p=1.0)
    each = [(task, prompt) for task, prompt in zip(tasks, prompts, strict=True) for _ in range(n)]
    drawn = sample_completions(
        engine, [p for _, p in each], sampling, max_tokens=config.max_completion_tokens, stop_ids=example_tokenizer.stop_ids,
        seed=derive(config.seed, "samples"), on_finished=on_finished,
    )  # fmt: skip
    texts = [example_tokenizer.decode(one.ids) for one in drawn]
    failures = list[str]()

    def judged(some: Sequence[VerifiableTask], said: Sequence[str]) -> Sequence[Verdict]:
        verdicts = verify(some, said)
        failures.extend(v.reason for v in verdicts if v.failed)
        return verdicts

    verdicts = judged([task for task, _ in each], texts)
    right = np.array([v.passed for v in verdicts], np.bool_)
    curves = _parallel_curves(config, tasks, [p for _, p in each], drawn, texts, right, scorers or {})
    if config.thinking_budgets:
        walker = _BudgetForcing(engine, example_tokenizer, config, sampling, judged, on_finished)
        curves = walker.budget_curves(each, drawn, again) | curves
    cut_off = float(np.mean([not one.finished for one in drawn]))
    return ScalingResult(len(tasks), n, curves, len(failures), "".join(failures[:1]), cut_off)


def vote_key(task: VerifiableTask, text: str) -> str:
    """What a sample answers, so that equal answers are equal texts; empty if it answers nothing."""
    answer_ = extract_answer(text)
    if "numeric" not in task.verifier:
        return answer_
    number = last_number(answer_)
    return "" if number is None else str(number)


def _parallel_curves(
    config: ScalingConfig,
    tasks: Sequence[VerifiableTask],
    prompts: Sequence[Sequence[int]],
    drawn: Sequence[Completion],
    texts: Sequence[str],
    right: NDArray[np.bool_],
    scorers: Mapping[str, Scorer],
) -> dict[str, tuple[ScalingPoint, ...]]:
    n, shape = config.n_samples, (len(tasks), config.n_samples)
    ns = [*(1 << i for i in range(n.bit_length()) if 1 << i < n), n]
    tokens = float(np.mean([len(one.ids) for one in drawn]))
    good = right.reshape(shape)
    votes = [[vote_key(task, t) for t in texts[i * n : (i + 1) * n]] for i, task in enumerate(tasks)]
    scores = {"max_log_prob": [float(np.sum(one.log_probs)) for one in drawn]}
    pairs = [concat(p, one.ids) for p, one in zip(prompts, drawn, strict=True)] if scorers else []
    scores |= {name: [float(x) for x in scorer(pairs)] for name, scorer in scorers.items()}
    counted = majority_at_k(good, votes, ns, numpy_rng(config.seed, "votes"))

    def points(values: Callable[[int], NDArray[np.float64]]) -> tuple[ScalingPoint, ...]:
        return tuple(_point(k, values(k), n // k, k * tokens) for k in ns)

    found = {"majority_at_k": points(lambda k: counted[k]), "pass_at_k": points(lambda k: pass_at_k(good, k))}
    for name, row in scores.items():
        table = np.array(row, np.float64).reshape(shape)
        found[name] = points(lambda k, table=table: best_of_n(good, table, k))  # type: ignore[misc]
    return found


def _point(at: int, values: NDArray[np.float64], draws: int, tokens: float) -> ScalingPoint:
    e = estimate(values, draws)
    return ScalingPoint(at, e.mean, e.low, e.high, tokens)


class _BudgetForcing:
    """Samples as paths, cut at budgets and continued."""

    def __init__(
        self,
        engine: Engine,
        scribe: ExampleTokenizer,
        config: ScalingConfig,
        sampling: SamplingParams,
        judge: TaskVerifier,
        advance: Callable[[int], None],
    ) -> None:
        self.engine, self.example_tokenizer, self.config = engine, scribe, config
        self.sampling, self.verify, self.on_finished = sampling, judge, advance
        self.token_bytes = scribe.tokenizer.token_bytes

    def budget_curves(
        self,
        each: Sequence[tuple[VerifiableTask, Sequence[int]]],
        drawn: Sequence[Completion],
        again: Sequence[int],
    ) -> dict[str, tuple[ScalingPoint, ...]]:
        """The curves over budgets."""
        paths = [self.split_thinking(one.ids) for one in drawn]
        longer = self.extend_thinking([prompt for _, prompt in each], paths, again)
        return {
            "stopped": self.budget_curve(each, paths, "stopped"),
            "continued": self.budget_curve(each, longer, "continued"),
        }

    def split_thinking(self, ids: Sequence[int]) -> _ThinkingTrace:
        """A sample where its answer begins: before the marker, or before its end."""
        text = b"".join(b"" if i in self.example_tokenizer.stop_ids else self.token_bytes[i] for i in ids)
        border = text.find(self.config.answer_marker.strip().encode())
        at = 0
        for k, i in enumerate(ids):
            at += 0 if i in self.example_tokenizer.stop_ids else len(self.token_bytes[i])
            if i in self.example_tokenizer.stop_ids or 0 <= border < at:
                return _ThinkingTrace(list(ids[:k]), list(ids[k:]))
        return _ThinkingTrace(list(ids))

    def extend_thinking(
        self, prompts: Sequence[Sequence[int]], paths: Sequence[_ThinkingTrace], again: Sequence[int]
    ) -> list[_ThinkingTrace]:
        """The paths with their ends replaced until they are as long as the largest budget."""
        most = max(self.config.thinking_budgets)
        found = [_ThinkingTrace(list(p.thinking), list(p.answer_ids)) for p in paths]
        for attempt in range(self.config.max_continuations):
            short = [k for k, p in enumerate(found) if p.answer_ids and len(p.thinking) + len(again) < most]
            if not short:
                break
            for k in short:
                found[k].thinking += again
            limit = max(most - len(found[k].thinking) for k in short) + self.config.max_answer_tokens
            more = self.sample([[*prompts[k], *found[k].thinking] for k in short], limit, f"again {attempt}")
            for k, one in zip(short, more, strict=True):
                step = self.split_thinking(one.ids)
                found[k] = _ThinkingTrace(found[k].thinking + step.thinking, step.answer_ids)
        return found

    def budget_curve(
        self, each: Sequence[tuple[VerifiableTask, Sequence[int]]], paths: Sequence[_ThinkingTrace], name: str
    ) -> tuple[ScalingPoint, ...]:
        """Accuracy at each budget along the paths."""
        budgets = sorted(set(self.config.thinking_budgets))
        forced: list[list[int]] = []  # prompts that end in a marker
        where: list[tuple[int, int]] = []  # (budget's number, path's number)
        texts = [[""] * len(paths) for _ in budgets]
        cost = np.zeros((len(budgets), len(paths)))
        for b, budget in enumerate(budgets):
            for k, ((_, prompt), path) in enumerate(zip(each, paths, strict=True)):
                thought = path.thinking[:budget]
                if path.answer_ids and len(path.thinking) <= budget:
                    texts[b][k] = self.example_tokenizer.decode([*thought, *path.answer_ids])
                    cost[b, k] = len(thought) + len(path.answer_ids)
                    continue
                forced.append([*prompt, *thought, *self.marker_ids(thought)])
                where.append((b, k))
        found = self.sample(forced, self.config.max_answer_tokens, name)
        for (b, k), ids, one in zip(where, forced, found, strict=True):
            start = len(each[k][1])
            texts[b][k] = self.example_tokenizer.decode([*ids[start:], *one.ids])
            cost[b, k] = min(budgets[b], len(paths[k].thinking)) + len(one.ids)
        points = []
        n = self.config.n_samples
        for b, budget in enumerate(budgets):
            verdicts = self.verify([task for task, _ in each], texts[b])
            values = np.array([v.passed for v in verdicts], np.float64).reshape(-1, n).mean(1)
            points.append(_point(budget, values, n, float(cost[b].mean())))
        return tuple(points)

    def marker_ids(self, thought: Sequence[int]) -> list[int]:
        """The marker, at the start of a line."""
        begun = bool(thought) and not self.token_bytes[thought[-1]].endswith(b"\n")
        return _encode(self.example_tokenizer, ("\n" if begun else "") + self.config.answer_marker)

    def sample(self, prompts: Sequence[Sequence[int]], limit: int, name: str) -> list[Completion]:
        """Answers of at most `limit` ids."""
        return sample_completions(
            self.engine, prompts, self.sampling, max_tokens=limit, stop_ids=self.example_tokenizer.stop_ids,
            seed=derive(self.config.seed, name), on_finished=self.on_finished,
        )  # fmt: skip


def _encode(scribe: ExampleTokenizer, text: str) -> list[int]:
    return [int(i) for i in scribe.tokenizer.encode(text)]
