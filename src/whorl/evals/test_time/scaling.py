"""Test-time scaling: accuracy against the number of sampled tokens, from one set of samples.

Depth, a budget of b thinking ids (Muennighoff et al. 2025, arXiv:2501.19393, "budget forcing"):

    stopped      the first b ids of the thinking, then the answer marker, then a sampled answer; a sample that answers
                 within b ids stays unchanged
    continued    where thinking ends before b, its end is replaced by a continuation text ("Wait") and it continues, at
                 most `max_continuations` times; then as above

Breadth, n samples: majority vote, any correct (pass@n), best by a score (`evals/statistics/pass_at_k.py`).

One set of N samples per task serves all curves. The curves over n are means over its subsets. All budgets cut the same
samples, so their difference is not sampling noise. The trace of the largest budget contains those of smaller ones, so
each sample is continued once, and only the short answers after the marker are sampled again.

`tokens` is the cost of a point: sampled ids per answer of one task. It makes depth and breadth comparable.

The subtle point is the border. Thinking ends where the marker starts, and one token may span both. So the border is
searched in bytes, and thinking ends before the first id that crosses it. A cut may fall inside a line: the marker
starts a new line, as in training data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from whorl.engine.engine import Engine
from whorl.engine.sampling_params import SamplingParams
from whorl.errors import ConfigError, DataError
from whorl.evals.grading import Grade, VerifiableTask
from whorl.evals.grading.grade import UNANSWERED
from whorl.evals.model.example import ExampleTokenizer, TokenizedExample, concat
from whorl.evals.model.sampling import SampledCompletion, sample_completions
from whorl.evals.statistics.pass_at_k import best_of_n, estimate, majority_at_k, pass_at_k
from whorl.tracking.seeds import derive, numpy_rng

TaskVerifier = Callable[[Sequence[VerifiableTask], Sequence[str]], Sequence[Grade]]
Scorer = Callable[[Sequence[TokenizedExample]], Sequence[float]]  # higher is better, such as a reward model
CURVES = {
    "stopped": "thinking cut at the budget",
    "continued": "thinking extended to the budget",
    "majority_at_k": "majority of n",
    "pass_at_k": "any of n correct, by the verifier",
    "max_log_prob": "best of n by log-probability",
}


class ScalingConfig(BaseModel):
    """Settings of the measurement."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    n_samples: int = Field(
        default=16, ge=1, description="samples per task; the curves use powers of two up to it"
    )
    max_completion_tokens: int = Field(default=128, ge=1, description="ids of a sample")
    temperature: float = Field(default=1.0, gt=0, description="of all sampling")
    thinking_budgets: tuple[int, ...] = Field(default=(), description="ids of thinking; empty: breadth only")
    answer_marker: str = Field(default="#### ", min_length=1, description="text before an answer")
    continuation_text: str = Field(default="Wait, ", min_length=1, description="text that replaces an end")
    max_continuations: int = Field(default=8, ge=0, description="maximum per sample")
    max_answer_tokens: int = Field(default=16, ge=1, description="ids after an inserted marker")
    seed: int = 0

    @model_validator(mode="after")
    def _possible(self) -> ScalingConfig:
        if any(not 0 <= b <= self.max_completion_tokens for b in self.thinking_budgets):
            raise ValueError(
                f"thinking_budgets are {list(self.thinking_budgets)}: each must be 0 to max_completion_tokens = "
                f"{self.max_completion_tokens}"
            )
        return self

    @property
    def max_new_tokens(self) -> int:
        """Number of ids that may follow a prompt, without a marker."""
        return self.max_completion_tokens + self.max_answer_tokens


@dataclass(frozen=True)
class ScalingPoint:
    """compute: the budget, or n.

    accuracy, low, high: with its 95 % interval over tasks. tokens: sampled ids per answer, mean.
    """

    compute: int
    accuracy: float
    low: float
    high: float
    tokens: float


@dataclass(frozen=True)
class ScalingResult:
    """Results of the measurement.

    curves: by name (`CURVES`, or a scorer's name). n_failed: failed verifications, which count as wrong.
    first_failure: reason of the first one. truncated_fraction: share of samples.
    """

    n_tasks: int
    samples: int
    curves: Mapping[str, tuple[ScalingPoint, ...]]
    n_failed: int
    first_failure: str
    truncated_fraction: float

    def best(self) -> tuple[str, ScalingPoint]:
        """Return the most accurate point without a verifier; the cheapest among equals."""
        found = [(name, p) for name, points in self.curves.items() if name != "pass_at_k" for p in points]
        return max(found, key=lambda pair: (pair[1].accuracy, -pair[1].tokens))


