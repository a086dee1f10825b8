"""Run the tests of a program in a separate process, confined as the program's.

The process waits until the program's statements are over and only then receives the checks. Names of the program are
values or handles (`rpc/tests_peer.py`); each operation on a handle runs in the program's process. The reason goes through
a pipe that only this process and the zygote hold.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import json
import marshal
import os
import random
import sys
from types import ModuleType
from typing import Any, NoReturn

from whorl.sandbox.frames import read_frame, write_frame
from whorl.sandbox.program_runner import StandardStreams, format_exception
from whorl.sandbox.rpc.program_peer import PROGRAM_NUMBER
from whorl.sandbox.rpc.tests_peer import TestsPeer
from whorl.sandbox.unit_tests import run_tests

# Modules that may execute code. Elsewhere (`eval` in tests, `typing.get_type_hints`) it may be text of the program.
_MAY_EXECUTE = (
    __name__, run_tests.__module__, "importlib._bootstrap", "importlib._bootstrap_external", "collections", "dataclasses",
)  # fmt: skip


class TestRunner:
    """Runs the checks of one program. The zygote creates it; a fork calls `run` once."""

    def __init__(self, streams: StandardStreams) -> None:
        self.peer, self.streams = TestsPeer(), streams
        self.program: Any = self.peer.decode_object(PROGRAM_NUMBER, False)

    def run(self, checks: int, replies: int, requests: int, verdict: int) -> NoReturn:
        """Receive checks, run them, write the reason and the outputs of examples as one frame of JSON, and exit.

        Args:
            checks: descriptor from which they are read; they come when the program's statements are over.
            replies: descriptor of the program's replies.
            requests: descriptor of the requests to it.
            verdict: descriptor of the reason.
        """
        self.streams.install()
        peer, outputs = self.peer, []
        peer.receive_fd, peer.send_fd = replies, requests
        peer.remember_streams()
        sys.addaudithook(self._refuse_code)
        try:
            data = read_frame(checks)
            random.seed(data)  # no number that the program could draw as well
            # Trusted, and of the same interpreter.
            code, error, examples, used, modules, peer.operands = marshal.loads(data)
            names = self._names(used, modules)
            reason = error or run_tests(code, names, format_exception, need_assertion=not examples)
            if reason == "passed":
                outputs = [self._run_example(source, names) for source in examples]
        except BaseException as error:
            reason = f"failed: {format_exception(error)}"
        with contextlib.suppress(Exception):
            self.streams.output.flush()
        write_frame(verdict, json.dumps({"reason": peer.failure or reason, "outputs": outputs}).encode())
        os._exit(0)

    def _refuse_code(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Refuse to execute what may be text or a pickle of the program, in a process that holds the verdict."""
        executes = event == "exec" and sys._getframe(1).f_globals.get("__name__") not in _MAY_EXECUTE
        if executes or event == "pickle.find_class":
            self.peer.refuse("the tests execute text or load a pickle, which the program may have written")

    def _names(self, used: list[str], modules: list[str]) -> dict[str, Any]:
        """Return the namespace of the tests, with the names of the program that they use, and modules of the library."""
        tests = sys.modules["tests"] = ModuleType("tests")
        sys.modules["program"] = self.program
        found = self.peer.request("lookup", self.program, used)
        if type(found) is not dict or not found.keys() <= set(used):
            raise TypeError("the program's names were expected")
        vars(tests).update(found, __builtins__=builtins)
        for name in modules:
            with contextlib.suppress(ImportError):
                vars(tests)[name] = __import__(name)
        return vars(tests)

    def _run_example(self, source: str, names: dict[str, Any]) -> tuple[str, str | None]:
        """Return what an example printed, and its exception as doctest prints it, or None."""
        output, error = io.StringIO(), None
        sys.displayhook = sys.__displayhook__
        with contextlib.redirect_stdout(output):
            try:
                exec(compile(source, "example.py", "single", dont_inherit=True), names)
            except BaseException as raised:
                error = format_exception(raised)
        return output.getvalue(), error
