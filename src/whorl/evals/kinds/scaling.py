"""Test-time scaling of generated answers: accuracy against the number of sampled tokens, from one set of samples.

Depth, a budget of b thinking ids (Muennighoff et al. 2025, arXiv:2501.19393, "budget forcing"):

    stopped@b      the first b ids of the thinking, then the answer marker, then a sampled answer; a sample that answers
                   within b ids stays unchanged
    continued@b    where thinking ends before b, its end is replaced by a continuation text ("Wait") and it continues, at
                   most `max_continuations` times; then as above

Breadth, n samples: pass@n, majority@n, best@n by log-probability, rewarded@n by a reward model
(`statistics/pass_at_k.py`). All budgets cut the same samples, so their difference is not sampling noise.

The subtle point is the border. Thinking ends where the marker starts, and one token may span both. So the border is
searched in bytes, and thinking ends before the first id that crosses it. A cut may fall inside a line: the marker starts a
new line, as in training data.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from whorl.errors import ConfigError
from whorl.evals.kinds.kind import Answered, Metric, Round
from whorl.evals.model.requests import Completion, GenerateRequest, Missing, Response, Score
from whorl.evals.statistics.pass_at_k import best_of_n, majority_at_k

REWARD = "reward"  # role of a reward model
TOKENS = "tokens"


class SampleOptions(BaseModel):
    """Settings of all kinds that generate."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    k: tuple[int, ...] = Field(default=(), description="of pass@k; default: 1 and the number of samples")
    curves: bool = Field(
        default=False, description="also accuracy against tokens, for each k and each budget"
    )
    budgets: tuple[int, ...] = Field(default=(), description="tokens of thinking, of a local model")
    reward: bool = Field(default=False, description="best of k by a reward model")
    answer_marker: str = Field(default="#### ", min_length=1, description="text before an answer")
    continuation_text: str = Field(default="Wait, ", min_length=1, description="text that replaces an end")
    max_continuations: int = Field(default=8, ge=0, description="of one sample")
    answer_tokens: int = Field(default=16, ge=1, description="after an inserted marker")


@dataclass(frozen=True)
class ForcedAnswer:
    """The answer of one sample at a budget. metric: such as stopped@16. tokens: sampled for it."""

    metric: str
    text: str
    tokens: int


@dataclass(frozen=True)
class Scaled:
    """Rewards of the samples of an item, and its answers at budgets."""

    rewards: tuple[float, ...] = ()
    forced: tuple[ForcedAnswer, ...] = ()


def curve_metrics(options: SampleOptions, ks: Sequence[int]) -> dict[str, Metric]:
    """Return the metrics of all curves."""
    if not options.curves:
        return {}
    found = {f"majority@{k}": Metric(f"the most frequent of {k} answers is right") for k in ks}
    found |= {f"best@{k}": Metric(f"the most likely of {k} answers is right") for k in ks}
    if options.reward:
        found |= {
            f"rewarded@{k}": Metric(f"the best of {k} answers by the reward model is right") for k in ks
        }
    found[TOKENS] = Metric("sampled for one answer", "", None, 0.0, None)
    for b in options.budgets:
        for name, about in (("stopped", "thinking cut at"), ("continued", "thinking extended to")):
            found[f"{name}@{b}"] = Metric(f"{about} {b} tokens")
            found[f"{name}@{b} tokens"] = Metric("sampled for one answer", "", None, 0.0, None)
    return found


def scaled_steps(
    item: Any, requests: Sequence[GenerateRequest], options: SampleOptions, tokenizer: Any
) -> Generator[Round, Sequence[Response], Answered]:
    """Yield the rounds of an item: samples, their rewards, continuations, and answers at the budgets."""
    responses = yield Round(requests)
    samples = [each for each in responses if isinstance(each, Completion)]
    if len(samples) < len(responses):
        return Answered(item, tuple(responses))
    rewards: list[float] = []
    if options.reward:
        asked = [replace(r, answer_ids=s.ids) for r, s in zip(requests, samples, strict=True)]
        scores = yield Round(asked, REWARD)
        if len(rewards := [each.total for each in scores if isinstance(each, Score)]) < len(scores):
            return Answered(item, (*responses, *scores))
    forced: list[ForcedAnswer] = []
    if options.budgets:
        if tokenizer is None:
            raise ConfigError("budgets of thinking need the tokens of the model", expected="a local model")
        found = yield from _BudgetForcing(options, tokenizer, requests).answers(samples)
        if isinstance(found, Missing):
            return Answered(item, (*responses, found))
        forced = found
    return Answered(item, tuple(responses), Scaled(tuple(rewards), tuple(forced)))


def curve_scores(
    ks: Sequence[int], samples: Sequence[Completion], right: NDArray[np.bool_], votes: Sequence[str], scaled: Scaled,
    forced_right: Sequence[bool],
) -> dict[str, float]:  # fmt: skip
    """Return metric -> value of one item. right: [N] of the samples. forced_right: of `scaled.forced`."""
    table, rng = right[None], np.random.default_rng(0)
    found = {f"majority@{k}": float(v[0]) for k, v in majority_at_k(table, [votes], ks, rng).items()}
    scores: dict[str, list[float]] = {"best": [sum(sample.log_probs) for sample in samples]}
    if scaled.rewards:
        scores["rewarded"] = list(scaled.rewards)
    for name, row in scores.items():
        found |= {f"{name}@{k}": float(best_of_n(table, np.array([row]), k)[0]) for k in ks}
    found[TOKENS] = float(np.mean([len(sample.ids) for sample in samples]))
    by_metric: dict[str, list[tuple[bool, int]]] = {}
    for each, is_right in zip(scaled.forced, forced_right, strict=True):
        by_metric.setdefault(each.metric, []).append((is_right, each.tokens))
    for metric, pairs in by_metric.items():
        accuracy, tokens = np.mean(np.array(pairs, np.float64), axis=0)
        found |= {metric: float(accuracy), f"{metric} tokens": float(tokens)}
    return found