@dataclass
class _ThinkingTrace:
    """thinking: ids before the answer.

    answer_ids: the rest (marker, answer, end), empty where the limit truncated it.
    """

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
    """Return accuracy against sampled tokens.

    Args:
        verify: as `grade_tasks`.
        scorers: name -> scores of (prompt, completion) examples, for best of n.
        on_finished: called with the number of samples that just ended.

    Raises:
        DataError: there are no tasks.
        ConfigError: a task is too long for the engine; it is named.
    """
    if not tasks:
        raise DataError("there are no tasks", expected="at least one")
    n = config.n_samples
    prompts = [example_tokenizer.task_prompt(task) for task in tasks]
    continuation, marker = (
        _encode(example_tokenizer, config.continuation_text),
        _encode(example_tokenizer, "\n" + config.answer_marker),
    )
    room = engine.max_positions - config.max_new_tokens - len(marker)
    for task, ids in zip(tasks, prompts, strict=True):
        if len(ids) > room:
            raise ConfigError(
                f"task {task.id!r} has a prompt of {len(ids):,} ids, and the limit is {room:,}",
                expected=f"a context of {engine.max_positions - room + len(ids):,}",
                do="leave it out, or reduce max_completion_tokens",
            )
    sampling = SamplingParams(temperature=config.temperature, top_p=1.0)
    samples = [(task, prompt) for task, prompt in zip(tasks, prompts, strict=True) for _ in range(n)]
    completions = sample_completions(
        engine,
        [p for _, p in samples],
        sampling,
        max_tokens=config.max_completion_tokens,
        stop_ids=example_tokenizer.stop_ids,
        seed=derive(config.seed, "samples"),
        on_finished=on_finished,
    )
    texts = [example_tokenizer.decode(one.ids) for one in completions]
    failures = list[str]()

    def count_failures(verified: Sequence[VerifiableTask], outputs: Sequence[str]) -> Sequence[Grade]:
        grades = verify(verified, outputs)
        failures.extend(v.reason for v in grades if v.failed)
        return grades

    grades = count_failures([task for task, _ in samples], texts)
    curves = _parallel_curves(
        config, len(tasks), [p for _, p in samples], completions, texts, grades, scorers or {}
    )
    if config.thinking_budgets:
        budget_forcing = _BudgetForcing(
            engine, example_tokenizer, config, sampling, count_failures, on_finished
        )
        curves = budget_forcing.budget_curves(samples, completions, continuation) | curves
    truncated = float(np.mean([not one.finished for one in completions]))
    return ScalingResult(len(tasks), n, curves, len(failures), "".join(failures[:1]), truncated)


def vote_key(grade: Grade, text: str) -> str:
    """Return the answer of a sample in a form where equal answers are equal strings; empty without an answer."""
    return "" if grade.outcome in UNANSWERED else grade.answer or text.strip()


