"""Rewards: weighted sums of grades, errors within a batch, programs, and functions of users."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.slots.processes import has_exited, wait_until

from whorl.errors import ConfigError, DataError
from whorl.evals.grading import GRADERS, Grade, VerifiableTask, custom, grade_tasks, parse_graders
from whorl.evals.grading.doctests import without_examples
from whorl.registry import permit_code
from whorl.sandbox import ResourceLimits, Sandbox

ROOT = Path(__file__).parents[3]
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="confinement needs Linux")


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(ResourceLimits(wall_seconds=20, cpu_seconds=20), workers=2) as sandbox:
        yield sandbox


def one(task: VerifiableTask, completion: str, sandbox: Sandbox | None = None) -> Grade:
    return grade_tasks([task], [completion], sandbox)[0]


def text_task(verifier: str, answer: str = "") -> VerifiableTask:
    return VerifiableTask("t", prompt="What?", verifier=verifier, answer=answer)


GSM = "He has 3 * 4 = 12 eggs.\n#### 1,200"
TAGS = "<think><answer>"
BAD_TAGS = ["", "<answer>5</answer>", "<answer>5</answer><think>a</think>"]
BAD_TAGS += ["<think><answer>5</answer></think>"]
BAD_TAGS += ["<think>a</think>" + end for end in ("<answer></answer>", "<answer> </answer>")]
BAD_TAGS += ["x<think>a</think><answer>5</answer>", "<think>a</think><answer>5</answer><answer>6</answer>"]


@pytest.mark.parametrize(
    ("verifier", "answer", "completion", "reason"),
    [
        ("exact", "Paris", " Paris\n", "passed"),
        ("exact", "Paris", "paris", "passed"),
        ("exact[bare]", "Paris", "paris", "another form"),
        ("exact", "Paris", "Rome", "another answer"),
        ("numeric", GSM, "first 7, then 1200.0", "passed"),
        ("numeric", "0.5", "it is 1/2", "passed"),
        ("numeric", "5", "<answer>5</answer> is what 10 / 2 gives", "passed"),
        ("numeric", "5", "#### 5\nand 6", "passed"),
        ("numeric[mark]", "5", "it is 5", "another form"),
        ("numeric", "5", "#### 6", "another answer"),
        ("numeric", "5", "none", "no answer"),
        ("numeric", "5", "", "no answer"),
        ("numeric", "five", "5", "raised: DataError"),
        ("format", r"\d+\.?", "42.", "passed"),
        ("format", r"\d+", "42 or so", "another form"),
        ("format", "(", "x", "raised: DataError"),
        ("format", TAGS, " <think>a\nb</think>\n<answer>5</answer> ", "passed"),
        *(("format", TAGS, completion, "another form") for completion in BAD_TAGS),
    ],
)
def test_text_grader(verifier: str, answer: str, completion: str, reason: str) -> None:
    grade = one(text_task(verifier, answer), completion)
    assert grade.reason.startswith(reason)
    assert (grade.value, grade.passed) == (float(reason == "passed"), reason == "passed")


@pytest.mark.parametrize(
    "part", ["<answer>", "</answer>", "<answer>1", "####", "1,", "1/", "\\frac{", "1 ", "<answer></"]
)
def test_text_graders_take_linear_time(part: str) -> None:
    began = time.process_time()
    for verifier in ("numeric", "exact"):
        one(text_task(verifier, "5"), part * 20_000)
    assert time.process_time() - began < 2


def test_format_match_slow_pattern_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whorl.evals.grading.structures.PATTERN_SECONDS", 0.05)
    assert one(text_task("format", r"(a+)+[^a]\\b"), "a" * 5000).reason.startswith("timeout")


PROMPT = '''def add(a, b):
    """Adds.

    >>> add(1, 2)
    3
    >>> add(1, "b")
    Traceback (most recent call last):
        ...
    TypeError: unsupported operand type(s) for +: 'int' and 'str'
    """
'''


def code_task(verifier: str, answer: str = "", prompt: str = PROMPT) -> VerifiableTask:
    return VerifiableTask("c", prompt=prompt, verifier=verifier, answer=answer)


@linux
def test_doctest_grader(sandbox: Sandbox) -> None:
    assert one(code_task("doctest"), "    return a + b\n", sandbox) == Grade(1.0, True, "passed")
    assert one(code_task("doctest"), "    return a - b\n", sandbox).reason == "failed: add(1, 2)"
    assert one(code_task("doctest"), "    return 3\n", sandbox).reason == 'failed: add(1, "b")'
    assert one(code_task("doctest"), "    return a +\n", sandbox).reason.startswith("syntax")
    examples = ">>> add(2, 2)  # doctest: +ELLIPSIS\n...4\n>>> print('a\\n\\nb')\na\n<BLANKLINE>\nb\n"
    assert not one(code_task("doctest", examples), "    return 3\n", sandbox).passed
    assert one(code_task("doctest", ">>> add(2, 2)\n4\n"), "    return 4\n", sandbox).passed


CHEATS = [
    "    pass\nimport doctest\ndoctest.OutputChecker.check_output = lambda *a: True\n",
    "    pass\nimport doctest\ndoctest.DocTestRunner.run = doctest.testmod = lambda *a, **k: None\n",
    "    pass\nimport sys\nsys.displayhook = lambda x: print(3)\n",
    "    pass\nimport os\nos._exit(0)\n",
    "    import os; os._exit(0)\n",
    "    class Any:\n        def __eq__(self, other): return True\n    return Any()\n",
    "    raise SystemExit(0)\n",
    "    pass\nadd.__doc__ = None\n",
    "    import doctest\n    class Echo:\n        __repr__ = lambda s: next(answers)\n    return Echo()\n"
    "import doctest\nanswers = (e.want.strip() for e in doctest.DocTestParser().get_examples(add.__doc__))\n",
    "    import sys\n    f, text = sys._getframe(), ''\n    while f:\n        text += str(f.f_locals.get('source', ''))\n"
    "        f = f.f_back\n    if isinstance(b, str): raise TypeError(text.split('TypeError: ')[1].split(chr(10))[0])\n"
    "    return int(text.split('>>> add(1, 2)')[1].split()[0])\n",
]


@linux
def test_doctest_ignores_examples_of_completion(sandbox: Sandbox) -> None:
    task = code_task("doctest", prompt="def f(x):\n")
    grade = one(task, '    """Doc.\n\n    >>> f(1)\n    1\n    """\n    return x\n', sandbox)
    assert not grade.passed and "no example" in grade.reason
    more = '    return 0\n\ndef g():\n    """\n    >>> g()\n    """\n'
    assert not one(code_task("doctest"), more, sandbox).passed


@linux
@pytest.mark.parametrize("cheat", CHEATS)
def test_doctest_rejects_cheat(sandbox: Sandbox, cheat: str) -> None:
    assert not one(code_task("doctest"), cheat, sandbox).passed


def test_docstrings_with_examples_run_empty() -> None:
    source = 'x = 1; y = 2\n"é"\ndef f():\n    "é" """\n    >>> f()\n    1\n    """; z = "é"\n    return z\n'
    blank = without_examples(source)
    assert ">>>" not in blank and blank.count("\n") == source.count("\n") and 'z = "é"' in blank
    compile(blank, "program", "exec")
    assert without_examples("def f(:") == "def f(:"
    kept = 'def f():\r\n    """No example."""\r\n\f'
    assert without_examples(kept) == kept


@linux
def test_doctest_compares_in_the_tests_process(sandbox: Sandbox) -> None:
    examples = ">>> add(1, 2) == 3\nTrue\n>>> [add(1, 2)] == [3], print(add(0, 1) < 2)\nTrue\n(True, None)\n"
    forged = "    class A:\n        __eq__ = __lt__ = lambda s, o: True\n    return A()\n"
    assert one(code_task("doctest", examples), "    return a + b\n", sandbox).passed
    assert one(code_task("doctest", examples), forged, sandbox).reason == "failed: add(1, 2) == 3"
    handed = one(code_task("doctest", ">>> add(map(str, [1]), 2)\n3\n"), "    return 3\n", sandbox)
    assert handed.reason == "unverifiable: the tests hand a map to the program"


@linux
def test_helpers_of_the_prompt_run_apart(sandbox: Sandbox) -> None:
    prompt = "import math\n\ndef half(x):\n    return math.floor(x / 2)\n\ndef double(x):\n"
    forged = "    return 7\n\ndef half(x):\n    return 3\n"
    for verifier, answer in (
        ("unittest", "assert half(double(3)) == 3"),
        ("doctest", ">>> half(double(3))\n3\n"),
    ):
        task = VerifiableTask("t", prompt=prompt, verifier=verifier, answer=answer)
        assert one(task, "    return 2 * x\n", sandbox).passed
        assert not one(task, forged.replace("7", "9"), sandbox).passed


@linux
def test_unittest_grader(sandbox: Sandbox) -> None:
    tests = "import unittest\nclass T(unittest.TestCase):\n    def test_it(self):\n        self.assertEqual(add(1, 2), 3)\n"
    assert one(code_task("unittest", tests), "    return a + b\n", sandbox).passed
    raising = one(code_task("unittest", tests), "    return a + b\nraise ValueError\n", sandbox)
    assert raising.reason.startswith("raised: ValueError")
    assert not raising.failed  # a wrong answer, not a failed verifier
    wrong = one(code_task("unittest", tests), "    return a - b\n", sandbox)
    assert wrong.value == 0 and "AssertionError: -1 != 3" in wrong.reason
    assert one(code_task("unittest"), "    return a\n", sandbox).reason.startswith("raised: DataError")


@linux
def test_errors_do_not_stop_batch(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, function in (("explodes", "raises"), ("nan", "not_a_number")):
        path = f"tests.support.evals.grading_functions:{function}"
        monkeypatch.setitem(GRADERS.entries, name, path)
    tasks = [text_task("explodes"), text_task("nan"), code_task("doctest"), text_task("numeric", "?")]
    tasks += [code_task("unittest", "assert add(1, 1) == 2"), text_task("exact", "a")]
    with Sandbox(ResourceLimits(wall_seconds=2), workers=2) as quick:
        completions = ["", "", "    while True: pass\n", "1", "    return a + b\n", "a"]
        grades = grade_tasks(tasks, completions, quick)
    assert [g.passed for g in grades] == [False, False, False, False, True, True]
    kinds = ["raised", "raised", "time", "raised", "passed", "passed"]
    assert [g.reason.split(":")[0] for g in grades] == kinds
    assert [g.value for g in grades] == [0, 0, 0, 0, 1, 1]
    assert [g.failed for g in grades] == [True, True, False, True, False, False]
    assert grade_tasks([], []) == []


def test_weighted_graders() -> None:
    task = text_task("0.1 format(<answer>) + 0.9 numeric", "5")
    texts = ["<answer>5</answer>", "<answer>6</answer>", "5", "6"]
    grades = grade_tasks([task] * 4, texts)
    assert [g.value for g in grades] == pytest.approx([1.0, 0.1, 0.9, 0.0])
    assert [g.passed for g in grades] == [True, False, False, False]
    assert grades[1].reason == "another answer: numeric" and grades[2].reason == "another form: format"
    assert [(p.weight, p.name, p.answer, p.form) for p in parse_graders("2 exact[mark]")] == [
        (2.0, "exact", None, "mark")
    ]
    assert [p.answer for p in parse_graders(r"format((\d + \d)) + exact")] == [r"(\d + \d)", None]
    for wrong in ("nummeric", "0.1 format + ", "", "0.5", "custom:nothing", "compiles[mark]"):
        with pytest.raises(ConfigError):
            parse_graders(wrong)


def test_grade_tasks_rejects_bad_calls() -> None:
    with pytest.raises(DataError, match="1 tasks with 2"):
        grade_tasks([text_task("exact")], ["a", "b"])
    with pytest.raises(ConfigError, match="doctest runs programs"):
        grade_tasks([code_task("doctest")], ["x"])


def test_custom_graders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    monkeypatch.setattr(custom, "CALL_SECONDS", 0.5)
    module, messages = "custom:tests.support.evals.grading_functions", ({"role": "user", "content": "a?"},)
    chat = VerifiableTask("m", messages=messages, verifier=f"{module}:same", answer="a")
    outcomes = {"length": "passed", "partial": "nearly", "raises": "raised", "not_a_number": "raised"}
    outcomes |= {"hangs": "timeout", "exits": "timeout", "missing": "raised"}
    names = [*outcomes, "length"]
    permit_code(
        *(f"{module.removeprefix('custom:')}:{name}" for name in [*outcomes, "same"]), "no_such_module:f"
    )
    tasks = [chat, *(text_task(f"{module}:{name}") for name in names), text_task("custom:no_such_module:f")]
    grades = grade_tasks(tasks, ["a", *["0123456789"] * len(names), ""])
    kinds = ["passed", *(outcomes[name] for name in names), "raised"]
    assert [g.reason.split(":")[0] for g in grades] == kinds
    assert [g.value for g in grades] == [{"passed": 1.0, "nearly": 0.25}.get(kind, 0) for kind in kinds]
    assert [g.failed for g in grades] == [kind in ("raised", "timeout") for kind in kinds]
    weighed = text_task(f"0.5 {module}:length + 0.5 exact", "x")
    assert grade_tasks([weighed], ["0123456789"])[0].value == 0.5
    hidden = grade_tasks([text_task(f"exact + {module}:raises", "x")], ["y"])[0]
    assert hidden.failed and hidden.reason == "raised: ValueError: no"  # the error takes precedence


@linux
def test_hanging_grader_dies_with_killed_worker(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = f"""
import os
from whorl.evals.grading import VerifiableTask, grade_tasks
verifier = "custom:tests.support.evals.grading_functions:writes_pid_and_hangs"
os.environ["WHORL_CODE"] = verifier.removeprefix("custom:")
grade_tasks([VerifiableTask("a", "?", verifier=verifier, answer={str(pid_file)!r})], ["x"])
"""
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as worker:
        try:
            wait_until(lambda: pid_file.is_file() and pid_file.read_text().endswith("\n"))
        finally:
            worker.kill()
    hanging = int(pid_file.read_text())
    try:
        wait_until(lambda: has_exited(hanging))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(hanging, signal.SIGKILL)
