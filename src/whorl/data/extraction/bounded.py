"""Functions that run foreign bytes through C libraries, in a child process with bounds of memory and CPU time.

A PDF of 600 bytes can refer to itself without end, and HTML of 2 MB can take hours. Neither can be ended in a thread, and
memory that runs out ends the whole process. So a process has one child for them, which is started again after it was ended.
The kernel enforces both bounds: RLIMIT_AS, and a timer of CPU time, which does not depend on other work on the machine.
"""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from whorl.data.quarantine import BadRecordError
from whorl.machine.process import Channel, Child

T = TypeVar("T")
MEMORY_BYTES = 2 << 30  # of address space, that of the interpreter included
SECONDS, SECONDS_PER_MB = 20.0, 2.0  # of CPU time
SLOWEST = 50  # times the CPU time: a child that takes longer hangs
ATTEMPTS = 2  # of a call whose child got SIGKILL, as by another process's lack of memory

_lock = threading.Lock()
_child: Child | None = None
_owner = 0  # the process that started it


def run_bounded(function: Callable[..., T], *args: Any, n_bytes: int) -> T:
    """Return function(*args), computed in a child process; both are pickled.

    Args:
        n_bytes: size of the input, which the bound of the time depends on.

    Raises:
        BadRecordError: "too_costly", it takes too much memory or time, or crashes; and what the function raises.
    """
    seconds = SECONDS + SECONDS_PER_MB * n_bytes / 1e6
    for attempt in range(ATTEMPTS):
        with _lock:
            answer, code = _call(function, args, seconds)
        if code is None:
            break
        if code != -signal.SIGKILL or attempt + 1 == ATTEMPTS:
            raise BadRecordError("too_costly", "", _costs(code, seconds))
    if isinstance(answer, Exception):
        raise answer
    result: T = answer
    return result


def _call(function: Callable[..., Any], args: tuple[Any, ...], seconds: float) -> tuple[Any, int | None]:
    """Return the child's answer, and None or the exit code of a child that ended."""
    global _child, _owner
    if _child is None or _owner != os.getpid() or _child.poll() is not None:
        _child, _owner = Child(f"{__name__}:serve_calls", MEMORY_BYTES, name="extraction"), os.getpid()
    child, answer = _child, None
    with suppress(EOFError, ConnectionError):
        child.channel.send((function, args, seconds))
        if child.channel.poll(SLOWEST * seconds):
            return child.channel.recv(), None
    _child = None
    code = child.kill()
    child.channel.close()
    return answer, code


def _costs(code: int, seconds: float) -> str:
    if code == -signal.SIGPROF:
        return f"its extraction takes more than {seconds:.0f} s of CPU time"
    return f"its extraction takes more than {MEMORY_BYTES >> 20} MB of memory, or crashes (exit code {code})"


def serve_calls(channel: Channel, memory: int) -> None:
    """Run calls from the channel until it closes; answer each with its result or its error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libraries that abort report it there
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(ValueError, OSError):  # not everywhere
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    while True:
        function, args, seconds = channel.recv()
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            answer: Any = function(*args)
        except MemoryError:
            os._exit(1)
        except Exception as error:
            answer = error
        signal.setitimer(signal.ITIMER_PROF, 0)
        channel.send(answer)
