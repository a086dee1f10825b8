"""Run a program and its checks inside the confined process, and report.

The order makes a verdict hard to fake:

1. The program's statements run. The tests are not in the process yet.
2. The library (`library_snapshot.py`), timers, tracing and the recursion limit are restored.
3. The tests arrive through a pipe, compiled, and run against the program's names (`unit_tests.py`). A skipped test
   counts as failed, since a function could raise SkipTest, and so do tests of which none ran. A name of the program
   that hides a builtin is not visible to the tests.
4. The examples run. Their output is reported, not compared: the expected output never enters the process.
5. The library is restored again. If the builtins or unittest were changed, the tests have failed.
6. The secret is read from the same pipe and written in front of the report. A report without it does not count, so a
   program that calls os._exit(0) or writes to every descriptor has not passed.

Remaining weakness: a test shares its process with the tested program. A program written against this file can find the
pipes by trying descriptors, reach the test's objects through the frames on the stack, or return an object that equals
everything. It then gets a wrong reward, but does not leave the sandbox. Examples are stronger than tests: they are
compared outside.
"""

from __future__ import annotations

import contextlib
import io
import json
import marshal
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

from whorl.sandbox.library_snapshot import LibrarySnapshot
from whorl.sandbox.unit_tests import MAX_ERROR_CHARS, run_tests

SECRET_BYTES = 16


def format_exception(error: BaseException) -> str:
    """Return an exception in one line. Its methods are untrusted and may raise."""
    try:
        text = traceback.format_exception_only(type(error), error)[-1].strip()
        return str(text.encode("utf-8", "backslashreplace").decode())[:MAX_ERROR_CHARS]
    except BaseException:
        return "an exception that cannot be formatted"


class ProgramRunner:
    """Runs one program. All functions needed later are bound here, before the program can replace them.

    Args:
        library_snapshot: the library's state, taken in the zygote.
        control: descriptor from which the tests, then the secret are read.
        report: descriptor to which the report is written.
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
        """Run the program, then its tests and examples if `has_checks`, write the report, and exit."""
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 (it lives as long as the process)
        sys.stdout = sys.stderr = self.stream
        sys.argv = ["program.py"]
        random.seed(0)  # deterministic verdicts
        outputs: list[tuple[str, str | None]] = []
        reason, module = self._run_source(source, "program" if has_checks else "__main__")
        self._restore()
        work: dict[str, Any] = {"tests": "", "examples": [], "error": ""}
        if has_checks:
            work = json.loads(self._read_exactly(int.from_bytes(self._read_exactly(4), "little")))
        if reason == "passed" and work["tests"]:
            code = marshal.loads(bytes.fromhex(work["tests"]))
            builtin = self.library_snapshot.saved_builtins
            reason = run_tests(code, module, builtin, sys.modules, format_exception)
        reason = work["error"] if reason == "passed" and work["error"] else reason
        if reason == "passed":
            outputs = [self._run_example(text, module) for text in work["examples"]]
        changed = self._restore()
        if work["tests"] and changed and reason == "passed":
            reason = f"failed: the program changed {changed} during its tests"
        with contextlib.suppress(BaseException):
            self.stream.flush()
        report = json.dumps({"reason": reason, "example_outputs": outputs}).encode()
        unsent = self._read_exactly(SECRET_BYTES) + report
        while unsent:
            unsent = unsent[self.write(self.report, unsent) :]
        self.exit_process(0)

    def _restore(self) -> str:
        """Restore the library and return the name of one change in builtins or unittest, or ""."""
        for call, arguments in self.reset_calls:
            call(*arguments)
        changed = self.library_snapshot.restore_builtins()
        self.library_snapshot.restore()
        sys.stdout = sys.stderr = self.stream
        return changed

    def _read_exactly(self, n: int) -> bytes:
        """Read n bytes from the parent, by the saved `read`: the program may have replaced `os.read`."""
        taken = b""
        while len(taken) < n and (part := self.read(self.control, n - len(taken))):
            taken += part
        return taken

    def _run_source(self, source: str, name: str) -> tuple[str, ModuleType]:
        module = ModuleType(name)
        try:
            code = compile(source, "program.py", "exec", dont_inherit=True)
        except BaseException as error:  # including MemoryError and RecursionError of the compiler
            return f"syntax: {format_exception(error)}", module
        sys.modules[name] = sys.modules["__main__"] = module
        try:
            exec(code, vars(module))
        except BaseException as error:
            return _failure_reason(error), module
        return "passed", module

    def _run_example(self, source: str, module: ModuleType) -> tuple[str, str | None]:
        output = io.StringIO()
        sys.stdout, sys.displayhook, error = output, sys.__displayhook__, None
        try:
            exec(compile(source, "example.py", "single", dont_inherit=True), vars(module))
        except BaseException as raised:
            error = format_exception(raised)
        sys.stdout = self.stream
        return output.getvalue(), error


def _failure_reason(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return "memory"
    if isinstance(error, SystemExit):
        return f"exited: {format_exception(error)}"
    return f"raised: {format_exception(error)}"
