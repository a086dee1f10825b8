"""What tests hand to a program, and what a program hands back, forges no verdict: each attack beside an honest program."""

# ruff: noqa: E501 (a table of programs)

from __future__ import annotations

import sys

import pytest

from whorl.sandbox import Program, Sandbox

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="confinement needs Linux")

UNVERIFIABLE = {  # what the tests hand over: (name in the reason, tests of `call`, which calls its first argument)
    "bound method": ("list.append", "seen = []\ncall(seen.append, 1)\nassert seen == [1]"),
    "method of a class": ("method (Log.add)", "class Log:\n    seen = []\n    def add(self, x): self.seen.append(x)\nlog = Log()\ncall(log.add, 1)\nassert log.seen == [1]"),
    "object": ("tests.Log", "class Log:\n    def __call__(self, x): self.seen = x\nlog = Log()\ncall(log, 1)\nassert log.seen == 1"),
    "class": ("type (Log)", "class Log:\n    def __init__(self, x): self.x = x\nassert call(Log, 1).x == 1"),
    "mock": ("Mock", "from unittest import mock\nm = mock.Mock()\ncall(m, 1)\nm.assert_called_once_with(1)"),
    "patched print": ("MagicMock", "from unittest import mock\nwith mock.patch('builtins.print') as p: call(lambda x: x, 1)\nassert p.call_count == 0"),
    "patched name": ("Mock", "from unittest import mock\nwith mock.patch('program.call', return_value=1): assert call(len, []) == 0"),
    "partial": ("functools.partial", "import functools\nassert call(functools.partial(pow, 2), 3) == 8"),
    "map": ("map", "assert list(call(lambda x: x, map(str, [1]))) == ['1']"),
    "generator": ("generator", "assert sum(call(lambda x: x, (i for i in range(3)))) == 3"),
    "open file": ("_io.TextIOWrapper", "with open('a', 'w') as f: call(lambda g: g, f)\nassert True"),
    "attrgetter": ("operator.attrgetter", "import operator\nassert call(operator.attrgetter('real'), 1) == 1"),
    "module": ("module", "import math\nassert call(lambda m: 1, math) == 1"),
    "frame": ("frame", "import sys\nassert call(lambda f: 1, sys._getframe()) == 1"),
    "within a list": ("tests.Log", "class Log: pass\nassert call(len, [[Log()]]) == 1"),
    "result of a callback": ("map", "assert list(call(lambda x: map(str, x), [1])) == ['1']"),
    "derived class": ("derive", "class B(A):\n    pass\nassert B"),
    "cyclic list": ("contains itself", "a = []\na.append(a)\nassert call(len, a) == 1"),
    "stdin of bytes": ("io.StringIO", "import io, sys\nsys.stdin = io.TextIOWrapper(io.BytesIO(b'1'))\nassert call(len, []) == 0"),
    "text": ("execute text", "assert eval(call(lambda x: x, '3')) == 3"),
    "statements": ("execute text", "names = {}\nexec(call(lambda x: x, 'x = 3'), names)\nassert names['x'] == 3"),
    "pickle": ("load a pickle", "import pickle\nassert pickle.loads(call(pickle.dumps, slice(3))) == slice(3)"),
    "annotations": ("execute text", "from typing import get_type_hints\nassert get_type_hints(call) == {'return': object}"),
    "suppressed error": ("suppresses", "with A():\n    assert call(len, 3) == 1\nassert A"),
    "suppressed": ("suppresses", "with A():\n    assert call(len, []) == 1\nassert A"),
    "caught": ("tests.Log", "class Log: pass\ntry: call(len, Log())\nexcept BaseException: pass\nassert True"),
}  # fmt: skip
CALL = "class A:\n    __enter__ = lambda s: s\n    __exit__ = lambda s, *error: True\ndef call(f, x) -> 'object': return f(x)\n"
ANY = "class Any:\n    __eq__ = lambda s, o: True\n    __sub__ = __rsub__ = __abs__ = lambda s, *o: 0\n    __lt__ = lambda s, o: True\n"
FORGE = (
    ANY
    + """
def call(f, x):
    for made in (lambda: type(f)('A', (), vars(Any)), lambda: f.__globals__, lambda: f.__class__, lambda: f.__self__,
                 lambda: f.configure_mock(**{'assert_called_once_with': 1}), lambda: f.__code__.co_consts):
        try: made()
        except Exception: pass
    return Any()
A = Any
"""
)


