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
import itertools
import sys
import unittest
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, CoroutineType, GeneratorType, ModuleType
from typing import Any

from whorl.sandbox.rpc.event_loop import run_awaitable
from whorl.sandbox.rpc.peer import is_remote

COUNTER = "__count_check__"  # the name of the counter in the tests' module
MAX_ERROR_CHARS = 300
_COMPOUND = (ast.If, ast.Try, ast.While, ast.For, ast.With, ast.Match)
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


def compile_tests(source: str) -> CodeType | str:
    """Return the tests as code that counts its checks, or the reason why they do not compile."""
    try:
        tree = _CountChecks().visit(ast.parse(source, "tests.py"))
        code: CodeType = compile(tree, "tests.py", "exec", dont_inherit=True)
        return code
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"failed: the test source: {type(error).__name__}: {error}"[:MAX_ERROR_CHARS]


def global_names(code: CodeType) -> set[str]:
    """Return every name that code and the functions in it look up."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= global_names(constant)
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
            return _run_test_cases(cases)
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


def _run_test_cases(cases: Sequence[type[unittest.TestCase]]) -> str:
    result = unittest.TestResult()
    unittest.TestSuite(map(unittest.defaultTestLoader.loadTestsFromTestCase, cases)).run(result)
    for test, text in [*result.failures, *result.errors]:
        return f"failed: {test}: {text.strip().splitlines()[-1][:MAX_ERROR_CHARS]}"
    if result.unexpectedSuccesses:
        return f"failed: {result.unexpectedSuccesses[0]}: unexpected success"
    if result.expectedFailures:
        return f"failed: {result.expectedFailures[0][0]}: expected to fail, so it checks nothing"
    if result.skipped:
        return f"failed: {result.skipped[0][0]}: skipped"
    return "passed" if result.testsRun else "failed: no test found"
