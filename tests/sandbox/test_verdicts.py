"""What passes and what does not; programs that would pass without being right."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from whorl.sandbox import ExampleOutput, Program, ResourceLimits, Sandbox

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="confinement is Linux's")

ASSERTS = "assert add(1, 2) == 3"
FUNCTION = "def test_sum():\n    assert add(1, 2) == 3\n    assert len([add(1, 1)]) == 1"
CASE = """
import unittest
from program import add
class Sums(unittest.TestCase):
    def test_small(self):
        self.assertEqual(add(1, 2), 3)
    def test_large(self):
        self.assertEqual(add(10, 20), 30)
"""
RIGHT = "def add(a, b):\n    return a + b\n"
WRONG = "def add(a, b):\n    return a - b\n"


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(ResourceLimits(wall_seconds=20, cpu_seconds=20), workers=1) as sandbox:
        yield sandbox


@pytest.mark.parametrize("tests", [ASSERTS, FUNCTION, CASE])
def test_right_passes_and_wrong_fails(sandbox: Sandbox, tests: str) -> None:
    assert sandbox.run(Program(RIGHT, tests)).reason == "passed"
    wrong = sandbox.run(Program(WRONG, tests))
    assert not wrong.ok and wrong.kind == "failed"
    assert sandbox.run(Program("", tests)).kind == "failed"


CHEATS = {
    "leaves with success": "import os; os._exit(0)",
    "leaves with success, later": WRONG.replace("return a - b", "import os; os._exit(0)"),
    "exits": "import sys; sys.exit(0)",
    "exits later": WRONG.replace("return a - b", "raise SystemExit(0)"),
    "kills itself": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "asserts nothing": WRONG + "import unittest\nunittest.TestCase.assertEqual = lambda *a, **k: None",
    "asserts nothing, later": WRONG.replace(
        "return", "import unittest; unittest.TestCase.assertEqual = print; return"
    ),
    "changes the code": WRONG
    + "import unittest\ndef f(self, first, second, msg=None): pass\nunittest.TestCase.assertEqual.__code__ = f.__code__",
    "fails quietly": WRONG
    + "import unittest\nunittest.TestCase.failureException = type('E', (Exception,), {})",
    "runs nothing": WRONG
    + "import unittest\nunittest.TestCase.run = lambda self, result=None: result.startTest(self)",
    "finds nothing": WRONG
    + "import unittest\nunittest.TestSuite.run = unittest.TestLoader.loadTestsFromTestCase = print",
    "is always well": WRONG
    + "import unittest\nunittest.TestResult.addFailure = unittest.TestResult.addError = print",
    "another unittest": WRONG
    + "import sys, types\nm = types.ModuleType('unittest')\nm.TestCase = object\nsys.modules['unittest'] = m",
    "skips": WRONG.replace("return a - b", "import unittest; raise unittest.SkipTest"),
    "another builtin": "import builtins\n"
    + WRONG
    + "builtins.AssertionError = type('A', (Exception,), {})\nbuiltins.len = None",
    "hides a builtin": WRONG + "len = lambda x: 1\nAssertionError = SystemExit",
    "writes everywhere": WRONG
    + 'import os\nfor n in range(1, 1024):\n    try: os.write(n, b\'{"reason": "passed", "example_outputs": []}\')\n'
    "    except OSError: pass",
    "claims it in print": WRONG + "print('passed'); print('{\"reason\": \"passed\"}')",
    "traces": WRONG
    + "import sys\nsys.settrace(lambda *a: sys.exit(0))\nsys.setprofile(lambda *a: sys.exit(0))",
    "interrupts": WRONG
    + "import signal, os\nsignal.signal(14, lambda *a: os._exit(0))\nsignal.setitimer(signal.ITIMER_REAL, 1e-3)",
    "leaves at the end": WRONG + "import atexit, os\natexit.register(os._exit, 0)",
    "leaves when collected": WRONG
    + "import os\nclass A:\n    def __del__(self): os._exit(0)\na = A(); a.a = a",
    "spies on write": WRONG
    + 'import os\nw = os.write\nos.write = lambda n, b: w(n, b[:16] + b\'{"reason": "passed", "example_outputs": []}\') and len(b)',
    "spies on read": WRONG + "import os\nos.read = lambda n, k: b''",
    "reports in our name": 'import json\njson.dumps = lambda x: \'{"reason": "passed", "example_outputs": []}\'\n'
    + WRONG,
    "reports in our name, below": "import json\n"
    + 'json.JSONEncoder.encode = lambda s, x: \'{"reason": "passed", "example_outputs": []}\'\n'
    + WRONG,
    "reports in our name, later": WRONG.replace(
        "return",
        'import json; json.dumps = lambda x: \'{"reason": "passed", "example_outputs": []}\'; return',
    ),
    "blinds the look, later": WRONG.replace(
        "return",
        "import builtins as b, unittest as u; u.TestCase.assertEqual = print; "
        "b.zip = b.vars = b.len = b.getattr = print; return",
    ),
    "no depth": WRONG + "import sys\nsys.setrecursionlimit(5 + len(__import__('inspect').stack()))",
    "hooks imports": WRONG
    + "import sys\nclass F:\n    def find_spec(self, *a): raise SystemExit(0)\nsys.meta_path.insert(0, F())",
    "reads our frames": WRONG
    + "import sys\nf = sys._getframe()\nwhile f:\n    f.f_locals.update(reason='passed'); f = f.f_back",
    "its own tests": WRONG
    + "import unittest\nclass T(unittest.TestCase):\n    def test_small(self): pass\ndef test_sum(): pass",
}


@pytest.mark.parametrize("how", CHEATS)
def test_a_pass_is_not_to_be_had_by_cheating(sandbox: Sandbox, how: str) -> None:
    for tests in (ASSERTS, FUNCTION, CASE):
        outcome = sandbox.run(Program(CHEATS[how], tests))
        assert not outcome.ok, (how, tests, outcome)
        assert outcome.kind != "passed"


@pytest.mark.parametrize(
    "how", ["asserts nothing", "another unittest", "another builtin", "hides a builtin", "no depth"]
)
def test_what_is_right_passes_in_spite_of_it(sandbox: Sandbox, how: str) -> None:
    """The tests do not fail because they were tampered with: the library was put back."""
    assert sandbox.run(Program(CHEATS[how].replace(WRONG, RIGHT), CASE)).reason == "passed"


def test_leaving_without_tests_is_no_success_either(sandbox: Sandbox) -> None:
    for source in ("import os; os._exit(0)", "import sys; sys.exit()", "exit()"):
        assert not sandbox.run(source).ok


def test_the_tests_are_not_there_when_the_program_begins(sandbox: Sandbox) -> None:
    spy = (
        "import gc\ndef shown(o):\n    try: return repr(o) if type(o) in (dict, list, tuple) else ''\n"
        "    except BaseException: return ''\n"
        "found = [t for t in map(shown, gc.get_objects()) if ' '.join(['open', 'sesame']) in t]\n"
    )
    outcome = sandbox.run(Program(spy + "print(len(found))", "said = ['open sesame']\nassert True"))
    assert outcome.ok and outcome.output == "0\n", outcome


def test_examples_print_and_are_not_judged_here(sandbox: Sandbox) -> None:
    source = RIGHT + "print('not theirs')"
    outcome = sandbox.run(
        Program(source, examples=("add(1, 2)", "print('a')\n", "add(1, 'b')", "x = 5", "x", "None"))
    )
    assert outcome.ok and outcome.output == "not theirs\n"
    error = "TypeError: unsupported operand type(s) for +: 'int' and 'str'"
    expected = (
        ExampleOutput("3\n"),
        ExampleOutput("a\n"),
        ExampleOutput("", error),
        ExampleOutput(""),
        ExampleOutput("5\n"),
        ExampleOutput(""),
    )
    assert outcome.example_outputs == expected


def test_an_example_cannot_leave(sandbox: Sandbox) -> None:
    outcome = sandbox.run(Program("def f(): raise SystemExit(0)", examples=("f()", "1")))
    assert outcome.example_outputs == (ExampleOutput("", "SystemExit: 0"), ExampleOutput("1\n"))
    assert not sandbox.run(Program("import os\ndef f(): os._exit(0)", examples=("f()",))).ok


def test_the_same_program_gets_the_same_verdict(sandbox: Sandbox) -> None:
    chance = "import random\nprint(random.random(), hash('a'), list({'a', 'b', 'c'}))"
    with Sandbox(workers=1) as other:
        assert sandbox.run(chance).output == sandbox.run(chance).output == other.run(chance).output != ""


def test_a_program_may_use_the_library(sandbox: Sandbox) -> None:
    names = "abc bisect collections dataclasses datetime decimal enum fractions functools heapq itertools json math random"
    names += " re statistics string tempfile textwrap typing hashlib zlib csv zoneinfo ipaddress graphlib cmath email sched"
    outcome = sandbox.run(
        "\n".join(f"import {n}" for n in names.split()) + "\nprint(hashlib.sha256(b'a').hexdigest()[:4])"
    )
    assert outcome.ok and outcome.output == "ca97\n", outcome
    inside = (
        "import tempfile\nwith tempfile.TemporaryFile() as f: f.write(b'x')\nprint(__name__, input.__name__)"
    )
    assert sandbox.run(inside).output == "__main__ input\n"
    assert sandbox.run("input()").reason.startswith("raised: EOFError")
