"""Run the tests of a program, and count the checks that ran: tests that check nothing are never a pass.

Each assertion gets a call in front that advances a counter (`compile_tests`). The tests' process, in which no statement
of the program runs, executes the code (`run_tests`) in this order:

1. the statements of the tests, with the program's names
2. names that start with `test` and that the tests bind: functions, coroutine functions, generators, wrapped callables
3. classes that start with `Test`, as pytest runs them: a new object for each method `test...`
4. cases of `unittest`

A test that cannot run (it needs arguments, or is marked as an expected failure) has failed.
"""

from __future__ import annotations

import ast
import builtins
import functools
import itertools
import marshal
import sys
import unittest
import warnings
from collections.abc import Callable, Iterator, Sequence
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from types import CodeType, CoroutineType, GeneratorType, ModuleType
from typing import Any

from whorl.sandbox.rpc.event_loop import run_awaitable
from whorl.sandbox.rpc.peer import is_remote

COUNTER = "__count_check__"  # the name of the counter in the tests' module
MAX_ERROR_CHARS = 300
_COMPOUND = (ast.If, ast.Try, ast.While, ast.For, ast.With, ast.Match)
_NEVER_RUN = (
    CO_COROUTINE | CO_GENERATOR | CO_ASYNC_GENERATOR
)  # flags of methods that a plain TestCase does not run
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def _walk_scope(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below `node`, without the bodies of functions and classes in it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _SCOPES):
            yield child
            yield from _walk_scope(child)


def _is_check(statement: ast.stmt) -> bool:
    """Return whether the statement checks something: an assert, a guarded raise, or a call of `assert...`."""
    if isinstance(statement, ast.Assert):
        return True
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        called = statement.value.func
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        return name.lower().startswith("assert")
    return isinstance(statement, _COMPOUND) and any(isinstance(n, ast.Raise) for n in _walk_scope(statement))


def syntax_error(source: str) -> str:
    """Return why source does not compile; "" if it does. Tests that do not compile fail every program."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes
            ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f" (line {error.lineno})" if isinstance(error, SyntaxError) and error.lineno else ""
        return f"{getattr(error, 'msg', error) or type(error).__name__}{line}"
    return ""


def has_check(source: str) -> bool:
    """Return whether tests contain anything that can fail: a check, a test function, a test class or a case.

    Source that does not compile counts as True: its error is reported when it runs.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return True
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and _is_check(node):
            return True
        name = getattr(node, "name", None) or getattr(node, "id", None)
        if isinstance(node, _SCOPES) and str(name).lower().startswith("test"):
            return True
        if isinstance(node, ast.ClassDef) and any("TestCase" in ast.unparse(base) for base in node.bases):
            return True
    return False


class _CountChecks(ast.NodeTransformer):
    """Insert a call of the counter in front of every check."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list):
                block[:] = [new for statement in block for new in self._counted(statement)]
        return node

    def _counted(self, statement: ast.stmt) -> list[ast.stmt]:
        if not isinstance(statement, ast.stmt) or not _is_check(statement):
            return [statement]
        call = ast.Expr(ast.Call(ast.Name(COUNTER, ast.Load()), [], []))
        return [ast.fix_missing_locations(ast.copy_location(call, statement)), statement]


@functools.lru_cache(32)  # many completions of one task have the same tests
def compile_tests(source: str) -> bytes:
    """Return tests for `load_tests`. The parent compiles them once; in a new process this takes 1 ms."""
    try:
        tree = _CountChecks().visit(ast.parse(source, "tests.py"))
        code = compile(tree, "tests.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return marshal.dumps(f"failed: the test source: {type(error).__name__}: {error}"[:MAX_ERROR_CHARS])
    names = sorted(n for n in _global_names(code) if n[:2] != "__" and not hasattr(builtins, n))
    return marshal.dumps((code, names))


def load_tests(data: bytes) -> tuple[CodeType, list[str]] | str:
    """Return the tests as code that counts its checks, with the names that they look up, or why they do not compile."""
    loaded: tuple[CodeType, list[str]] | str = marshal.loads(data)  # trusted, and of the same interpreter
    return loaded


def _global_names(code: CodeType) -> set[str]:
    """Return every name that code and the functions in it look up."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _global_names(constant)
    return names


