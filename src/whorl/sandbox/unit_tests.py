"""Run the tests of a program, and count the assertions that held: tests that check nothing are never a pass.

Each assertion advances a counter when it has held (`compile_checks`), so one that fails and whose error the tests catch
does not count. An assertion is

    assert x; a call assert...(x); with assert...(x);
    an `if`, `match` or loop's `else` with a branch that raises, when it ends;
    a `try` that raises in its body or `else`, when it ends. Its handlers must not catch AssertionError.

The tests' process, in which no statement of the program runs, executes the code (`run_tests`) in this order:

1. the statements of the tests, with the program's names
2. names that start with `test` and that the tests bind: functions, coroutine functions, generators, wrapped callables
3. classes that start with `Test`, as pytest runs them: a new object for each method `test...`
4. cases of `unittest`

A literal, a function or a generator as x is always true and counts as none.

Each of 2 to 4 must hold an assertion. A test that cannot run (it needs arguments, or is marked as an expected failure) has
failed.
"""

from __future__ import annotations

import ast
import builtins
import functools
import marshal
import symtable
import sys
import unittest
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import CodeType, CoroutineType, GeneratorType
from typing import Any

from whorl.sandbox.rpc.event_loop import run_awaitable
from whorl.sandbox.rpc.tests_peer import Handle

COUNTER = "__count_check__"  # the name of the counter in the tests' module
MAX_ERROR_CHARS = 300
_ERRORS = (SyntaxError, ValueError, RecursionError, MemoryError)


def _called_name(node: ast.AST) -> str:
    """Return the last name of what an expression calls, in lower case; "" if it is no call."""
    called = node.func if isinstance(node, ast.Call) else None
    return str(getattr(called, "attr", "") or getattr(called, "id", "")).lower()


def _fails(block: Sequence[ast.stmt]) -> bool:
    """Return whether statements raise in any case, or contain an `if` or `match` that raises in a branch."""
    for one in block:
        if isinstance(one, ast.Raise) or (isinstance(one, ast.Expr) and _called_name(one.value) == "fail"):
            return True
        if isinstance(one, ast.Assert) and isinstance(one.test, ast.Constant) and not one.test.value:
            return True
        if isinstance(one, (ast.If, ast.Match)) and _is_guard(one):
            return True
    return False


def _is_guard(node: ast.stmt) -> bool:
    """Return whether a compound statement is an assertion; see the top of this file."""
    if isinstance(node, ast.If):
        return _fails(node.body) or _fails(node.orelse)
    if isinstance(node, ast.Match):
        return any(_fails(case.body) for case in node.cases)
    if isinstance(node, (ast.For, ast.AsyncFor, ast.While)):
        return _fails(node.orelse)
    if isinstance(node, ast.Try):
        return _fails(node.orelse) or (_fails(node.body) and not _swallows(node.handlers))
    if isinstance(node, (ast.With, ast.AsyncWith)):
        return any(_called_name(item.context_expr).startswith("assert") for item in node.items)
    return False


def _swallows(handlers: Sequence[ast.ExceptHandler]) -> bool:
    """Return whether handlers catch AssertionError and do not raise."""
    for handler in handlers:
        kind = handler.type or ast.Name("Exception")
        caught = {n.id for n in ast.walk(kind) if isinstance(n, ast.Name)}
        if caught & {"AssertionError", "Exception", "BaseException"}:
            return not _fails(handler.body)
    return False


def _always_holds(node: ast.AST) -> bool:
    """Return whether an assertion checks nothing: `assert True`, `assert (x == 1, "text")`, `assertTrue(... for ...)`."""
    first = node.args[:1] if isinstance(node, ast.Call) and _called_name(node) == "asserttrue" else []
    tests = [node.test] if isinstance(node, ast.Assert) else first
    return any(
        isinstance(x, (ast.Constant, ast.Tuple, ast.List, ast.Lambda, ast.GeneratorExp)) for x in tests
    )


class _CountChecks(ast.NodeTransformer):
    """Advance the counter after every assertion that holds."""

    def __init__(self) -> None:
        self.found = 0
        self._contexts = set[int]()  # ids of calls that are counted at the end of their `with`

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, (ast.With, ast.AsyncWith)):
            self._contexts |= {id(item.context_expr) for item in node.items}
        self.generic_visit(node)
        if _always_holds(node):
            return node
        if isinstance(node, ast.Assert) or (isinstance(node, ast.stmt) and _is_guard(node)):
            return [node, ast.copy_location(ast.Expr(self._count([])), node)]
        if _called_name(node).startswith("assert") and id(node) not in self._contexts:
            return self._count([node])
        return node

    def _count(self, value: list[Any]) -> ast.Call:
        self.found += 1
        return ast.Call(ast.Name(COUNTER, ast.Load()), value, [])


def tests_error(source: str) -> str:
    """Return why tests can give no verdict: there are none, they do not parse, or they check nothing; "" if they can."""
    counting = _CountChecks()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes
            counting.visit(ast.parse(source))
    except _ERRORS as error:
        line = f" (line {error.lineno})" if isinstance(error, SyntaxError) and error.lineno else ""
        return f"the tests do not parse: {getattr(error, 'msg', error) or type(error).__name__}{line}"
    return "" if counting.found else "the tests check nothing" if source.strip() else "there are no tests"


