"""Inside the confined process: runs a program, then what is asked of it, and reports.

The order is what makes a verdict hard to fake:

1. The program's own statements run. The tests are not in the process yet.
2. The library is put back as it was (`pristine.py`), timers, tracing and the recursion limit too.
3. The tests come in through a pipe, and run against the program's names. A test that is skipped counts as failed (a
   function could raise SkipTest), and a name of the program that hides a builtin is not seen by the tests.
4. The examples run. What they print is reported, not judged: what is expected never enters the process.
5. The library is put back once more; had the builtins or unittest been changed meanwhile, the tests have failed.
6. Only now the secret is read, from the same pipe, and written in front of the report. Without it there is no verdict: a
   program that ends early by os._exit(0), or that writes to every descriptor that it finds, has not passed.

What remains. A test shares its process with what it tests, so whoever knows this file can find the two pipes by trying
descriptors, or the test's objects through the frames on the stack, or return an object that is equal to everything. It takes
intent; it is not what training stumbles upon, and it leads to a wrong reward, never out of the sandbox. Examples are
stronger than tests: their answers are compared outside, so a program must at least print them.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import signal
import sys
import traceback
import unittest
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType
from typing import Any, NoReturn

from whorl.sandbox.library_snapshot import LibrarySnapshot

SECRET_BYTES = 16
MAX_EXCEPTION_CHARS = 300  # characters of an exception that are reported


def format_exception(error: BaseException) -> str:
    """An exception in one line; its own methods are foreign and may do anything but stop us."""
    try:
        text = traceback.format_exception_only(type(error), error)[-1].strip()
        return str(text.encode("utf-8", "backslashreplace").decode())[:MAX_EXCEPTION_CHARS]
    except BaseException:
        return "an exception that cannot be shown"


class ProgramRunner:
    """All that is needed later is bound here, before the program may touch anything.

    Args:
        control: descriptor that the tests and then the secret are read from.
        verdict: descriptor that the report goes to.
    """

    def __init__(self, library_snapshot: LibrarySnapshot, control: int, report: int) -> None:
        self.library_snapshot, self.control, self.report = library_snapshot, control, report
        self.stream = io.TextIOWrapper(
            io.FileIO(1, "w", closefd=False), "utf-8", "backslashreplace", write_through=False
        )
        self.reset_calls: list[tuple[Callable[..., object], tuple[Any, ...]]] = [
            (sys.settrace, (None,)),
            (sys.setprofile, (None,)),
        ]
        self.reset_calls.append((sys.setrecursionlimit, (1000,)))
        timers = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
        self.reset_calls += [(signal.setitimer, (timer, 0)) for timer in timers]
        self.read, self.write, self.exit_process = os.read, os.write, os._exit

    def run(self, source: str, has_checks: bool) -> NoReturn:
        """Runs all; `asked`: whether tests or examples follow."""
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 (it lives as long as the process)
        sys.stdout = sys.stderr = self.stream
        sys.argv = ["program.py"]
        random.seed(0)  # the same program gets the same verdict
        printed: list[tuple[str, str | None]] = []
        reason, module = self._run_source(source, "program" if has_checks else "__main__")
        self._restore()
        work: dict[str, Any] = {"tests": "", "examples": []}
        if has_checks:
            work = json.loads(self._read_exactly(int.from_bytes(self._read_exactly(4), "little")))
        if reason == "passed" and work["tests"]:
            reason = self._run_tests(work["tests"], module)
        if reason == "passed":
            printed = [self._run_example(text, module) for text in work["examples"]]
        changed = self._restore()
        if work["tests"] and changed and reason == "passed":
            reason = f"failed: the program changed {changed} while it was tested"
        with contextlib.suppress(BaseException):
            self.stream.flush()
        report = json.dumps({"reason": reason, "example_outputs": printed}).encode()
        left = self._read_exactly(SECRET_BYTES) + report
        while left:
            left = left[self.write(self.report, left) :]
        self.exit_process(0)

    def _restore(self) -> str:
        """Puts everything back as it was; what of builtins and unittest was changed, or nothing."""
        for call, arguments in self.reset_calls:
            call(*arguments)
        changed = self.library_snapshot.restore_builtins()
        self.library_snapshot.restore()
        sys.stdout = sys.stderr = self.stream
        return changed

    def _read_exactly(self, n: int) -> bytes:
        """n bytes from the parent, by the kernel's own `read`: the one in `os` may be another by now."""
        taken = b""
        while len(taken) < n and (part := self.read(self.control, n - len(taken))):
            taken += part
        return taken

    def _run_source(self, source: str, name: str) -> tuple[str, ModuleType]:
        module = ModuleType(name)
        try:
            code = compile(source, "program.py", "exec", dont_inherit=True)
        except BaseException as error:  # a MemoryError or RecursionError is no syntax, but no program either
            return f"syntax: {format_exception(error)}", module
        sys.modules[name] = sys.modules["__main__"] = module
        try:
            exec(code, vars(module))
        except BaseException as error:
            return _failure_reason(error), module
        return "passed", module

    def _run_tests(self, source: str, module: ModuleType) -> str:
        """Plain asserts, then functions, then cases."""
        builtin = self.library_snapshot.saved_builtins
        names: dict[str, Any] = {n: v for n, v in vars(module).items() if n not in builtin and n[:2] != "__"}
        tests = ModuleType("tests")
        names["__name__"], names["__builtins__"] = "tests", builtin
        vars(tests).update(names)
        sys.modules["tests"], names = tests, vars(tests)
        running = "the tests' source"
        try:
            exec(compile(source, "tests.py", "exec", dont_inherit=True), names)
            for running, value in list(names.items()):
                if running.startswith("test") and type(value) is FunctionType and value.__globals__ is names:
                    value()
            cases = [v for v in list(names.values()) if _is_test_case(v)]
            return _run_test_cases(cases) if cases else "passed"
        except BaseException as error:
            return f"failed: {running}: {format_exception(error)}"

    def _run_example(self, source: str, module: ModuleType) -> tuple[str, str | None]:
        into = io.StringIO()
        sys.stdout, sys.displayhook, error = into, sys.__displayhook__, None
        try:
            exec(compile(source, "example.py", "single", dont_inherit=True), vars(module))
        except BaseException as raised:
            error = format_exception(raised)
        sys.stdout = self.stream
        return into.getvalue(), error


def _failure_reason(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return "memory"
    if isinstance(error, SystemExit):
        return f"exited: {format_exception(error)}"
    return f"raised: {format_exception(error)}"


def _is_test_case(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, unittest.TestCase) and value.__module__ == "tests"


def _run_test_cases(cases: Sequence[type[unittest.TestCase]]) -> str:
    result = unittest.TestResult()
    unittest.TestSuite(map(unittest.defaultTestLoader.loadTestsFromTestCase, cases)).run(result)
    for test, text in [*result.failures, *result.errors]:
        return f"failed: {test}: {text.strip().splitlines()[-1][:MAX_EXCEPTION_CHARS]}"
    if result.unexpectedSuccesses:
        return f"failed: {result.unexpectedSuccesses[0]}: passed against expectation"
    if result.skipped:
        return f"failed: {result.skipped[0][0]}: skipped"
    return "passed" if result.testsRun else "failed: no test was found"