def _parallel_curves(
    config: ScalingConfig,
    n_tasks: int,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[SampledCompletion],
    texts: Sequence[str],
    grades: Sequence[Grade],
    scorers: Mapping[str, Scorer],
) -> dict[str, tuple[ScalingPoint, ...]]:
    n, shape = config.n_samples, (n_tasks, config.n_samples)
    ns = [*(1 << i for i in range(n.bit_length()) if 1 << i < n), n]
    tokens = float(np.mean([len(one.ids) for one in completions]))
    correct_by_task = np.array([grade.passed for grade in grades], np.bool_).reshape(shape)
    keys = [vote_key(grade, text) for grade, text in zip(grades, texts, strict=True)]
    votes = [keys[i * n : (i + 1) * n] for i in range(n_tasks)]
    scores = {"max_log_prob": [float(np.sum(one.log_probs)) for one in completions]}
    pairs = [concat(p, one.ids) for p, one in zip(prompts, completions, strict=True)] if scorers else []
    scores |= {name: [float(x) for x in scorer(pairs)] for name, scorer in scorers.items()}
    counted = majority_at_k(correct_by_task, votes, ns, numpy_rng(config.seed, "votes"))

    def points(values: Callable[[int], NDArray[np.float64]]) -> tuple[ScalingPoint, ...]:
        return tuple(_point(k, values(k), n // k, k * tokens) for k in ns)

    found = {
        "majority_at_k": points(lambda k: counted[k]),
        "pass_at_k": points(lambda k: pass_at_k(correct_by_task, k)),
    }
    for name, row in scores.items():
        table = np.array(row, np.float64).reshape(shape)
        found[name] = points(lambda k, table=table: best_of_n(correct_by_task, table, k))  # type: ignore[misc]
    return found


def _point(at: int, values: NDArray[np.float64], draws: int, tokens: float) -> ScalingPoint:
    e = estimate(values, draws)
    return ScalingPoint(at, e.mean, e.low, e.high, tokens)


class _BudgetForcing:
    """Cuts samples at budgets and continues them."""

    def __init__(
        self,
        engine: Engine,
        example_tokenizer: ExampleTokenizer,
        config: ScalingConfig,
        sampling: SamplingParams,
        verify: TaskVerifier,
        on_finished: Callable[[int], None],
    ) -> None:
        self.engine, self.example_tokenizer, self.config = engine, example_tokenizer, config
        self.sampling, self.verify, self.on_finished = sampling, verify, on_finished
        self.token_bytes = example_tokenizer.tokenizer.token_bytes

    def budget_curves(
        self,
        samples: Sequence[tuple[VerifiableTask, Sequence[int]]],
        completions: Sequence[SampledCompletion],
        continuation: Sequence[int],
    ) -> dict[str, tuple[ScalingPoint, ...]]:
        """Return the curves over budgets."""
        paths = [self.split_thinking(one.ids) for one in completions]
        extended = self.extend_thinking([prompt for _, prompt in samples], paths, continuation)
        return {
            "stopped": self.budget_curve(samples, paths, "stopped"),
            "continued": self.budget_curve(samples, extended, "continued"),
        }

    def split_thinking(self, ids: Sequence[int]) -> _ThinkingTrace:
        """Split a sample where its answer starts: before the marker, or before its end."""
        text = b"".join(b"" if i in self.example_tokenizer.stop_ids else self.token_bytes[i] for i in ids)
        border = text.find(self.config.answer_marker.strip().encode())
        at = 0
        for k, i in enumerate(ids):
            at += 0 if i in self.example_tokenizer.stop_ids else len(self.token_bytes[i])
            if i in self.example_tokenizer.stop_ids or 0 <= border < at:
                return _ThinkingTrace(list(ids[:k]), list(ids[k:]))
        return _ThinkingTrace(list(ids))

    def extend_thinking(
        self, prompts: Sequence[Sequence[int]], paths: Sequence[_ThinkingTrace], continuation: Sequence[int]
    ) -> list[_ThinkingTrace]:
        """Return the traces, continued until they are as long as the largest budget."""
        longest = max(self.config.thinking_budgets)
        found = [_ThinkingTrace(list(p.thinking), list(p.answer_ids)) for p in paths]
        for attempt in range(self.config.max_continuations):
            short = [
                k
                for k, p in enumerate(found)
                if p.answer_ids and len(p.thinking) + len(continuation) < longest
            ]
            if not short:
                break
            for k in short:
                found[k].thinking += continuation
            limit = max(longest - len(found[k].thinking) for k in short) + self.config.max_answer_tokens
            more = self.sample([[*prompts[k], *found[k].thinking] for k in short], limit, f"again {attempt}")
            for k, completion in zip(short, more, strict=True):
                trace = self.split_thinking(completion.ids)
                found[k] = _ThinkingTrace(found[k].thinking + trace.thinking, trace.answer_ids)
        return found

    def budget_curve(
        self,
        samples: Sequence[tuple[VerifiableTask, Sequence[int]]],
        paths: Sequence[_ThinkingTrace],
        name: str,
    ) -> tuple[ScalingPoint, ...]:
        """Return the accuracy at each budget along the traces."""
        budgets = sorted(set(self.config.thinking_budgets))
        forced: list[list[int]] = []  # prompts that end in a marker
        origin: list[tuple[int, int]] = []  # (index of the budget, index of the trace)
        texts = [[""] * len(paths) for _ in budgets]
        cost = np.zeros((len(budgets), len(paths)))
        for b, budget in enumerate(budgets):
            for k, ((_, prompt), path) in enumerate(zip(samples, paths, strict=True)):
                thinking = path.thinking[:budget]
                if path.answer_ids and len(path.thinking) <= budget:
                    texts[b][k] = self.example_tokenizer.decode([*thinking, *path.answer_ids])
                    cost[b, k] = len(thinking) + len(path.answer_ids)
                    continue
                forced.append([*prompt, *thinking, *self.marker_ids(thinking)])
                origin.append((b, k))
        found = self.sample(forced, self.config.max_answer_tokens, name)
        for (b, k), ids, completion in zip(origin, forced, found, strict=True):
            start = len(samples[k][1])
            texts[b][k] = self.example_tokenizer.decode([*ids[start:], *completion.ids])
            cost[b, k] = min(budgets[b], len(paths[k].thinking)) + len(completion.ids)
        points = []
        n = self.config.n_samples
        for b, budget in enumerate(budgets):
            grades = self.verify([task for task, _ in samples], texts[b])
            values = np.array([v.passed for v in grades], np.float64).reshape(-1, n).mean(1)
            points.append(_point(budget, values, n, float(cost[b].mean())))
        return tuple(points)

    def marker_ids(self, thinking: Sequence[int]) -> list[int]:
        """Return the ids of the marker at the start of a line."""
        inside_line = bool(thinking) and not self.token_bytes[thinking[-1]].endswith(b"\n")
        return _encode(self.example_tokenizer, ("\n" if inside_line else "") + self.config.answer_marker)

    def sample(self, prompts: Sequence[Sequence[int]], limit: int, name: str) -> list[SampledCompletion]:
        """Return completions of at most `limit` ids."""
        return sample_completions(
            self.engine, prompts, self.sampling, max_tokens=limit, stop_ids=self.example_tokenizer.stop_ids,
            seed=derive(self.config.seed, name), on_finished=self.on_finished,
        )  # fmt: skip


def _encode(example_tokenizer: ExampleTokenizer, text: str) -> list[int]:
    return [int(i) for i in example_tokenizer.tokenizer.encode(text)]
