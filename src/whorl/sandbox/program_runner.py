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

from whorl.sandbox.library_snapshot import Pristine

SECRET_BYTES = 16
SHOWN = 300  # characters of an exception that are reported


def told(error: BaseException) -> str:
    """An exception in one line; its own methods are foreign and may do anything but stop us."""
    try:
        text = traceback.format_exception_only(type(error), error)[-1].strip()
        return str(text.encode("utf-8", "backslashreplace").decode())[:SHOWN]
    except BaseException:
        return "an exception that cannot be shown"


class Child:
    """All that is needed later is bound here, before the program may touch anything.

    Args:
        control: descriptor that the tests and then the secret are read from.
        verdict: descriptor that the report goes to.
    """

    def __init__(self, pristine: Pristine, control: int, verdict: int) -> None:
        self.pristine, self.control, self.verdict = pristine, control, verdict
        self.stream = io.TextIOWrapper(
            io.FileIO(1, "w", closefd=False), "utf-8", "backslashreplace", write_through=False
        )
        self.calm: list[tuple[Callable[..., object], tuple[Any, ...]]] = [
            (sys.settrace, (None,)),
            (sys.setprofile, (None,)),
        ]
        self.calm.append((sys.setrecursionlimit, (1000,)))
        timers = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
        self.calm += [(signal.setitimer, (timer, 0)) for timer in timers]
        self.read, self.write, self.leave = os.read, os.write, os._exit

    def run(self, source: str, asked: bool) -> NoReturn:
        """Runs all; `asked`: whether tests or examples follow."""
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 (it lives as long as the process)
        sys.stdout = sys.stderr = self.stream
        sys.argv = ["program.py"]
        random.seed(0)  # the same program gets the same verdict
        printed: list[tuple[str, str | None]] = []
        reason, module = self._define(source, "program" if asked else "__main__")
        self._restore()
        work: dict[str, Any] = {"tests": "", "examples": []}
        if asked:
            work = json.loads(self._take(int.from_bytes(self._take(4), "little")))
        if reason == "passed" and work["tests"]:
            reason = self._tests(work["tests"], module)
        if reason == "passed":
            printed = [self._example(text, module) for text in work["examples"]]
        changed = self._restore()
        if work["tests"] and changed and reason == "passed":
            reason = f"failed: the program changed {changed} while it was tested"
        with contextlib.suppress(BaseException):
            self.stream.flush()
        report = json.dumps({"reason": reason, "printed": printed}).encode()
        left = self._take(SECRET_BYTES) + report
        while left:
            left = left[self.write(self.verdict, left) :]
        self.leave(0)

    def _restore(self) -> str:
        """Puts everything back as it was; what of builtins and unittest was changed, or nothing."""
        for call, arguments in self.calm:
            call(*arguments)
        changed = self.pristine.tampered()
        self.pristine.restore()
        sys.stdout = sys.stderr = self.stream
        return changed

    def _take(self, n: int) -> bytes:
        """n bytes from the parent, by the kernel's own `read`: the one in `os` may be another by now."""
        taken = b""
        while len(taken) < n and (part := self.read(self.control, n - len(taken))):
            taken += part
        return taken

    def _define(self, source: str, name: str) -> tuple[str, ModuleType]:
        module = ModuleType(name)
        try:
            code = compile(source, "program.py", "exec", dont_inherit=True)
        except BaseException as error:  # a MemoryError or RecursionError is no syntax, but no program either
            return f"syntax: {told(error)}", module
        sys.modules[name] = sys.modules["__main__"] = module
        try:
            exec(code, vars(module))
        except BaseException as error:
            return _raised(error), module
        return "passed", module

    def _tests(self, source: str, module: ModuleType) -> str:
        """Plain asserts, then functions, then cases."""
        builtin = self.pristine.builtin
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
            cases = [v for v in list(names.values()) if _is_case(v)]
            return _cases(cases) if cases else "passed"
        except BaseException as error:
            return f"failed: {running}: {told(error)}"

    def _example(self, source: str, module: ModuleType) -> tuple[str, str | None]:
        into = io.StringIO()
        sys.stdout, sys.displayhook, error = into, sys.__displayhook__, None
        try:
            exec(compile(source, "example.py", "single", dont_inherit=True), vars(module))
        except BaseException as raised:
            error = told(raised)
        sys.stdout = self.stream
        return into.getvalue(), error


def _raised(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return "memory"
    if isinstance(error, SystemExit):
        return f"exited: {told(error)}"
    return f"raised: {told(error)}"


def _is_case(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, unittest.TestCase) and value.__module__ == "tests"


def _cases(cases: Sequence[type[unittest.TestCase]]) -> str:
    result = unittest.TestResult()
    unittest.TestSuite(map(unittest.defaultTestLoader.loadTestsFromTestCase, cases)).run(result)
    for test, text in [*result.failures, *result.errors]:
        return f"failed: {test}: {text.strip().splitlines()[-1][:SHOWN]}"
    if result.unexpectedSuccesses:
        return f"failed: {result.unexpectedSuccesses[0]}: passed against expectation"
    if result.skipped:
        return f"failed: {result.skipped[0][0]}: skipped"
    return "passed" if result.testsRun else "failed: no test was found"