@functools.lru_cache(32)  # many completions of one task have the same checks
def compile_checks(tests: str, examples: tuple[str, ...] = ()) -> bytes:
    """Return checks, compiled in the parent once, marshalled, since in a new process this takes 1 ms.

    code: the tests, with calls of the counter.
    error: why they do not compile, or "".
    examples: their sources.
    names: names that the checks look up: those that they do not bind come from the program.
    modules: names of the library's modules that the checks use as modules only: they never come from the program.
    operands: whether the checks use a class of the program, by a capitalised name that they never bind.
    """
    code, error = compile("", "tests.py", "exec"), ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = ast.fix_missing_locations(_CountChecks().visit(ast.parse(tests, "tests.py")))
            code = compile(tree, "tests.py", "exec", dont_inherit=True)
        except _ERRORS as raised:
            error = f"failed: the test source: {type(raised).__name__}: {raised}"[:MAX_ERROR_CHARS]
        return marshal.dumps((code, error, examples, *_free_names([tests, *examples])))


def _free_names(sources: Sequence[str]) -> tuple[list[str], list[str], bool]:
    """Return (names, modules, operands) of `compile_checks`."""
    used, bound, called, explicit = set[str](), set[str](), set[str](), set[str]()
    for source in sources:
        try:
            tables, nodes = [symtable.symtable(source, "tests.py", "exec")], list(ast.walk(ast.parse(source)))
        except _ERRORS:
            continue
        top = tables[0]
        for table in tables:
            tables += table.get_children()
            for symbol in table.get_symbols():
                is_global = table is top or symbol.is_global()
                if is_global and (symbol.is_assigned() or symbol.is_imported()):
                    bound.add(symbol.get_name())
                if is_global and symbol.is_referenced():
                    used.add(symbol.get_name())
        bases = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
        called |= {node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in bases}
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and node.module == "program":
                explicit |= {alias.name for alias in node.names}
            if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "program":
                explicit.add(node.attr)
    used = {n for n in used if n[:2] != "__" and not hasattr(builtins, n)}
    modules = {n for n in used - called if n in sys.stdlib_module_names}
    operands = any(n[:1].isupper() for n in (used - bound) | explicit)
    return sorted(used - modules), sorted(modules), operands


class _Counter:
    """Counts the assertions that held."""

    held = 0

    def __call__(self, value: Any = None) -> Any:
        self.held += 1
        return value


def run_tests(
    code: CodeType, names: dict[str, Any], describe: Callable[[BaseException], str], need_assertion: bool
) -> str:
    """Run compiled tests and return the reason: "passed" or "failed: ...".

    Args:
        code: the tests.
        names: their namespace, with the names of the program as values or handles.
        describe: formats an exception in one line.
        need_assertion: fail if no assertion ran.
    """
    given, counter = dict(names), _Counter()
    names[COUNTER] = counter
    running = "the test source"
    try:
        exec(code, names)
        bound = {n: v for n, v in names.items() if n not in given or given[n] is not v}
        # A test that the program decorates is a handle.
        defined = {c.co_name for c in code.co_consts if isinstance(c, CodeType)}
        bound = {n: v for n, v in bound.items() if n in defined or not isinstance(v, Handle)}
        for name, test in _find_tests(bound):
            running, before = name, counter.held
            _call(test)
            if counter.held == before:
                return f"failed: {running}: no assertion ran"
        if cases := [v for v in bound.values() if _is_test_case(v)]:
            return _run_test_cases(cases, describe, counter)
    except BaseException as error:
        return f"failed: {running}: {describe(error)}"
    if counter.held or not need_assertion:
        return "passed"
    return "failed: no assertion ran: expected an assert, or one in a function test... or a unittest case"


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
    elif not isinstance(result, Handle) and isinstance(result, AbstractContextManager):
        with result:
            pass


def _is_test_case(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, unittest.TestCase) and value.__module__ == "tests"


class _Cases(unittest.TestSuite):
    """Tests of unittest cases. `running` is the present one, and "" before the first."""

    counter: _Counter
    running: Any = ""

    def __iter__(self) -> Any:
        for test in self._tests:
            self.running, before = test, self.counter.held
            yield test
            if self.counter.held == before:
                raise AssertionError("no assertion ran")


def _run_test_cases(
    cases: Sequence[type[unittest.TestCase]], describe: Callable[[BaseException], str], counter: _Counter
) -> str:
    """Run cases and return the reason. The first failure ends them, so no result is collected and formatted."""
    load = unittest.defaultTestLoader.loadTestsFromTestCase
    suite = _Cases(test for case in cases for test in load(case))
    suite.counter = counter
    try:
        for test in suite._tests:
            suite.running = test
            method = getattr(type(test), test._testMethodName)
            flag = "__unittest_expecting_failure__"
            if getattr(type(test), flag, False) or getattr(method, flag, False):
                raise AssertionError("expected to fail, so it checks nothing")
        suite.debug()
    except BaseException as error:
        return f"failed: {suite.running}: {describe(error)}"
    return "passed" if suite.running else "failed: no test found"
