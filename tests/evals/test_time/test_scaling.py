"""Test-time scaling: a scripted engine checks cuts and continuations, a real one checks sampling."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from tests.support.align.byte_model import decoder, scribe

from whorl.errors import ConfigError, DataError
from whorl.evals.grading import Grade, VerifiableTask, grade_tasks
from whorl.evals.model.example import TokenizedExample
from whorl.evals.model.sampling import SampledCompletion, rollout_engine
from whorl.evals.test_time import scaling
from whorl.evals.test_time.scaling import ScalingConfig, ScalingResult, measure_scaling, vote_key

EOS = 257


class Script:
    """Replaces `sample_completions`: the completion is a function of the prompt, and the requests are recorded."""

    def __init__(self, says: dict[bytes, str]) -> None:
        self.says, self.asked = says, []

    def __call__(self, engine: Any, prompts: Any, *_: Any, **rest: Any) -> list[SampledCompletion]:
        found = []
        for ids in prompts:
            prompt = bytes(i for i in ids if i < 256)
            self.asked.append((prompt.decode(), rest["max_tokens"]))
            text = next(v for k, v in reversed(self.says.items()) if prompt.endswith(k))
            completion_ids = [*text.encode(), EOS][: rest["max_tokens"]]
            n = len(completion_ids)
            found.append(SampledCompletion(completion_ids, [-0.5] * n, [0] * n, completion_ids[-1] == EOS))
        rest["on_finished"](len(prompts))
        return found


def run(
    monkeypatch: pytest.MonkeyPatch, says: dict[bytes, str], task: VerifiableTask, **settings: Any
) -> tuple[ScalingResult, list[tuple[str, int]]]:
    script, engine = Script(says), SimpleNamespace(max_positions=200)
    monkeypatch.setattr(scaling, "sample_completions", script)
    config = ScalingConfig(n_samples=1, max_completion_tokens=40, max_answer_tokens=4, **settings)
    return measure_scaling(engine, scribe(), [task], config, grade_tasks), script.asked  # type: ignore[arg-type]


TASK = VerifiableTask("t", prompt="2+3+4\n", verifier="numeric", answer="9")
THINKS = {b"2+3+4\n": "2+3=5\n5+4=9\n#### 9", b"2+3=5\n#### ": "5", b"5+4\n#### ": "9", b"5+\n#### ": "8"}


def test_budget_cuts_thinking_and_adds_marker(monkeypatch: pytest.MonkeyPatch) -> None:
    got, requests = run(monkeypatch, THINKS, TASK, thinking_budgets=(6, 9, 8, 12), max_continuations=0)
    assert [p.compute for p in got.curves["stopped"]] == [6, 8, 9, 12]
    assert [p.accuracy for p in got.curves["stopped"]] == [0, 0, 1, 1]
    cut = [f"2+3+4\n2+3=5\n{thought}#### " for thought in ("", "5+\n", "5+4\n")]
    assert [text for text, _ in requests[1:4]] == cut
    assert {limit for _, limit in requests[1:]} == {4}
    # Cost: the cut and the answer with its end; at 12 the sample itself, which is not sampled again.
    assert [p.tokens for p in got.curves["stopped"]] == [6 + 2, 8 + 2, 9 + 2, 19]
    assert got.curves["stopped"] == got.curves["continued"]


def test_early_end_is_continued_on_one_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    says = {
        b"2+3+4\n": "2+3=5\n#### 5", b"5\nWait\n": "5+4=9\n#### 9", b"9\nWait\n": "#### 7",
        b"#### ": "1", b"5+4=9\n#### ": "9",
    }  # fmt: skip
    got, requests = run(
        monkeypatch, says, TASK, thinking_budgets=(6, 17, 30), continuation_text="Wait\n", max_continuations=2
    )
    assert [p.accuracy for p in got.curves["stopped"]] == [0, 0, 0]
    # 6 and 17 cut the trace; at 30 it ends for the third time, and that answer counts.
    assert [p.accuracy for p in got.curves["continued"]] == [0, 1, 0]
    assert [p.tokens for p in got.curves["continued"]] == [6 + 2, 17 + 2, 22 + 7]
    again = [text for text, _ in requests if text.endswith("Wait\n")]
    assert again == ["2+3+4\n2+3=5\nWait\n", "2+3+4\n2+3=5\nWait\n5+4=9\nWait\n"]


def test_split_thinking_inside_token() -> None:
    words = SimpleNamespace(token_bytes=[b"ab", b"c\n#", b"### ", b"7", b"<eos>"])
    writer = SimpleNamespace(tokenizer=words, stop_ids=frozenset({4}))
    walker = scaling._BudgetForcing(None, writer, ScalingConfig(), None, None, lambda _: None)  # type: ignore[arg-type]
    for ids, thinking in (([0, 1, 2, 3, 4], 1), ([0, 0, 4], 2), ([0, 0], 2)):
        path = walker.split_thinking(ids)
        assert (path.thinking, path.answer_ids) == (ids[:thinking], ids[thinking:])


def test_vote_key_normalizes_numbers() -> None:
    text = VerifiableTask("e", prompt="p", verifier="exact", answer="x")

    def key(task: VerifiableTask, answer: str) -> str:
        return vote_key(grade_tasks([task], [answer])[0], answer)

    assert {key(TASK, t) for t in ("1+8=9\n#### 9", "#### 9.0", "so it is 9.")} == {"9"}
    assert key(TASK, "nothing") == ""
    assert key(text, " yes \n") == key(text, "The answer is yes.") == "yes" != key(text, "no")
    assert vote_key(Grade(0.0, False), " return 1\n") == "return 1"


def test_failed_verifications_count_at_each_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    fails = VerifiableTask("t", prompt="2+3+4\n", verifier="numeric", answer="what?")
    got, _ = run(monkeypatch, THINKS, fails, thinking_budgets=(6, 9), max_continuations=0)
    assert got.n_failed == 1 + 2 * 2  # the sample, and both budgets of both curves
    assert got.first_failure.startswith("raised: DataError")
    good, _ = run(monkeypatch, THINKS, TASK)
    assert (good.n_failed, good.first_failure) == (0, "")


@pytest.fixture(scope="module")
def drawn() -> ScalingResult:
    """A real engine, and a verifier that accepts even lengths."""
    tasks = [VerifiableTask(f"t{k}", prompt=chr(97 + k), verifier="custom") for k in range(6)]
    engine = rollout_engine(decoder(), scribe(), sequences=16, max_length=64)
    finished: list[int] = []
    config = ScalingConfig(
        n_samples=4, max_completion_tokens=12, thinking_budgets=(0, 4, 12), max_answer_tokens=3,
        answer_marker="Q", seed=3,
    )  # fmt: skip

    def judge(some: Sequence[VerifiableTask], texts: Sequence[str]) -> list[Grade]:
        return [Grade(float(len(text) % 2 == 0), len(text) % 2 == 0) for text in texts]

    def short(texts: Sequence[TokenizedExample]) -> list[float]:
        return [-float(len(text)) for text in texts]

    def once() -> ScalingResult:
        return measure_scaling(
            engine, scribe(), tasks, config, judge, scorers={"short": short}, on_finished=finished.append
        )

    first = once()
    assert sum(finished) >= 24 and first == once()  # the same seed gives the same result
    return first


def test_curves_share_one_set_of_samples(drawn: ScalingResult) -> None:
    chosen = {"majority_at_k", "pass_at_k", "max_log_prob", "short"}
    assert set(drawn.curves) == {"stopped", "continued"} | chosen
    assert len({round(drawn.curves[name][0].accuracy, 9) for name in chosen}) == 1  # one sample: no choice
    ranges = [p for points in drawn.curves.values() for p in points]
    assert all(0 <= p.low <= p.accuracy <= p.high <= 1 and p.high - p.low > 0.05 for p in ranges)
    assert [p.compute for p in drawn.curves["pass_at_k"]] == [1, 2, 4]
    any_ = [p.accuracy for p in drawn.curves["pass_at_k"]]
    assert any_ == sorted(any_) and any_[-1] >= drawn.curves["short"][-1].accuracy
    tokens = [p.tokens for p in drawn.curves["majority_at_k"]]
    np.testing.assert_allclose(tokens, [tokens[0], 2 * tokens[0], 4 * tokens[0]])
    name, best = drawn.best()
    reachable = [p.accuracy for n, points in drawn.curves.items() if n != "pass_at_k" for p in points]
    assert name != "pass_at_k" and best.accuracy == max(reachable)


def test_measure_scaling_rejects_invalid_arguments() -> None:
    engine = rollout_engine(decoder(), scribe(), sequences=4, max_length=48)
    with pytest.raises(DataError, match="no tasks"):
        measure_scaling(engine, scribe(), [], ScalingConfig(), grade_tasks)
    config = ScalingConfig(max_completion_tokens=40, max_answer_tokens=4)
    with pytest.raises(ConfigError, match=r"(?s)task 't' has a prompt of 7 ids.*expected: a context of"):
        measure_scaling(engine, scribe(), [TASK], config, grade_tasks)
    with pytest.raises(ValidationError, match="0 to max_completion_tokens = 8"):
        ScalingConfig(max_completion_tokens=8, thinking_budgets=(4, 9))
