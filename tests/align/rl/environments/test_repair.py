"""Repair: attempts in the sandbox, test output as observation."""

from __future__ import annotations

from contextlib import closing

import pytest

from whorl.align.environments import EnvironmentConfig
from whorl.errors import ConfigError
from whorl.evals.episodes.config import make_environment
from whorl.evals.episodes.env_loop import EnvLoop, StepError, make_env_loop
from whorl.evals.episodes.environment import Reply, Turn
from whorl.evals.grading.task import VerifiableTask

TASK = VerifiableTask(
    "t", messages=({"role": "user", "content": "Repair f."},), verifier="unittest",
    answer='assert f(4) == 9, f"f(4) is {f(4)}, not 9"',
)  # fmt: skip
WRONG, RIGHT = "def f(a):\n    return a + 2\n", "```python\ndef f(a):\n    return a + 5\n```"


def attempts(loop: EnvLoop, texts: list[str], **options: float) -> list[Turn]:
    """Return the turns that answer the texts."""
    env = make_environment(EnvironmentConfig(name="repair", options=options), loop)
    env.reset(TASK)
    turns = []
    for key, text in enumerate(texts):
        loop.submit(key, env, TASK.messages, Reply(text), 10.0)
        while (found := loop.take(0.01)) is None:
            if loop.awaits_flush:
                loop.flush()
        assert not isinstance(found[1], StepError), found[1]
        turns.append(found[1])
    return turns


def test_failing_output_is_observed_until_program_passes() -> None:
    with closing(make_env_loop(EnvironmentConfig(name="repair"), [])) as loop:
        first, second, third = attempts(loop, [WRONG, "def f(a):", RIGHT], discount=0.5)
        assert "f(4) is 6, not 9" in first.messages[0]["content"] and not first.done
        assert "syntax: Ind" in second.messages[0]["content"] and second.reward == 0
        assert third.done and third.reward == 0.25 and third.info["passed"]
        *_, last = attempts(loop, [WRONG] * 2, attempts=2)
        assert last.done and last.reward == 0 and not last.info["passed"] and not last.messages
    with pytest.raises(ConfigError, match="attempts is 0"), closing(make_env_loop(None, [])) as loop:
        make_environment(EnvironmentConfig(name="repair", options={"attempts": 0}), loop)
