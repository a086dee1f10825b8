"""The calculator: expressions, calls, malformed calls as observations."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whorl.align.rl.environments.calculator import CalculatorEnv, calculate
from whorl.evals.episodes.environment import Reply, Turn
from whorl.evals.grading import Grade, VerifiableTask, grade_tasks
from whorl.evals.model.requests import Completion
from whorl.tokens.chat.tool_calls import parse_reply

TASK = VerifiableTask("t", messages=({"role": "user", "content": "6*7?"},), verifier="numeric", answer="42")


class Services:
    async def verify(self, task: VerifiableTask, completion: Completion) -> Grade:
        return grade_tasks([task], [completion])[0]

    async def run(self, program: Any) -> Any:
        raise NotImplementedError


def step(text: str) -> Turn:
    env = CalculatorEnv(Services())
    env.reset(TASK)
    return asyncio.run(env.step(TASK.messages, Reply(text)))


def call(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


GOOD = call('{"name": "calculator", "arguments": {"expression": "6*7"}}')


@pytest.mark.parametrize(
    ("text", "content", "counts"),
    [
        (GOOD, ["42"], (1, 0)), (GOOD + GOOD.replace("6*7", "1/3"), ["42", "0.333333333333"], (2, 0)),
        (call("6*7"), ["error: expected {"], (0, 1)), ("<tool_call>\n{", ["error: expected {"], (0, 1)),
        (GOOD + call("6*7"), ["42"], (1, 1)),
        (call('{"name": "adder", "arguments": {}}'), ["error: no tool is named 'adder'"], (1, 1)),
        (call('{"name": "calculator", "arguments": [1]}'), ["error: expected the arguments"], (1, 1)),
        (call('{"name": "calculator", "arguments": "6*7"}'), ["error: expected the arguments"], (1, 1)),
        (GOOD.replace("6*7", "x*7"), ["error: 'x' is no arithmetic"], (1, 1)),
        (GOOD.replace("6*7", "1/0"), ["error: division by zero"], (1, 0)),
        (GOOD.replace("6*7", "9**9**9"), ["error: the result is too large"], (1, 0)),
    ],
)  # fmt: skip
def test_calls_are_answered_and_malformed_ones_counted(text: str, content: list[str], counts: Any) -> None:
    turn = step(text)
    assert not turn.done and turn.reward == 0
    assert [m["role"] for m in turn.messages] == ["tool"] * len(content)
    assert all(m["content"].startswith(c) for m, c in zip(turn.messages, content, strict=True))
    assert (turn.info["tool_calls"], turn.info["malformed_calls"]) == counts


@pytest.mark.parametrize(("text", "reward"), [("#### 42", 1.0), ("41", 0.0), ("", 0.0)])
def test_reply_without_call_is_graded(text: str, reward: float) -> None:
    turn = step(text)
    assert turn.done and turn.reward == reward and turn.info["passed"] == (reward == 1)


TERMS = st.recursive(
    st.integers(0, 999).map(str),
    lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda t: f"({t[0]}{t[1]}{t[2]})"),
    max_leaves=8,
)


@given(TERMS)
def test_calculate_equals_python(expression: str) -> None:
    assert calculate(expression) == str(eval(expression))


@given(st.text(max_size=60))
def test_calculate_and_find_calls_never_crash(text: str) -> None:
    parse_reply(text)
    with contextlib.suppress(ValueError, ArithmeticError):
        calculate(text)


@pytest.mark.parametrize(
    "text", ["__import__('os')", "True", "1j", "(-8)**0.5", "'a'*9", "1" * 201, "(" * 150 + "1" + ")" * 49]
)
def test_calculate_rejects_other_python(text: str) -> None:
    with pytest.raises(ValueError, match=r"arithmetic|characters|real number"):
        calculate(text)