def run_tests(code: CodeType, program: dict[str, Any], describe: Callable[[BaseException], str]) -> str:
    """Run compiled tests and return the reason: "passed" or "failed: ...".

    Args:
        code: of `compile_tests`.
        program: names of the program that the tests see, as values or proxies.
        describe: formats an exception in one line.
    """
    tests = ModuleType("tests")
    names = vars(tests)
    names.update(program)
    counter = itertools.count()
    names.update(__name__="tests", __builtins__=builtins)
    names[COUNTER] = counter.__next__
    sys.modules["tests"] = tests
    running, n_tests = "the test source", 0
    try:
        exec(code, names)
        bound = {n: v for n, v in names.items() if n not in program or program[n] is not v}
        bound = {n: v for n, v in bound.items() if not is_remote(v)}
        cases = [v for v in bound.values() if _is_test_case(v)]
        for name, test in _find_tests(bound):
            running = name
            _call(test)
            n_tests += 1
        if cases:
            return _run_test_cases(cases, describe)
    except BaseException as error:
        return f"failed: {running}: {describe(error)}"
    if next(counter) or n_tests:
        return "passed"
    return "failed: no test ran: expected an assert, a function or method named test..., or a unittest case"


def _find_tests(bound: dict[str, Any]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield (name, callable) of the test functions and of the methods of test classes."""
    for name, value in bound.items():
        if isinstance(value, type):
            if name.startswith("Test") and value.__module__ == "tests" and not _is_test_case(value):
                for method in [m for m in dir(value) if m.startswith("test")]:
                    yield f"{name}.{method}", _method_call(value, method)
        elif name.startswith("test") and callable(value):
            yield name, value


def _method_call(test_class: type, method: str) -> Callable[[], Any]:
    """Return a call of one method of a new object, between `setup_method` and `teardown_method` if it has them."""

    def call() -> None:
        instance = test_class()
        for name in ("setup_method", method, "teardown_method"):
            if hasattr(instance, name):
                _call(getattr(instance, name))

    return call


def _call(test: Callable[[], Any]) -> None:
    """Call a test to its end: await a coroutine, exhaust a generator, enter and leave a context manager."""
    result = test()
    if isinstance(result, CoroutineType):
        run_awaitable(result)
    elif isinstance(result, GeneratorType):
        for _ in result:
            pass
    elif hasattr(type(result), "__enter__") and hasattr(type(result), "__exit__"):
        with result:
            pass


def _is_test_case(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, unittest.TestCase) and value.__module__ == "tests"


class _Cases(unittest.TestSuite):
    """Tests of unittest cases. `running` is the present one, and "" before the first."""

    running: Any = ""

    def __iter__(self) -> Any:
        for test in self._tests:
            self.running = test
            yield test


def _run_test_cases(
    cases: Sequence[type[unittest.TestCase]], describe: Callable[[BaseException], str]
) -> str:
    """Run cases and return the reason. The first failure ends them, so no result is collected and formatted."""
    suite = _Cases(case(name) for case in cases for name in _case_test_names(case))
    for test in suite:
        method = getattr(type(test), test._testMethodName)
        if any(getattr(marked, "__unittest_expecting_failure__", False) for marked in (type(test), method)):
            return f"failed: {test}: expected to fail, so it checks nothing"
        is_async = isinstance(test, unittest.IsolatedAsyncioTestCase)
        if not is_async and getattr(getattr(method, "__code__", None), "co_flags", 0) & _NEVER_RUN:
            return f"failed: {test}: unittest does not run a coroutine or generator of a TestCase, so it checks nothing"
    suite.running = ""
    try:
        suite.debug()
    except unittest.SkipTest:
        return f"failed: {suite.running}: skipped"
    except BaseException as error:
        return f"failed: {suite.running}: {describe(error)}"
    return "passed" if suite.running else "failed: no test found"


def _case_test_names(case: type[unittest.TestCase]) -> list[str]:
    """Return the names that the loader of unittest finds, in order."""
    own = [kind for kind in case.__mro__ if not kind.__module__.startswith("unittest.")]
    names = sorted({name for kind in own for name in vars(kind) if name.startswith("test")})
    names = [name for name in names if callable(getattr(case, name))]
    return names or ["runTest"] * hasattr(case, "runTest")
