"""Custom verifiers: a function named by a dotted path, run in a separate process.

    verifier = "custom:my_package.rewards:length"        def length(task, completion) -> float | bool | Verdict

The function is trusted (it may read files or load a model), but it may raise, hang or exit, and a thread that hangs
cannot be stopped. So one process serves all calls of a batch in order and keeps its imports. A call that exceeds its
time limit kills the process; the next call starts another. Printed output goes to standard error.

The subtle part is the process's end. A killed rollout worker closes the pipe, but a function that hangs does not read
it. So the kernel kills this process with its parent (Linux); on other systems it ends with its current call.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from whorl.evals.verify.task import Verdict, VerifiableTask
from whorl.sandbox.frames import receive, receive_with_deadline, send

CALL_SECONDS = 10.0
START_SECONDS = 120.0  # including the function's imports
_PR_SET_PDEATHSIG = 1
_BOOTSTRAP = """
import sys
sys.path[:0] = sys.argv[2:]
from whorl.evals.verify.custom_verifier import run_verifier_process
run_verifier_process(int(sys.argv[1]))
"""


def verify_custom(
    calls: Sequence[tuple[str, VerifiableTask, str]],
    seconds: float = CALL_SECONDS,
    start_seconds: float = START_SECONDS,
) -> list[Verdict]:
    """Return the functions' verdicts, in order.

    Args:
        calls: (dotted path "module:function", task, completion).
        seconds: time limit of one call, without the import before the first.
        start_seconds: time limit of starting the process and importing the function.
    """
    process: subprocess.Popen[bytes] | None = None
    verdicts = []
    try:
        for path, task, completion in calls:
            if process is None:
                process = _start_process()
            verdict = _call_with_timeout(process, {"load": path}, start_seconds)
            if verdict is not None and verdict.passed:
                verdict = _call_with_timeout(
                    process, {"path": path, "task": asdict(task), "completion": completion}, seconds
                )
            if verdict is None:
                verdict = Verdict(
                    0.0,
                    False,
                    f"timeout: {path} took longer than {seconds:g} s, or ended its process",
                    failed=True,
                )
                _kill_process(process)
                process = None
            verdicts.append(verdict)
    finally:
        if process is not None:
            _kill_process(process)
    return verdicts


def _start_process() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", _BOOTSTRAP, str(os.getpid()), *(p or "." for p in sys.path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
    )  # fmt: skip


def _kill_process(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _call_with_timeout(
    process: subprocess.Popen[bytes], value: dict[str, Any], seconds: float
) -> Verdict | None:
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        send(process.stdin.fileno(), value)
    reply = receive_with_deadline(process.stdout.fileno(), time.monotonic() + seconds)
    return None if reply is None else Verdict(**reply)


def run_verifier_process(parent: int) -> None:
    """Serve calls until the pipe closes or the process `parent` ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before prctl
        return
    reply_fd = os.dup(1)
    os.dup2(2, 1)
    while True:
        try:
            request = receive(0)
        except EOFError:
            return
        try:
            if "load" in request:
                import_function(request["load"])
                verdict = Verdict(1.0, True)
            else:
                verdict = _run_verifier(request)
            value = {
                "reward": float(verdict.reward),
                "passed": bool(verdict.passed),
                "reason": str(verdict.reason),
                "failed": bool(verdict.failed),
            }
        except Exception as error:
            value = {
                "reward": 0.0,
                "passed": False,
                "reason": f"raised: {type(error).__name__}: {error}"[:300],
                "failed": True,
            }
        send(reply_fd, value)


def import_function(path: str) -> Any:
    """Return the function of a dotted path. Raises ValueError, ImportError or AttributeError."""
    module, colon, name = path.partition(":")
    if not colon:
        raise ValueError(f"{path!r} does not have the form module:function")
    return getattr(importlib.import_module(module), name)


def _run_verifier(request: dict[str, Any]) -> Verdict:
    task = request["task"]
    result = import_function(request["path"])(
        VerifiableTask(**{**task, "messages": tuple(task["messages"])}), request["completion"]
    )
    if isinstance(result, Verdict):
        return result
    reward = float(result)
    return Verdict(reward, reward >= 1.0, "passed" if reward >= 1.0 else "below 1")
