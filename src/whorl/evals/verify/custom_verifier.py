"""A verifier of one's own: a function named by a dotted path, run in a process of its own.

    verifier = "custom:my_package.rewards:length"        def length(task, completion) -> float | bool | Verdict

The function is trusted (it may read files, load a model), its patience is not: it may raise, hang, or exit, and a thread
that hangs cannot be ended. So one process serves all calls of a batch, one after the other, keeps what it imported, and is
ended and started again when a call takes longer than its time. What the function prints goes to standard error.

The subtle part is who ends it when its parent cannot: a rollout worker that is killed closes the pipe, but a function that
hangs reads no pipe. So the kernel is asked to kill this process with its parent (Linux; elsewhere it ends with its call).
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
START_SECONDS = 120.0  # to import what the function needs
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
    """Verdicts of functions.

    Args:
        calls: (dotted path "module:function", task, completion).
        seconds: that one call may take; the import before the first is not counted.
        start_seconds: that the process and its imports may take.
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
    said = receive_with_deadline(process.stdout.fileno(), time.monotonic() + seconds)
    return None if said is None else Verdict(**said)


def run_verifier_process(parent: int) -> None:
    """What the process does until nobody asks any more, or the process `parent` is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it died before the kernel was asked
        return
    answers = os.dup(1)
    os.dup2(2, 1)
    while True:
        try:
            asked = receive(0)
        except EOFError:
            return
        try:
            if "load" in asked:
                import_function(asked["load"])
                verdict = Verdict(1.0, True)
            else:
                verdict = _run_verifier(asked)
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
        send(answers, value)


def import_function(path: str) -> Any:
    """What a dotted path names. Raises ValueError, ImportError, AttributeError."""
    module, colon, name = path.partition(":")
    if not colon:
        raise ValueError(f"{path!r} is no path of the form module:function")
    return getattr(importlib.import_module(module), name)


def _run_verifier(asked: dict[str, Any]) -> Verdict:
    task = asked["task"]
    said = import_function(asked["path"])(
        VerifiableTask(**{**task, "messages": tuple(task["messages"])}), asked["completion"]
    )
    if isinstance(said, Verdict):
        return said
    reward = float(said)
    return Verdict(reward, reward >= 1.0, "passed" if reward >= 1.0 else "below 1")
