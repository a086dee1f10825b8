"""Run the tests of a program in a separate process, confined as the program's.

The process waits until the program's statements are over and only then receives the tests. Names of the program are
values or proxies (`rpc/proxies.py`); each call of a proxy runs in the program's process. The reason goes through a pipe
that only this process and the zygote hold.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
from typing import Any, NoReturn

from whorl.sandbox.program_runner import StandardStreams, format_exception
from whorl.sandbox.rpc.peer import PROGRAM_NUMBER, Peer, ProgramModule, read_frame, write_frame
from whorl.sandbox.unit_tests import load_tests, run_tests


class TestRunner:
    """Runs the tests of one program. The zygote creates it; a fork calls `run` once."""

    def __init__(self, streams: StandardStreams) -> None:
        self.peer, self.streams = Peer(trusted=True), streams
        self.module = self.peer.decode(["object", PROGRAM_NUMBER, ["class", -1, "module", [], []]])
        self.importable = ProgramModule(self.module)

    def run(self, tests: int, replies: int, requests: int, verdict: int) -> NoReturn:
        """Receive tests, run them, write the reason as one frame of JSON, and exit.

        Args:
            tests: descriptor from which their source is read; it comes when the program's statements are over.
            replies: descriptor of the program's replies.
            requests: descriptor of the requests to it.
            verdict: descriptor of the reason.
        """
        self.streams.install()
        peer = self.peer
        peer.receive_fd, peer.send_fd = replies, requests
        try:
            loaded = load_tests(read_frame(tests))
            if isinstance(loaded, str):
                reason = loaded
            else:
                code, names = loaded
                reason = run_tests(code, self._program_names(names), format_exception)
        except BaseException as error:
            reason = f"failed: {format_exception(error)}"
        with contextlib.suppress(Exception):
            self.streams.output.flush()
        write_frame(verdict, json.dumps({"reason": peer.failure or reason}).encode())
        os._exit(0)

    def _program_names(self, wanted: list[str]) -> dict[str, Any]:
        """Return the values of the program's names that the tests use, and make it importable as `program`.

        A name of the program that hides a builtin is not visible. A capitalised name is taken for a class of the
        program: its objects then see the operands of their operators.
        """
        peer, module = self.peer, self.module
        sys.modules["program"] = self.importable
        found = peer.request("lookup", module, wanted)
        if type(found) is not dict or not found.keys() <= set(wanted):
            raise TypeError("the program's names were expected")
        seed = random.seed

        def seed_both(*arguments: Any) -> None:
            seed(*arguments)
            peer.request("seed", module, *arguments)

        vars(random)["seed"] = seed_both
        peer.passes_operands = any(n[:1].isupper() and isinstance(v, type) for n, v in found.items())
        return found
