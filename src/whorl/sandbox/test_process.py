"""Run the tests of a program in a separate process, confined as the program's.

The process waits until the program's statements are over and only then receives the tests. Names of the program are
values or proxies (`rpc/proxies.py`); each call of a proxy runs in the program's process. The reason goes through a pipe
that only this process and the zygote hold.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import random
import sys
from typing import Any, NoReturn

from whorl.sandbox.program_runner import StandardStreams, format_exception
from whorl.sandbox.rpc.peer import Peer, ProgramModule, read_frame, write_frame
from whorl.sandbox.unit_tests import compile_tests, global_names, run_tests


class TestRunner:
    """Runs the tests of one program. The zygote creates it; a fork calls `run` once."""

    def __init__(self, streams: StandardStreams) -> None:
        self.peer, self.streams = Peer(trusted=True), streams

    def run(self, tests: int, replies: int, requests: int, verdict: int) -> NoReturn:
        """Receive tests, run them, write the reason as one frame of JSON, and exit.

        Args:
            tests: descriptor from which their source is read; it comes when the program's statements are over.
            replies: descriptor of the program's replies.
            requests: descriptor of the requests to it.
            verdict: descriptor of the reason.
        """
        self.streams.install()
        random.seed(0)  # deterministic verdicts
        peer = self.peer
        peer.receive_fd, peer.send_fd = replies, requests
        try:
            code = compile_tests(read_frame(tests).decode("utf-8", "surrogatepass"))
            if isinstance(code, str):
                reason = code
            else:
                reason = run_tests(code, _program_names(peer, global_names(code)), format_exception)
        except BaseException as error:
            reason = f"failed: {format_exception(error)}"
        with contextlib.suppress(Exception):
            self.streams.output.flush()
        write_frame(verdict, json.dumps({"reason": peer.failure or reason}).encode())
        os._exit(0)


def _program_names(peer: Peer, names: set[str]) -> dict[str, Any]:
    """Return the values of the program's names that the tests use, and make it importable as `program`.

    A name of the program that hides a builtin is not visible. A capitalised name is taken for a class of the program:
    its objects then see the operands of their operators.
    """
    module = peer.decode(["object", 0, ["class", -1, "module", [], []]])
    sys.modules["program"] = ProgramModule(module)
    wanted = sorted(n for n in names if n[:2] != "__" and not hasattr(builtins, n))
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
