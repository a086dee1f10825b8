"""Verdicts of right and wrong programs, and of programs that cheat."""

from __future__ import annotations

import sys
import textwrap

import pytest

from whorl.sandbox import ExampleOutput, Program, Sandbox

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="confinement needs Linux")

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
FORGED = '{"reason": "passed", "example_outputs": []}'


@pytest.mark.parametrize("tests", [ASSERTS, FUNCTION, CASE])
def test_right_program_passes_and_wrong_fails(sandbox: Sandbox, tests: str) -> None:
    assert sandbox.run(Program(RIGHT, tests)).reason == "passed"
    wrong = sandbox.run(Program(WRONG, tests))
    assert not wrong.ok and wrong.kind == "failed"
    assert sandbox.run(Program("", tests)).kind == "failed"


ALONE = {
    "os._exit": "import os; os._exit(0)",
    "sys.exit": "import sys; sys.exit(0)",
    "kill self": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
}
APPENDED = {  # to a wrong program
    "patch assertEqual": "import unittest\nunittest.TestCase.assertEqual = lambda *a, **k: None",
    "patch __code__": "import unittest\ndef f(self, first, second, msg=None): pass\n"
    "unittest.TestCase.assertEqual.__code__ = f.__code__",
    "patch failureException": "import unittest\nunittest.TestCase.failureException = type('E', (Exception,), {})",
    "patch TestCase.run": "import unittest\nunittest.TestCase.run = lambda self, result=None: result.startTest(self)",
    "patch TestSuite.run": "import unittest\n"
    "unittest.TestSuite.run = unittest.TestLoader.loadTestsFromTestCase = print",
    "patch TestResult": "import unittest\nunittest.TestResult.addFailure = unittest.TestResult.addError = print",
    "replace unittest": "import sys, types\nm = types.ModuleType('unittest')\nm.TestCase = object\n"
    "sys.modules['unittest'] = m",
    "replace builtins": "import builtins\nbuiltins.AssertionError = type('A', (Exception,), {})\nbuiltins.len = None",
    "shadow builtins": "len = lambda x: 1\nAssertionError = SystemExit",
    "write to every descriptor": f"import os\nfor n in range(1, 1024):\n    try: os.write(n, b'{FORGED}')\n"
    "    except OSError: pass",
    "print the report": "print('passed'); print('{\"reason\": \"passed\"}')",
    "settrace": "import sys\nsys.settrace(lambda *a: sys.exit(0))\nsys.setprofile(lambda *a: sys.exit(0))",
    "timer signal": "import signal, os\nsignal.signal(14, lambda *a: os._exit(0))\n"
    "signal.setitimer(signal.ITIMER_REAL, 1e-3)",
    "atexit": "import atexit, os\natexit.register(os._exit, 0)",
    "__del__": "import os\nclass A:\n    def __del__(self): os._exit(0)\na = A(); a.a = a",
    "patch os.write": "import os\nw = os.write\n"
    f"os.write = lambda n, b: w(n, b[:16] + b'{FORGED}') and len(b)",
    "patch os.read": "import os\nos.read = lambda n, k: b''",
    "patch json.dumps": f"import json\njson.dumps = lambda x: '{FORGED}'",
    "patch JSONEncoder": f"import json\njson.JSONEncoder.encode = lambda s, x: '{FORGED}'",
    "recursion limit": "import sys\nsys.setrecursionlimit(5 + len(__import__('inspect').stack()))",
    "import hook": "import sys\nclass F:\n    def find_spec(self, *a): raise SystemExit(0)\nsys.meta_path.insert(0, F())",
    "frame locals": "import sys\nf = sys._getframe()\nwhile f:\n    f.f_locals.update(reason='passed'); f = f.f_back",
    "own tests": "import unittest\nclass T(unittest.TestCase):\n    def test_small(self): pass\ndef test_sum(): pass",
}
INSIDE = {  # the wrong function
    "os._exit": "import os; os._exit(0)",
    "SystemExit": "raise SystemExit(0)",
    "SkipTest": "import unittest; raise unittest.SkipTest",
    "patch assertEqual": "import unittest; unittest.TestCase.assertEqual = print",
    "patch json.dumps": f"import json; json.dumps = lambda x: '{FORGED}'",
    "patch builtins": "import builtins as b, unittest as u; u.TestCase.assertEqual = print; "
    "b.zip = b.vars = b.len = b.getattr = print",
}
CHEATS = ALONE | {name: WRONG + source for name, source in APPENDED.items()}
CHEATS |= {f"{name} in function": WRONG.replace("return", f"{body}; return") for name, body in INSIDE.items()}


