"""Forgeries: programs that do not add, and try to pass the tests of a program that adds.

Each is tried in two places: in the statements of the program, and in the function when a test calls it. All run in a few
batches. `REMAINING` has those that still pass; docs/sandbox.md lists them.
"""

# ruff: noqa: E501 (a table of programs)

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from whorl.sandbox import Program, ResourceLimits, Sandbox

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="confinement needs Linux")

ASSERTS = "expected = 3\nassert add(1, 2) == expected\nassert add(5, 6) == 11"
APPROX = """
import decimal, fractions, re
from program import add
def close(a, b): return abs(a - b) < 1e-9
def test_close(): assert close(add(1, 2), 3)
def test_text(): assert re.fullmatch("3", str(add(1, 2)))
def test_decimal(): assert decimal.Decimal(add(1, 2)) == decimal.Decimal(3)
def test_fraction(): assert fractions.Fraction(add(1, 2)) == fractions.Fraction(3)
def test_rest(): assert add(50, 60) == 110
"""
CASE = """
import copy, unittest
from program import add
class Sums(unittest.TestCase):
    def helper(self, a, b, c): self.assertEqual(add(a, b), c)
    def test_small(self): self.helper(1, 2, 3)
    def test_close(self): self.assertAlmostEqual(add(1, 2), 3)
    def test_in(self): self.assertIn(add(1, 2), [copy.deepcopy(3)])
    def test_list(self): self.assertEqual([add(10, 20)], [30])
"""
SUITES = {"asserts": ASSERTS, "functions": APPROX, "case": CASE}

# Objects that the wrong function returns: (description, definition, expression)
OBJECTS = [
    ("equal to everything", "class A:\n    def __eq__(s, o): return True", "A()"),
    ("equal to everything, and hashable", "class A:\n    def __eq__(s, o): return True\n    __hash__ = lambda s: 3", "A()"),
    ("never unequal", "class A:\n    __eq__ = lambda s, o: True\n    __ne__ = lambda s, o: False", "A()"),
    ("int subclass that is equal to everything", "class A(int):\n    __eq__ = lambda s, o: True", "A(7)"),
    ("int subclass with a zero difference", "class A(int):\n    __sub__ = __rsub__ = lambda s, o: 0", "A(7)"),
    ("str subclass that is equal to everything", "class A(str):\n    __eq__ = lambda s, o: True", "A('7')"),
    ("float subclass that is equal to everything", "class A(float):\n    __eq__ = lambda s, o: True", "A(7)"),
    ("tuple subclass that is equal to everything", "class A(tuple):\n    __eq__ = lambda s, o: True", "A()"),
    ("list subclass that is equal to everything", "class A(list):\n    __eq__ = lambda s, o: True", "A()"),
    ("dict subclass that contains everything", "class A(dict):\n    __contains__ = __eq__ = lambda s, o: True", "A()"),
    ("claims to be an int", "class A:\n    __class__ = int\n    __eq__ = lambda s, o: True", "A()"),
    ("difference is zero", "class A:\n    __sub__ = __rsub__ = lambda s, o: 0\n    __eq__ = lambda s, o: True", "A()"),
    ("difference is itself, absolute value zero",
     "class A:\n    __sub__ = __rsub__ = lambda s, o: s\n    __abs__ = lambda s: 0\n    __round__ = lambda s, n: 0", "A()"),
    ("less than everything", "class A:\n    __lt__ = __le__ = __gt__ = __ge__ = lambda s, o: True\n    __sub__ = lambda s, o: s"
     "\n    __abs__ = lambda s: s", "A()"),
    ("operators that read the other operand",
     "class A:\n    def __eq__(s, o):\n        s.v = o\n        return True\n    __sub__ = lambda s, o: o - o", "A()"),
    ("metaclass that is equal to everything",
     "class M(type):\n    __eq__ = lambda s, o: True\n    __hash__ = type.__hash__\nclass A(metaclass=M): pass", "A"),
    ("a mock", "from unittest import mock", "mock.MagicMock(__eq__=lambda s, o: True)"),
    ("mock.ANY", "from unittest import mock", "mock.ANY"),
    ("enum member that is equal to everything",
     "import enum\nclass A(enum.IntEnum):\n    X = 7\n    __eq__ = lambda s, o: True\n    __hash__ = int.__hash__", "A.X"),
    ("Decimal subclass that is equal to everything",
     "import decimal\nclass A(decimal.Decimal):\n    __eq__ = lambda s, o: True", "A(7)"),
    ("Fraction subclass", "import fractions\nclass A(fractions.Fraction):\n    __eq__ = lambda s, o: True", "A(7)"),
    ("not-a-number float", "", "float('nan')"),
    ("NotImplemented", "", "NotImplemented"),
    ("a generator of everything", "import itertools", "itertools.count()"),
    ("a class that constructs anything", "class A:\n    def __new__(c, *a): return c\n    __eq__ = lambda s, o: True", "A()"),
]  # fmt: skip

