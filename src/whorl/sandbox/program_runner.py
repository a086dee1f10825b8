"""Run an untrusted program in its confined process, then answer requests about it.

1. The program's statements run. No test, example or expected value is in the process, or in a pipe that it can read.
2. The process reports that they are over: one frame of JSON, {"reason": ...}.
3. It answers requests: operations on the program's objects by the tests and examples, which run in another process
   (`test_process.py`, `rpc/`).

The verdict is decided elsewhere. A program that forges frames, ends the process or changes the library under this
file can only answer its own calls. `docs/sandbox.md` lists the remaining weaknesses.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

from whorl.sandbox.frames import write_frame
from whorl.sandbox.rpc.program_peer import ProgramPeer
from whorl.sandbox.unit_tests import MAX_ERROR_CHARS

_to_json = json.JSONEncoder().encode
_exit = os._exit


def format_exception(error: BaseException) -> str:
    """Return an exception in one line. Its methods are untrusted and may raise."""
    try:
        text = traceback.format_exception_only(type(error), error)[-1].strip()
        return str(text.encode("utf-8", "backslashreplace").decode())[:MAX_ERROR_CHARS]
    except BaseException:
        return "an exception that cannot be formatted"


class StandardStreams:
    """Standard input and output of later forks: the zygote creates them, since each page that a fork changes costs."""

    def __init__(self) -> None:
        self.output = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), "utf-8", "backslashreplace")
        self.input = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 (it lives as long as the process)

    def install(self) -> None:
        """Make them the process's streams."""
        sys.stdin, sys.stdout, sys.stderr = self.input, self.output, self.output


class ProgramRunner:
    """Runs one program and answers requests. The zygote creates it; a fork calls `run` once."""

    def __init__(self, streams: StandardStreams) -> None:
        self.peer = ProgramPeer()
        self.streams, self.stream = streams, streams.output
        # A call of a C method, so that a program that replaces builtins does not break the answers.
        self.builtins, self.saved_builtins = vars(builtins), dict(vars(builtins))
        self.reset_calls: list[tuple[Callable[..., object], tuple[Any, ...]]] = [
            (sys.settrace, (None,)),
            (sys.setprofile, (None,)),
            (sys.setrecursionlimit, (1000,)),
            *(
                (signal.setitimer, (t, 0))
                for t in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
            ),
        ]

    def run(self, source: str, has_checks: bool, requests: int, replies: int) -> NoReturn:
        """Run the program and report; if `has_checks`, answer requests until they end.

        Args:
            source: the program.
            has_checks: whether tests or examples follow.
            requests: descriptor from which requests are read.
            replies: descriptor to which the report and replies are written.
        """
        self.peer.receive_fd, self.peer.send_fd = requests, replies
        self.streams.install()
        sys.argv = ["program.py"]
        reason, module = self._run_source(source, "program" if has_checks else "__main__")
        for call, arguments in self.reset_calls:
            call(*arguments)
        self._flush()
        write_frame(replies, _to_json({"reason": reason}).encode())
        if has_checks and reason == "passed":
            self.peer.export(module)  # PROGRAM_NUMBER
            with contextlib.suppress(EOFError, BrokenPipeError):
                while True:
                    message = self.peer.read()
                    self.builtins.update(self.saved_builtins)
                    answer = self.peer.answer(message)
                    self._flush()
                    self.peer.send(answer)
        _exit(0)

    def _flush(self) -> None:
        """Write what the program printed, in front of a frame."""
        self.builtins.update(self.saved_builtins)
        with contextlib.suppress(BaseException):
            self.stream.flush()

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
            self.builtins.update(self.saved_builtins)
            return _failure_reason(error), module
        self.builtins.update(self.saved_builtins)
        return "passed", module


def _failure_reason(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return "memory"
    if isinstance(error, SystemExit):
        return f"exited: {format_exception(error)}"
    return f"raised: {format_exception(error)}"