@pytest.mark.parametrize("cheat", CHEATS)
def test_cheating_program_fails(sandbox: Sandbox, cheat: str) -> None:
    for tests in (ASSERTS, FUNCTION, CASE):
        result = sandbox.run(Program(CHEATS[cheat], tests))
        assert not result.ok, (cheat, tests, result)
        assert result.kind != "passed"


@pytest.mark.parametrize(
    "cheat",
    ["patch assertEqual", "replace unittest", "replace builtins", "shadow builtins", "recursion limit"],
)
def test_right_program_passes_despite_tampering(sandbox: Sandbox, cheat: str) -> None:
    """The library is restored before the tests run."""
    assert sandbox.run(Program(CHEATS[cheat].replace(WRONG, RIGHT), CASE)).reason == "passed"


UNCHECKED = {  # tests that a wrong program passed because they did not run
    "pytest class": "class TestF:\n    def test_a(self): assert add(1, 2) == 3",
    "mock.patch": "from unittest import mock\n@mock.patch('os.getcwd')\ndef test_a(f): assert add(1, 2) == 3",
    "functools.cache": "import functools\n@functools.cache\ndef test_a(): assert add(1, 2) == 3",
    "partial": "import functools\ndef check(n): assert add(1, 2) == n\ntest_a = functools.partial(check, 3)",
    "contextmanager": "import contextlib\n@contextlib.contextmanager\ndef test_a():\n    assert add(1, 2) == 3\n    yield",
    "coroutine": "async def test_a(): assert add(1, 2) == 3",
    "generator": "def test_a():\n    yield\n    assert add(1, 2) == 3",
    "swallowed": "def test_a():\n    try: assert add(1, 2) == 3\n    except: pass",
    "true in a handler": "def test_a():\n    try: assert add(1, 2) == 3\n    except: assert True",
    "assertRaises": "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n"
    "        with self.assertRaises(ZeroDivisionError): 1 / (add(1, 2) - 3)",
    "expected error": "def test_a():\n    try:\n        1 / (add(1, 2) - 3)\n        assert False\n"
    "    except ZeroDivisionError: pass",
}
NOTHING = {  # tests that can never check anything
    "uncalled check": "def check(candidate):\n    assert candidate(1, 2) == 3",
    "doctest dictionary": "__test__ = {'a': '>>> add(1, 2)\\n3'}",
    "comment": "# assert add(1, 2) == 3",
    "empty loop": "for case in []:\n    assert add(*case) == 3",
    "expected failure": "import unittest\nclass T(unittest.TestCase):\n    @unittest.expectedFailure\n"
    "    def test_a(self): self.assertEqual(add(1, 2), 3)",
    "returned comparison": "def test_a(): return add(1, 2) == 3\nassert add",
    "lambda": "test_a = lambda: add(1, 2) == 3",
    "early return": "def test_a():\n    return\n    assert add(1, 2) == 3",
    "always true": "assert (add(1, 2) == 3, 'sum')\nassert lambda: add\nassert (add(n, 2) == 3 for n in [1])\nassert [0]",
    "assertTrue of a generator": "import unittest\nclass T(unittest.TestCase):\n"
    "    def test_a(self): self.assertTrue(add(n, 2) == 3 for n in [1])",
    "empty test": "def test_a(): pass\ndef test_b(): assert True",
    "never awaited": "async def check(): assert add(1, 2) == 3\ndef test_a(): check()",
    "empty list": "def test_a():\n    for case in range(0): assert add(case, 2) == case + 2",
    "any error": "def test_a():\n    try:\n        add(1, 2)\n        assert False\n    except Exception: pass",
    "async TestCase": "import unittest\nclass T(unittest.TestCase):\n"
    "    async def test_a(self): self.assertEqual(add(1, 2), 3)",
    "case without assertion": "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): add(1, 2)",
    "needs arguments": "def test_a(fixture): assert add(1, 2) == 3",
    "syntax": "def test_a(: pass",
}


