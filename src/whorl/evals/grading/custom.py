"""Graders of users: functions named by a dotted path, run in a separate process.

    custom:my_package.graders:length        def length(gold, text, *, prompt="") -> float | bool | Grade

A function gets the gold answer, the text, and those named arguments that it has: `finish`, `prompt`, `messages` of a task,
and the options and fields of an evaluation. A number of 1 or more passes.

The function is trusted (it may read files or load a model), but it may raise, hang or exit, and a thread that hangs
cannot be stopped. So a process serves all calls in order, over all batches, and keeps its imports. A call that exceeds
its time limit kills the process; the next call starts another. Printed output goes to standard error.
"""

from __future__ import annotations

import inspect
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

from whorl.evals.grading.grade import Grade
from whorl.machine.process import Channel, Child
from whorl.registry import import_attribute

CALL_SECONDS = 10.0  # without the import before the first call
START_SECONDS = 120.0  # including the function's imports
_idle: list[tuple[tuple[Any, ...], Child]] = []  # between two batches, with the state of `_origin`


def grade_in_process(calls: Sequence[tuple[Any, ...]]) -> list[Grade]:
    """Return the functions' grades, in order.

    calls: (dotted path "module:function", gold answer, text, named arguments).
    """
    child: Child | None = None
    grades = []
    try:
        for path, *arguments in calls:
            child = child or _take_process()
            grade = _call_with_timeout(child, (path, None), START_SECONDS)
            if grade is not None and not grade.failed:
                grade = _call_with_timeout(child, (path, arguments), CALL_SECONDS)
            if grade is None:
                grade = Grade.error(
                    f"timeout: {path} took longer than {CALL_SECONDS:g} s, or ended its process"
                )
                child.kill()
                child.channel.close()
                child = None
            grades.append(grade)
    except BaseException:  # a reply may still be to come
        if child is not None:
            child.kill()
        raise
    if child is not None:
        _idle.append((_origin(), child))
    return grades


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
    return Child("whorl.evals.grading.custom:serve_calls", name="grader", preload=(__name__,))


def _call_with_timeout(child: Child, request: tuple[str, Any], seconds: float) -> Grade | None:
    """Return the grade; None if the process ended or took too long."""
    deadline = time.monotonic() + seconds
    with suppress(EOFError, OSError):
        child.channel.send(request)
        if child.channel.poll(max(0.0, deadline - time.monotonic())):
            grade: Grade = child.channel.recv()
            return grade
    return None


def serve_calls(channel: Channel) -> None:
    """Main function of the process. A request without arguments imports the function."""
    os.dup2(2, 1)
    while True:
        path, arguments = channel.recv()
        try:
            function = import_attribute(path)
            grade = Grade(1.0, True)
            if arguments is not None:
                gold, text, named = arguments
                grade = Grade.read(function(gold, text, **accepted(function, named)))
        except Exception as error:
            grade = Grade.error(error)
        channel.send(grade)


def accepted(function: Callable[..., Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the named arguments that a function has."""
    names = _argument_names(function)
    return {name: value for name, value in named.items() if names is None or name in names}


@lru_cache(256)
def _argument_names(function: Callable[..., Any]) -> frozenset[str] | None:
    parameters = inspect.signature(function).parameters
    return None if any(p.kind is p.VAR_KEYWORD for p in parameters.values()) else frozenset(parameters)
