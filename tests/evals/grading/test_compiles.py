"""The verifier `compiles`: code that parses but has no effect does not pass."""

from __future__ import annotations

import pytest

from whorl.evals.grading import VerifiableTask, grade_tasks

FUNCTION = 'def f(x):\n    """Doc."""\n'


WITHOUT_EFFECT = ["x.y", "x == 1, 2", '"""More."""', "pass", "...", "return", "if x:\n        pass"]
WITHOUT_EFFECT += [
    "raise NotImplementedError('later')",
    "global y\n    y",
    "pass\nprint(1)",
    "# later\n    x",
]
WITH_EFFECT = ["return x", "print(x)", "return None", "x.y = 1", "yield", "await_ = x", "raise ValueError"]
WITH_EFFECT += ["del x[0]", "with x:\n        return 1", "for y in x:\n        y.z()"]


@pytest.mark.parametrize(
    ("prompt", "completion", "passed"),
    [
        (FUNCTION, "", False),
        (FUNCTION, "# later\n", False),
        (FUNCTION, "y = 1\n", False),
        (FUNCTION, "    return x\ny = 1\n", True),
        (FUNCTION, "    return (\n", False),
        (FUNCTION, "    return " + "(" * 10_000, False),
        (FUNCTION, "return x\n", False),
        (FUNCTION, "    x = '\0'", False),
        ("class A:\n    x = 1\n", "    y = 2\n", True),
        ("class A:\n    x = 1\n", "B = A\n", False),
        ("import os\n", "x = 1\n", True),
        ("import os\n", "\n", False),
        ("def f(x):\n", "    return x\n", True),
        ("def f(x):\n", "", False),
        # One statement with an effect is enough.
        (FUNCTION, f"    return {'x + ' * 900}x\n", True),  # deep
        *((FUNCTION, f"    {body}\n", False) for body in WITHOUT_EFFECT),
        *((FUNCTION, f"    {body}\n", True) for body in WITH_EFFECT),
        ("def f(x):\n", '    """Doc."""\n', False),
        ("def f(x):\n", "    x\n", False),
        ("def f(x): ", "return x\n", True),
        ("def f(x):\n    ret", "urn x\n", True),
        ("x = g", "(1)\n", True),
        ("import os\n", "os\n", False),
        ("import os\n", "class E(Exception):\n    pass\n", True),
        ("class A:\n    def f(self):\n", "        self\n    x = 1\n", False),
        ("class A:\n    def f(self):\n", "        self.x()\n", True),
        ('class A:\n    def f(self):\n        """Doc."""\n', "    x = 1\n", False),
        ("class A:\n    def f(self):\n        return 1\n", "    def g(self):\n        return 2\n", True),
        ("class A:\n    é = 1; ", "è = 2\n", True),
    ],
)
def test_compiles_requires_effect_in_last_definition(prompt: str, completion: str, passed: bool) -> None:
    verdict = grade_tasks([VerifiableTask(id="a", prompt=prompt, verifier="compiles")], [completion], None)[0]
    assert verdict.passed is passed, verdict.reason
    assert passed or verdict.reason.startswith(("syntax", "empty"))


CHATS = [("", False), ("Yes", False), ("```python\npass\n```", False)]
CHATS += [("Here:\n```python\nx = 1\n```\nDone (I hope.", True)]


@pytest.mark.parametrize(("answer", "passed"), CHATS)
def test_compiles_requires_effect_in_chat_answer(answer: str, passed: bool) -> None:
    task = VerifiableTask(id="a", messages=({"role": "user", "content": "Write it."},), verifier="compiles")
    assert grade_tasks([task], [answer], None)[0].passed is passed