def test_what_no_program_may_get_is_named(sandbox: Sandbox) -> None:
    programs = [Program(source, tests) for source in (CALL, FORGE) for _, tests in UNVERIFIABLE.values()]
    results = sandbox.run_all(programs)
    names = [name for name, _ in UNVERIFIABLE.values()] * 2
    bad = [
        (name, r)
        for name, r in zip(names, results, strict=True)
        if r.ok or (r.kind == "unverifiable" and name not in r.reason)
    ]
    assert not bad
    honest = dict(zip(UNVERIFIABLE, results, strict=False))
    assert {n: r.kind for n, r in honest.items()} == dict.fromkeys(UNVERIFIABLE, "unverifiable")


RIGHT = "import math\ndef add_log(f): return lambda: f()\ndef add(a, b): return a + b\n"
CASE = "import unittest\nfrom decimal import Decimal\nMETADATA = {}\nclass T(unittest.TestCase):\n    def test_a(self): self.assertAlmostEqual(add(1, 2), 3)"
ATTACKS = {  # (tests, forged programs); RIGHT passes each
    "names that are only mentioned": (CASE, [ANY.replace("Any", n) + f"def add(a, b): return {n}()" for n in ("Decimal", "TestCase", "METADATA", "T", "Other")]),
    "builtins by a star": ("from program import *\nassert abs(add(1, 2) - 3) == 0\nassert len([add(1, 1)]) == 1",
                           ["abs = len = lambda x: 0 if x else 1\ndef add(a, b): return 9"]),
    "module without import": ("assert math.isclose(add(1, 2), 3)\nfrom program import *\nassert math.floor(add(1, 2)) == 3",
                              ["class math:\n    isclose = lambda *a: True\n    floor = lambda x: 3\ndef add(a, b): return 9"]),
    "loop that ends early": ("pairs = [(1, 2), (3, 4)]\nassert all(map(lambda p: add(*p) == sum(p), pairs))\nassert not [p for p in pairs if add(*p) != sum(p)]",
                             [f"{c}def add(a, b): raise {e}" for c, e in (("", "StopIteration"), ("", "StopAsyncIteration"), ("class S(StopIteration): pass\n", "S"))]),
    "handle in place of a value": ("assert add(1, 2) == 3\nassert 3 == add(1, 2)\nassert [add(1, 2)] == [3] and add(1, 2) in (3, 4)\nassert {3: 1}[add(1, 2)]",
                                   [f"{ANY}    __hash__ = lambda s: 3\ndef add(a, b): return Any()",
                                    f"{ANY}class B(int, Any): pass\ndef add(a, b): return B(7)"]),
    "subclasses of values": ("assert type(add(1, 2)) is int and add(1, 2) == 3\nassert isinstance(add('a', 'b'), str) and add('a', 'b') == 'ab'\nassert add(0.5, 0.5) == 1.0",
                             ["".join(f"class {k}X({k}):\n    __eq__ = __sub__ = lambda s, o: True\n    __hash__ = {k}.__hash__\n" for k in ("int", "str", "float"))
                              + "def add(a, b): return {int: intX, str: strX, float: floatX}[type(a)](a)"]),
    "numbers": ("assert add(10**5000, 1) == 10**5000 + 1\nx = add(float('nan'), 0)\nassert x != x\nassert add(0, -1) == -1", ["def add(a, b): return float('nan')"]),
    "errors": ("try: add(1, None)\nexcept TypeError as e: assert type(e) is TypeError\nelse: assert False\nassert add(1, 2) == 3",
               ["class E(AssertionError): pass\ndef add(a, b): raise E", "class E(TypeError):\n    __eq__ = lambda s, o: True\ndef add(a, b): raise E"]),
    "value that contains itself": ("assert add([1], [2]) == [1, 2]", ["def add(a, b):\n    c = []\n    c.append(c)\n    return c", "def add(a, b):\n    c = a\n    for _ in range(100000): c = [c]\n    return c"]),
    "argument that is changed": ("want = [1, 2]\nassert add(want, []) == want\nassert want == [1, 2]", ["def add(a, b):\n    a.clear()\n    return []"]),
    "class-building hook": ("class T:\n    a = 3\nassert add(1, 2) == T.a", ["import builtins\nbuiltins.__build_class__ = lambda *a, **k: Any\ndef add(a, b): return 9",
                            "import threading, sys\nthreading.setprofile(print)\nsys.settrace(lambda *a: sys.exit(0))\ndef add(a, b): return 9"]),
    "decorated test": ("from program import *\n@add_log\ndef test_a(): assert add(1, 2) == 3\ndef test_b(): assert add(2, 2) == 4",
                       ["def add_log(f): return lambda: None\ndef add(a, b): return 4"]),
    "predicate": ("assert str(add('a', 'b')).startswith('ab') and add('a', 'b').endswith('b')",
                  [f"{ANY}    endswith = lambda s, o: True\n    __str__ = lambda s: 'ab'\ndef add(a, b): return Any()"]),
    "printed verdict": ("import io, contextlib\nwith contextlib.redirect_stdout(io.StringIO()) as out: add(1, 2)\nassert out.getvalue() == '' and add(1, 2) == 3",
                        ["print('passed')\ndef add(a, b): print('{\"reason\": \"passed\"}')"]),
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
def test_forged_programs_fail_and_right_ones_pass(sandbox: Sandbox, attack: str) -> None:
    tests, forged = ATTACKS[attack]
    right, *results = sandbox.run_all([Program(source, tests) for source in (RIGHT, *forged)])
    assert right.ok, right
    assert [r.kind for r in results] == ["failed"] * len(forged), results


def test_program_draws_other_numbers_than_tests(sandbox: Sandbox) -> None:
    tests = "import random\nsecret = random.random()\nassert not guess(secret)\nassert guess(5) is False"
    guess = "import random\ndrawn = [random.random() for _ in range(99)]\nfor seed in range(99):\n    random.seed(seed)\n    drawn.append(random.random())\ndef guess(x): return x in drawn"
    assert sandbox.run(Program(guess, tests)).ok


def test_functions_and_values_pass_in_both_directions(sandbox: Sandbox) -> None:
    source = (
        "def twice(f):\n    def g(*a, **k):\n        'Doc.'\n        return f(*a, **k) * 2\n    return g\n"
        "def lines(n):\n    for i in range(n): yield i\n"
        "def same(x): return x\n"
        "def wants(f):\n    try: f()\n    except KeyError as e: return e.args\n    return None\n"
    )
    tests = (
        "assert twice(lambda a, b=1: a + b)(2, b=3) == 10 and twice(len)([1]) == 2 and twice(str.upper)('a') == 'AA'\n"
        "assert list(lines(3)) == [0, 1, 2] and sum(lines(4)) == 6 and twice(twice).__name__ == 'g'\n"
        "def fail(): raise KeyError('k')\n"
        "assert wants(fail) == ('k',)\n"
        "for x in (None, True, 1, -2.5, 1j, 'a\\ud800', b'b', [1, (2, {3})], {(1,): frozenset({2})}, range(3), int, ValueError):\n"
        "    assert same(x) == x and type(same(x)) is type(x)\n"
        "assert str(same(ValueError('a', 1))) == \"('a', 1)\" and same(fail) is fail"
    )
    result = sandbox.run(Program(source, tests))
    assert result.ok, result


def test_assertion_in_a_callback_is_not_swallowed(sandbox: Sandbox) -> None:
    tests = "def check(x): assert x == 4\nassert call(check, 3) is None"
    swallow = "def call(f, x):\n    try: f(x)\n    except BaseException: pass"
    assert sandbox.run(Program(swallow, tests)).kind == "failed"
    assert sandbox.run(Program(swallow.replace("f(x)", "f(x + 1)"), tests)).ok