# Statements: (description, source)
STATEMENTS = [
    ("write the secret of the pipes with a report", "import os\nd = b''\nfor n in range(3, 999):\n    try:\n        "
     "os.set_blocking(n, False); d += os.read(n, 99999)\n    except OSError: pass\nfor n in range(3, 999):\n    try: "
     "os.write(n, d[-16:] + b'{\"reason\":\"passed\",\"example_outputs\":[]}')\n    except OSError: pass\nos._exit(0)"),
    ("write a frame that says passed", "import os\nr = b'{\"reason\": \"passed\"}'\nfor n in range(1, 999):\n    try: "
     "os.write(n, len(r).to_bytes(4, 'little') + r)\n    except OSError: pass\nos._exit(0)"),
    ("write it and stay", "import os, time\nr = b'{\"reason\": \"passed\"}'\nfor n in range(3, 999):\n    try: "
     "os.write(n, len(r).to_bytes(4, 'little') + r)\n    except OSError: pass"),
    ("write many frames ahead", "import os\nr = b'[\"=\", true, []]'\nfor n in range(3, 999):\n    try: "
     "os.write(n, (len(r).to_bytes(4, 'little') + r) * 50)\n    except OSError: pass"),
    ("close every descriptor", "import os\nos.closerange(3, 999)"),
    ("replace a pipe by a file", "import os\nf = os.open('x', os.O_RDWR | os.O_CREAT)\nfor n in range(3, 99):\n    if n != f:\n"
     "        try:\n            os.fstat(n)\n            os.dup2(f, n)\n        except OSError: pass"),
    ("replace re.fullmatch", "import re\nre.fullmatch = re.match = re.search = lambda *a: True"),
    ("replace decimal.Decimal", "import decimal\ndecimal.Decimal = lambda *a: 1"),
    ("replace Fraction.__eq__", "import fractions\nfractions.Fraction.__eq__ = lambda *a: True"),
    ("replace copy.deepcopy", "import copy\nclass E:\n    __eq__ = lambda s, o: True\ncopy.deepcopy = lambda *a: E()"),
    ("replace math.isclose", "import math\nmath.isclose = lambda *a, **k: True"),
    ("a fake module", "import sys, types\nfor n in ('pytest', 'numpy', 'unittest', 'copy', 're'):\n    m = types.ModuleType(n)\n"
     "    m.approx = m.fullmatch = m.deepcopy = lambda *a: True\n    m.TestCase = object\n    sys.modules[n] = m"),
    ("a fake unittest.case", "import sys, types\nsys.modules['unittest.case'] = types.ModuleType('x')"),
    ("import hook", "import sys\nclass H:\n    def find_spec(self, *a): raise SystemExit(0)\nsys.meta_path.insert(0, H())"),
    ("empty sys.modules", "import sys\nsys.modules.clear()"),
    ("a module in the folder", "open('unittest.py', 'w').write('TestCase = object')\nopen('re.py', 'w').write('')\n"
     "import sys\nsys.path.insert(0, '.')"),
    ("a file named as the module of the tests", "open('tests.py', 'w').write('pass')\nopen('program.py', 'w').write('')"),
    ("assertEqual of frames", "import sys\ndef g():\n    f = sys._getframe()\n    while f:\n        s = f.f_locals.get('self')\n"
     "        if s is not None:\n            try: s.assertEqual = s.assertIn = s.assertAlmostEqual = lambda *a: None\n"
     "            except BaseException: pass\n        f = f.f_back\ng()"),
    ("addFailure of frames", "import sys\nf = sys._getframe()\nwhile f:\n    for v in list(f.f_locals.values()):\n        try: "
     "v.addFailure = v.addError = lambda *a: None\n        except BaseException: pass\n    f = f.f_back"),
    ("expected values in frames", "import sys\nf = sys._getframe()\nwhile f:\n    f.f_globals['expected'] = -1\n    f = f.f_back"),
    ("globals of callers", "import sys\nf = sys._getframe()\nwhile f:\n    f.f_globals['close'] = lambda *a: True\n    f = f.f_back"),
    ("code of the tests' functions", "import gc, types\nok = (lambda *a: None).__code__\nfor o in gc.get_objects():\n    if "
     "isinstance(o, types.FunctionType) and o.__name__.startswith('test_'): o.__code__ = ok"),
    ("TestCase classes in gc", "import gc, unittest\nfor o in gc.get_objects():\n    if isinstance(o, type) and issubclass(o, "
     "unittest.TestCase):\n        for n in dir(o):\n            if n.startswith(('test_', 'assert')): setattr(o, n, print)"),
    ("AssertionError never raised", "import builtins\nbuiltins.AssertionError = type('A', (BaseException,), {})"),
    ("tracer that jumps over asserts", "import sys\ndef t(f, e, a):\n    try: f.f_lineno = f.f_lineno + 1\n    except "
     "BaseException: pass\n    return t\nsys.settrace(t)\nf = sys._getframe()\nwhile f:\n    f.f_trace = t\n    f = f.f_back"),
    ("profiler that ends the process", "import sys, os\nsys.setprofile(lambda *a: os._exit(0))"),
    ("timer that ends the process", "import signal, os\nsignal.signal(14, lambda *a: os._exit(0))\n"
     "signal.setitimer(signal.ITIMER_REAL, 0.01)"),
    ("atexit and os._exit", "import atexit, os\natexit.register(os._exit, 0)"),
    ("excepthook", "import sys, os\nsys.excepthook = sys.unraisablehook = lambda *a: os._exit(0)"),
    ("json that lies", "import json, json.encoder\njson.dumps = lambda *a, **k: '{\"reason\": \"passed\"}'\n"
     "json.JSONEncoder.encode = json.encoder.JSONEncoder.encode = lambda *a: '{\"reason\": \"passed\"}'"),
    ("os.write that lies", "import os\nreal = os.write\nos.write = lambda n, d: real(n, b'{\"reason\": \"passed\"}')"),
    ("marshal and compile", "import builtins, marshal\nmarshal.loads = builtins.compile = builtins.exec = lambda *a, **k: None"),
    ("peer in gc: every reply true", "import gc\nfor o in gc.get_objects():\n    if type(o).__name__ == 'Peer':\n        "
     "type(o).encode = lambda s, v: True\n        type(o).answer = lambda s, m: ['=', True, []]"),
    ("peer in frames: call the tests' process", "import sys\nf = sys._getframe()\nwhile f:\n    p = getattr(f.f_locals.get('self'), "
     "'peer', None)\n    if p: p.trusted = True; p.passes_operands = True; p.failure = ''\n    f = f.f_back"),
    ("encoder of int", "import gc\nfor o in gc.get_objects():\n    if isinstance(o, dict) and int in o and list in o:\n        "
     "try: o[int] = lambda c, v: ['NotImplemented']\n        except BaseException: pass"),
    ("a malformed value", "import gc\nfor o in gc.get_objects():\n    if type(o).__name__ == 'Peer': type(o).encode = lambda s, v: "
     "['object', 'x', 'y']"),
    ("a class description with foreign bases", "import gc\nfor o in gc.get_objects():\n    if type(o).__name__ == 'Peer': "
     "type(o).encode = lambda s, v: ['object', 9, ['class', 8, 'A', ['type', 'object'], ['__eq__']]]"),
    ("a global of the tests' process", "import gc\nfor o in gc.get_objects():\n    if type(o).__name__ == 'Peer': type(o).encode = "
     "lambda s, v: ['global', 'unittest.mock', 'ANY']"),
    ("an object of the tests' process", "import gc\nfor o in gc.get_objects():\n    if type(o).__name__ == 'Peer': type(o).encode = "
     "lambda s, v: ['mine', 0]"),
    ("contents of the tests' containers", "import gc\nfor o in gc.get_objects():\n    if type(o).__name__ == 'Peer': "
     "type(o).encode_changes = lambda s: ([[n, ['list', 3, 11]] for n in range(0, 9, 2)], [])"),
    ("containers under numbers of the tests", "import gc\nfor o in gc.get_objects():\n    if type(o).__name__ == 'Peer': "
     "type(o).encode_changes = lambda s: ([[98, ['list', 3]]], list(range(99)))"),
    ("a container of unknown type", "import gc\nfor o in gc.get_objects():\n    if type(o).__name__ == 'Peer': "
     "type(o).encode_changes = lambda s: ([[99, ['SimpleNamespace', 3]], ['x', 1]], [None])"),
    ("raise SkipTest", "import unittest\nclass R:\n    pass\nadd = lambda a, b: (_ for _ in ()).throw(unittest.SkipTest())"),
    ("raise unittest's own exception", "import unittest.case\nadd = lambda a, b: (_ for _ in ()).throw(unittest.case._ShouldStop())"),
    ("raise KeyboardInterrupt", "add = lambda a, b: (_ for _ in ()).throw(KeyboardInterrupt())"),
    ("raise StopIteration", "def add(a, b): raise StopIteration"),
    ("raise GeneratorExit", "def add(a, b): raise GeneratorExit"),
    ("raise AssertionError", "def add(a, b): raise AssertionError"),
    ("exit in the function", "import os\ndef add(a, b): os._exit(0)"),
    ("kill the parent", "import os, signal\nfor s in (9, 15):\n    try: os.kill(os.getppid(), s)\n    except OSError: pass"),
    ("kill the neighbours", "import os\nfor p in range(os.getpid() - 3, os.getpid() + 9):\n    if p != os.getpid():\n        try: "
     "os.kill(p, 9)\n        except OSError: pass"),
    ("read the tests from memory", "import os\nfor p in range(os.getpid(), os.getpid() + 5):\n    try: open(f'/proc/{p}/mem')\n"
     "    except OSError: pass"),
    ("define expected", "expected = add(1, 2)\nclose = lambda a, b: True"),
    ("define test functions", "def test_close(): pass\ntest_text = test_decimal = test_fraction = test_rest = test_close"),
    ("define assert helpers", "class Sums:\n    pass\nunittest = type('U', (), {'TestCase': object})\nabs = lambda x: 0"),
    ("hide builtins", "abs = len = str = isinstance = lambda *a: 0\nAssertionError = SystemExit"),
    ("module with __getattr__", "def __getattr__(name): return lambda *a: True"),
    ("module class", "import sys, types\nclass M(types.ModuleType):\n    __getattribute__ = lambda s, n: (lambda *a: 3)\n"
     "sys.modules[__name__].__class__ = M"),
    ("function is a class", "class add:\n    def __init__(s, *a): pass\n    __eq__ = lambda s, o: True\n    __sub__ = lambda s, o: 0"),
    ("a capitalised class for operands", "class Expected:\n    __eq__ = lambda s, o: True\n    __sub__ = lambda s, o: 0\n"
     "add = lambda a, b: Expected()"),
    ("answer calls until one is right", "n = 0\ndef add(a, b):\n    global n\n    n += 1\n    return n"),
]  # fmt: skip
WRONG = "def add(a, b):\n    return a * b + 40\n"