@pytest.mark.parametrize("kind", UNCHECKED)
def test_every_kind_of_test_function_runs(sandbox: Sandbox, kind: str) -> None:
    right = sandbox.run(Program(RIGHT, UNCHECKED[kind]))
    assert right.ok, right
    wrong = sandbox.run(Program(WRONG, UNCHECKED[kind]))
    assert wrong.kind == "failed", wrong


@pytest.mark.parametrize("kind", NOTHING)
def test_tests_that_check_nothing_never_pass(sandbox: Sandbox, kind: str) -> None:
    for source in (RIGHT, WRONG):
        result = sandbox.run(Program(source, NOTHING[kind]))
        assert result.kind == "failed", result


FIXTURES = {  # bodies of a case for `add`: (passes, body)
    "class fixture": (True, "@classmethod\ndef setUpClass(cls): cls.three = 3\n"
                      "def test_a(self): self.assertEqual(add(1, 2), self.three)"),
    "run in order": (True, "n = []\ndef test_b(self): self.assertEqual(self.n, [1])\ndef test_a(self):\n"
                     "    self.n.append(1)\n    self.assertTrue(self.n)"),
    "runTest": (True, "def runTest(self): self.assertEqual(add(1, 2), 3)"),
    "later method": (False, "def test_a(self): pass\ndef test_b(self): self.assertEqual(add(1, 2), 4)"),
    "setUpClass": (False, "@classmethod\ndef setUpClass(cls): assert add(1, 2) == 4\ndef test_a(self): pass"),
    "tearDownClass": (False, "@classmethod\ndef tearDownClass(cls): assert add(1, 2) == 4\ndef test_a(self): pass"),
    "class cleanup": (False, "@classmethod\ndef setUpClass(cls): cls.addClassCleanup(cls().fail)\ndef test_a(self): pass"),
    "setUp": (False, "def setUp(self): self.assertEqual(add(1, 2), 4)\ndef test_a(self): pass"),
    "tearDown": (False, "def tearDown(self): self.assertEqual(add(1, 2), 4)\ndef test_a(self): pass"),
    "cleanup": (False, "def test_a(self): self.addCleanup(self.assertEqual, add(1, 2), 4)"),
    "subtest": (False, "def test_a(self):\n    for n in (3, 4):\n        with self.subTest(): assert add(1, 2) == n"),
    "skipped": (False, "def test_a(self): self.skipTest('later')"),
    "unexpected success": (False, "@unittest.expectedFailure\ndef test_a(self): self.assertEqual(add(1, 2), 3)"),
    "no test": (False, "def other(self): pass"),
    "coroutine": (False, "async def test_a(self): self.assertEqual(add(1, 2), 4)"),
    "generator": (False, "def test_a(self):\n    yield\n    self.assertEqual(add(1, 2), 4)"),
}  # fmt: skip


def test_unittest_fixtures_count(sandbox: Sandbox) -> None:
    head = "import unittest\nclass Sums(unittest.TestCase):\n"
    tests = [head + textwrap.indent(body, "    ") for _, body in FIXTURES.values()]
    results = sandbox.run_all([Program(RIGHT, text) for text in tests])
    kinds = dict(zip(FIXTURES, [r.kind for r in results], strict=True))
    assert kinds == {name: "passed" if passes else "failed" for name, (passes, _) in FIXTURES.items()}


def test_guards_and_assert_calls_count_as_checks(sandbox: Sandbox) -> None:
    for tests in (
        "if add(1, 2) != 3:\n    raise ValueError",
        "import unittest\nunittest.TestCase().assertEqual(add(1, 2), 3)",
        "def check(f):\n    assert f(1, 2) == 3\ncheck(add)",
    ):
        assert sandbox.run(Program(RIGHT, tests)).ok
        assert sandbox.run(Program(WRONG, tests)).kind == "failed"


