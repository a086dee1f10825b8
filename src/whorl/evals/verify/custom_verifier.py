"""Custom verifiers: a function named by a dotted path, run in a separate process.

    verifier = "custom:my_package.rewards:length"        def length(task, completion) -> float | bool | Verdict

The function is trusted (it may read files or load a model), but it may raise, hang or exit, and a thread that hangs
cannot be stopped. So a process serves all calls in order, over all batches, and keeps its imports. A call that exceeds
its time limit kills the process; the next call starts another. Printed output goes to standard error.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from whorl.evals.verify.task import Verdict, VerifiableTask
from whorl.machine.process import Channel, Child
from whorl.registry import import_attribute

CALL_SECONDS = 10.0
START_SECONDS = 120.0  # including the function's imports
_idle: list[tuple[tuple[Any, ...], Child]] = []  # between two batches, with the state of `_origin`


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
    child: Child | None = None
    verdicts = []
    try:
        for path, task, completion in calls:
            child = child or _take_process()
            verdict = _call_with_timeout(child, {"load": path}, start_seconds)
            if verdict is not None and verdict.passed:
                request = {"path": path, "task": asdict(task), "completion": completion}
                verdict = _call_with_timeout(child, request, seconds)
            if verdict is None:
                verdict = Verdict(
                    0.0,
                    False,
                    f"timeout: {path} took longer than {seconds:g} s, or ended its process",
                    failed=True,
                )
                child.kill()
                child.channel.close()
                child = None
            verdicts.append(verdict)
    except BaseException:  # a reply may still be to come
        if child is not None:
            child.kill()
        raise
    if child is not None:
        _idle.append((_origin(), child))
    return verdicts


def _origin() -> tuple[Any, ...]:
    """Return the parent of a process, its search path and its environment; it serves no other."""
    return os.getpid(), list(sys.path), dict(os.environ)


def _take_process() -> Child:
    """Return a process that no other thread uses."""
    with suppress(IndexError):
        origin, child = _idle.pop()
        if origin == _origin() and child.poll() is None:
            return child
        if origin[0] == os.getpid():
            child.kill()
    return Child("whorl.evals.verify.custom_verifier:serve_calls", name="verifier", preload=(__name__,))


def _call_with_timeout(child: Child, request: dict[str, Any], seconds: float) -> Verdict | None:
    """Return the verdict; None if the process ended or took too long."""
    deadline = time.monotonic() + seconds
    with suppress(EOFError, OSError):
        child.channel.send(request)
        if child.channel.poll(max(0.0, deadline - time.monotonic())):
            return Verdict(**child.channel.recv())
    return None


def serve_calls(channel: Channel) -> None:
    """Main function of the process."""
    os.dup2(2, 1)
    while True:
        request = channel.recv()
        try:
            if "load" in request:
                import_attribute(request["load"])
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
        channel.send(value)


def _run_verifier(request: dict[str, Any]) -> Verdict:
    task = request["task"]
    result = import_attribute(request["path"])(
        VerifiableTask(**{**task, "messages": tuple(task["messages"])}), request["completion"]
    )
    if isinstance(result, Verdict):
        return result
    reward = float(result)
    return Verdict(reward, reward >= 1.0, "passed" if reward >= 1.0 else "below 1")