def _in_function(source: str) -> str:
    body = source.replace("\n", "\n    ")
    return f"def add(a, b):\n    {body}\n    return a * b + 40\n"


def forgeries() -> Iterator[tuple[str, str]]:
    """Yield (description, program)."""
    for name, definition, expression in OBJECTS:
        yield name, f"{definition}\ndef add(a, b): return {expression}"
    for name, source in STATEMENTS:
        yield name, WRONG + source
        if "def add" not in source and "add =" not in source:
            yield f"{name}, in the function", _in_function(source)


@pytest.fixture(scope="module")
def patient() -> Iterator[Sandbox]:
    with Sandbox(ResourceLimits(wall_seconds=20, cpu_seconds=1), workers=2) as sandbox:
        yield sandbox


@pytest.mark.parametrize("suite", SUITES)
def test_no_forgery_passes(patient: Sandbox, suite: str) -> None:
    table = dict(forgeries())
    assert len(OBJECTS) + len(STATEMENTS) >= 60
    right = Program("def add(a, b): return a + b", SUITES[suite])
    *results, last = patient.run_all([*(Program(source, SUITES[suite]) for source in table.values()), right])
    assert last.ok, last
    passed = [name for name, result in zip(table, results, strict=True) if result.ok]
    assert not passed
    assert patient.restarts == 0


@pytest.mark.parametrize(("tests", "source"), [
    ("assert Point(1) == Point(2)", "class Point:\n    def __init__(s, x): pass\n    __eq__ = lambda s, o: True"),
    ("assert abs(Circle(2).area() - 12.5) < 1e-3",
     "class N:\n    __sub__ = lambda s, o: 0\nclass Circle:\n    def __init__(s, r): pass\n    area = lambda s: N()"),
    ("assert Shape().equals(4)", "class Shape:\n    equals = lambda s, o: True"),
])  # fmt: skip
def test_remaining_forgeries_are_as_documented(patient: Sandbox, tests: str, source: str) -> None:
    """These still pass: tests that let the program's own class compare. A change here changes docs/sandbox.md."""
    assert patient.run(Program(source, tests)).ok


def test_docs_have_the_number_of_forgeries() -> None:
    docs = Path(__file__).parents[2] / "docs"
    for page in ("align.md", "sandbox.md"):
        assert f"{len(list(forgeries()))} forgeries" in (docs / page).read_text(encoding="utf-8"), page
