"""The compiler as a judge: what policies found that parses and does nothing is no answer."""

from __future__ import annotations

import pytest

from whorl.evals.verify import Task, verify_all

FUNCTION = 'def f(x):\n    """Doc."""\n'


@pytest.mark.parametrize(
    ("prompt", "completion", "passed"),
    [
        (FUNCTION, "", False),
        (FUNCTION, "# later\n", False),
        (FUNCTION, "y = 1\n", False),
        (FUNCTION, "    return x\n", True),
        (FUNCTION, "    return x\ny = 1\n", True),
        (FUNCTION, "    return (\n", False),
        ("class A:\n    x = 1\n", "    y = 2\n", True),
        ("class A:\n    x = 1\n", "B = A\n", False),
        ("import os\n", "x = 1\n", True),
        ("import os\n", "\n", False),
        ("def f(x):\n", "    return x\n", True),
        ("def f(x):\n", "", False),
    ],
)
def test_the_continuation_adds_to_what_was_begun(prompt: str, completion: str, passed: bool) -> None:
    verdict = verify_all([Task(id="a", prompt=prompt, verifier="compiles")], [completion], None)[0]
    assert verdict.passed is passed, verdict.reason
