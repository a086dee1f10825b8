"""The verifier `compiles`: code that parses but has no effect does not pass."""

from __future__ import annotations

import pytest

from whorl.evals.verify import VerifiableTask, verify_all

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
        (FUNCTION, "    # a comment\n    x\n", False),
        (FUNCTION, "    x.y\n", False),
        (FUNCTION, "    x == 1, 2\n", False),
        (FUNCTION, '    """More."""\n', False),
        (FUNCTION, "    pass\n", False),
        (FUNCTION, "    ...\n", False),
        (FUNCTION, "    return\n", False),
        (FUNCTION, "    if x:\n        pass\n", False),
        (FUNCTION, "    raise NotImplementedError('later')\n", False),
        (FUNCTION, "    global y\n    y\n", False),
        (FUNCTION, "    pass\nprint(1)\n", False),
        (FUNCTION, "    print(x)\n", True),
        (FUNCTION, "    return None\n", True),
        (FUNCTION, "    x.y = 1\n", True),
        (FUNCTION, "    yield\n", True),
        (FUNCTION, "    await_ = x\n", True),
        (FUNCTION, "    raise ValueError\n", True),
        (FUNCTION, "    del x[0]\n", True),
        (FUNCTION, "    with x:\n        return 1\n", True),
        (FUNCTION, "    for y in x:\n        y.z()\n", True),
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
    verdict = verify_all([VerifiableTask(id="a", prompt=prompt, verifier="compiles")], [completion], None)[0]
    assert verdict.passed is passed, verdict.reason
    assert passed or verdict.reason.startswith(("syntax", "empty"))


@pytest.mark.parametrize(
    ("answer", "passed"),
    [
        ("", False),
        ("Yes", False),
        ("```python\npass\n```", False),
        ("Here:\n```python\nx = 1\n```\nDone (I hope.", True),
    ],
)
def test_compiles_requires_effect_in_chat_answer(answer: str, passed: bool) -> None:
    task = VerifiableTask(id="a", messages=({"role": "user", "content": "Write it."},), verifier="compiles")
    assert verify_all([task], [answer], None)[0].passed is passed