def best_point(means: Mapping[str, float]) -> str:
    """Return the sentence on the most accurate point without a verifier; the cheapest among equals."""
    points = {
        name: (value, -means.get(f"{name} {TOKENS}", int(name.partition("@")[2]) * means[TOKENS]))
        for name, value in means.items()
        if name.partition("@")[2].isdigit() and not name.startswith("pass@")
    }
    best = max(points, key=points.__getitem__)
    accuracy, tokens = points[best]
    return f"Best without a verifier: {best}, {accuracy:.1%} for {-tokens:,.0f} tokens per answer"


@dataclass(frozen=True)
class _Trace:
    """thinking: ids before the answer. rest: the other ids (marker, answer, end), empty where the limit cut it; its text."""

    thinking: list[int]
    rest: list[int]
    text: str


class _BudgetForcing:
    """Cuts samples at budgets and continues them."""

    def __init__(self, options: SampleOptions, tokenizer: Any, requests: Sequence[GenerateRequest]) -> None:
        self.options, self.requests, self.tokenizer = options, requests, tokenizer
        self.token_bytes: Sequence[bytes] = tokenizer.token_bytes

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return [int(i) for i in self.tokenizer.encode(text)]

    def answers(
        self, samples: Sequence[Completion]
    ) -> Generator[Round, Sequence[Response], list[ForcedAnswer] | Missing]:
        """Yield rounds; return the answers of all samples at all budgets, of both curves."""
        traces = [self.split(sample) for sample in samples]
        extended = yield from self.extend(traces)
        if isinstance(extended, Missing):
            return extended
        found: list[ForcedAnswer | tuple[str, int, int, list[int]]] = []
        for name, paths in (("stopped", traces), ("continued", extended)):
            for budget in self.options.budgets:
                for k, path in enumerate(paths):
                    metric, cut = f"{name}@{budget}", path.thinking[:budget]
                    if path.rest and len(path.thinking) <= budget:
                        n = len(path.thinking) + len(path.rest)
                        found.append(ForcedAnswer(metric, self.text(cut) + path.text, n))
                    else:
                        found.append((metric, k, len(cut), [*cut, *self.marker(cut)]))
        asked = [each for each in found if isinstance(each, tuple)]
        limit = self.options.answer_tokens
        replies = yield Round([
            replace(self.requests[k], answer_ids=tuple(ids), max_tokens=limit) for _, k, _, ids in asked
        ])  # fmt: skip
        out, given = [], iter(replies)
        for each in found:
            if isinstance(each, tuple):
                if not isinstance(reply := next(given), Completion):
                    return _missing(reply)
                metric, _, n, ids = each
                out.append(ForcedAnswer(metric, self.text(ids) + reply.text, n + len(reply.ids)))
            else:
                out.append(each)
        return out

    def split(self, sample: Completion) -> _Trace:
        """Split a sample where its answer starts: before the marker, or before its end."""
        text, ids = sample.text.encode("utf-8", "replace"), list(sample.ids)
        border, at = text.find(self.options.answer_marker.strip().encode()), 0
        end = border if border >= 0 else len(text)
        for k, i in enumerate(ids):
            if (border < 0 and at >= end) or at + len(self.token_bytes[i]) > end:
                return _Trace(ids[:k], ids[k:], text[at:].decode("utf-8", "replace"))
            at += len(self.token_bytes[i])
        return _Trace(ids, [], "")

    def extend(
        self, traces: Sequence[_Trace]
    ) -> Generator[Round, Sequence[Response], list[_Trace] | Missing]:
        """Yield rounds; return the traces, continued until they are as long as the largest budget."""
        longest, found = max(self.options.budgets), list(traces)
        more = self.encode(self.options.continuation_text)
        for _ in range(self.options.max_continuations):
            short = [k for k, p in enumerate(found) if p.rest and len(p.thinking) + len(more) < longest]
            if not short:
                break
            begun = {k: [*found[k].thinking, *more] for k in short}
            replies = yield Round([
                replace(
                    self.requests[k], answer_ids=tuple(ids), max_tokens=longest - len(ids) + self.options.answer_tokens
                )
                for k, ids in begun.items()
            ])  # fmt: skip
            for (k, ids), reply in zip(begun.items(), replies, strict=True):
                if not isinstance(reply, Completion):
                    return _missing(reply)
                trace = self.split(reply)
                found[k] = replace(trace, thinking=[*ids, *trace.thinking])
        return found

    def marker(self, thinking: Sequence[int]) -> list[int]:
        """Return the ids of the marker at the start of a line."""
        inside = bool(thinking) and not self.token_bytes[thinking[-1]].endswith(b"\n")
        return self.encode(("\n" if inside else "") + self.options.answer_marker)

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        return b"".join(self.token_bytes[i] for i in ids).decode("utf-8", "replace")


def _missing(response: Response) -> Missing:
    return response if isinstance(response, Missing) else Missing("the back end gave no text")