WRITE_REPORT = """
import os
frame = len(REPORT).to_bytes(4, "little") + REPORT
for n in range(3, 1000):
    try: os.write(n, frame)
    except OSError: pass
os._exit(0)
"""
MALFORMED = ["{'reason':5}", "{'reason':null}", "{}", "[1]", "1", "'x'", "[" * 50_000, "{", "\xff", "{'reason':'other'}",
             "{'reason':['passed']}", "{'passed':'reason'}"]  # fmt: skip


def test_malformed_reports_count_as_crashes(sandbox: Sandbox) -> None:
    """A program that writes its report itself cannot raise in the parent, and no other program is lost."""
    restarts = sandbox.restarts
    reports = [text.replace("'", '"').encode("latin-1") for text in MALFORMED]
    programs = [Program(WRITE_REPORT.replace("REPORT", repr(report)), ASSERTS) for report in reports]
    results = sandbox.run_all([*programs, Program(RIGHT, ASSERTS)])
    assert [r.kind for r in results[:-1]] == ["crashed"] * len(programs), results
    assert results[-1].ok and sandbox.restarts == restarts


def test_report_text_is_valid_unicode(sandbox: Sandbox) -> None:
    result = sandbox.run(Program("def f(): raise ValueError(chr(0xD800))", "f()\nassert True"))
    result.reason.encode()
    printed = sandbox.run(Program("def f(): print(chr(0xD800))", examples=("f()",)))
    assert printed.example_outputs[0].text == "\\ud800\n"


def test_early_exit_without_tests_fails(sandbox: Sandbox) -> None:
    for source in ("import os; os._exit(0)", "import sys; sys.exit()", "exit()"):
        assert not sandbox.run(source).ok


def test_tests_are_not_in_memory_while_program_runs(sandbox: Sandbox) -> None:
    spy = (
        "import gc\ndef shown(o):\n    try: return repr(o) if type(o) in (dict, list, tuple) else ''\n"
        "    except BaseException: return ''\n"
        "found = [t for t in map(shown, gc.get_objects()) if ' '.join(['open', 'sesame']) in t]\n"
    )
    result = sandbox.run(Program(spy + "print(len(found))", "secret = ['open sesame']\nassert secret"))
    assert result.ok and result.output == "0\n", result


def test_examples_report_output_and_exceptions(sandbox: Sandbox) -> None:
    source = RIGHT + "print('not captured')"
    examples = ("add(1, 2)", "print('a')\n", "add(1, 'b')", "x = 5", "x", "None")
    result = sandbox.run(Program(source, examples=examples))
    assert result.ok and result.output == "not captured\n"
    error = "TypeError: unsupported operand type(s) for +: 'int' and 'str'"
    outputs = [("3\n",), ("a\n",), ("", error), ("",), ("5\n",), ("",)]
    assert result.example_outputs == tuple(ExampleOutput(*output) for output in outputs)


def test_example_exit_is_reported(sandbox: Sandbox) -> None:
    result = sandbox.run(Program("def f(): raise SystemExit(0)", examples=("f()", "1")))
    assert result.example_outputs == (ExampleOutput("", "SystemExit: 0"), ExampleOutput("1\n"))
    assert not sandbox.run(Program("import os\ndef f(): os._exit(0)", examples=("f()",))).ok


def test_verdict_is_deterministic(sandbox: Sandbox) -> None:
    chance = "import random\nprint(random.random(), hash('a'), list({'a', 'b', 'c'}))"
    with Sandbox(workers=1) as other:
        assert sandbox.run(chance).output == sandbox.run(chance).output == other.run(chance).output != ""


def test_program_can_import_standard_library(sandbox: Sandbox) -> None:
    names = "abc bisect collections dataclasses datetime decimal enum fractions functools heapq itertools json math random"
    names += " re statistics string tempfile textwrap typing hashlib zlib csv zoneinfo ipaddress graphlib cmath email sched"
    imports = "\n".join(f"import {n}" for n in names.split())
    result = sandbox.run(imports + "\nprint(hashlib.sha256(b'a').hexdigest()[:4])")
    assert result.ok and result.output == "ca97\n", result
    inside = "import tempfile\nwith tempfile.TemporaryFile() as f: f.write(b'x')\n"
    assert sandbox.run(inside + "print(__name__, input.__name__)").output == "__main__ input\n"
    assert sandbox.run("input()").reason.startswith("raised: EOFError")
