"""Child processes: one way to start them, to end them with this process, and to exchange messages with them.

    child = Child("whorl.slots.producers:serve_records", ring.spec, Descriptor(ring.fd), nice=5)
    child.channel.send_bytes(b"...")           the function gets the other end: serve_records(channel, spec, fd)
    child.wait(1.0), child.kill(), child.exit_description()

A child never is a fork of this process, whose threads may hold locks. It is a new interpreter, or with `preload` a fork
of the fork server (`fork_server.py`), which has imported these modules once: a child with torch starts in 50 ms in place
of 2 s. Arguments are pickled. Shared tensors, `multiprocessing` connections and `Descriptor`s among them arrive as the
same memory and pipes, since their file descriptors travel with them.

The subtle part is the end. A child whose parent was killed must not continue to train or hold memory. A closed channel ends
a child that reads it. One that computes or hangs is ended by the kernel (PR_SET_PDEATHSIG, Linux) and by a thread that
waits for the parent's end. The kernel's signal alone would not do: it comes when the *thread* that started the child
ends, so only children of the main thread request it.
"""

from __future__ import annotations

import ctypes
import io
import math
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import context, process, reduction
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from whorl.machine import fork_server
from whorl.registry import import_attribute

STOPPED_SECONDS = 5.0  # of a wait, then of each further one, after which stopped children are named
FDS_PER_MESSAGE = 200  # the kernel's limit is 253
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


class Channel(Connection):
    """A `multiprocessing` connection (bytes or pickles, `poll`, `wait`) over a socket pair that also carries descriptors."""

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Return both ends."""
        one, other = socket.socketpair()
        return cls(one.detach()), cls(other.detach())

    def send_with_fd(self, message: Any, fd: int | None = None) -> None:
        """Send an object and optionally a descriptor, which the caller keeps; blocks until the socket has taken all."""
        self.send((message, fd is not None))
        if fd is not None:
            self.send_fds([fd])

    def receive_with_fd(self) -> tuple[Any, int | None]:
        """Return the next object and its descriptor, which the caller then owns.

        Raises:
            EOFError: the other end is closed.
        """
        try:
            message, has_fd = self.recv()
            return message, self.receive_fds(1)[0] if has_fd else None
        except ConnectionError:
            raise EOFError from None

    def send_fds(self, fds: Sequence[int]) -> None:
        with self._socket() as sock:
            for start in range(0, len(fds), FDS_PER_MESSAGE):
                reduction.sendfds(sock, list(fds[start : start + FDS_PER_MESSAGE]))

    def receive_fds(self, n: int) -> list[int]:
        fds: list[int] = []
        with self._socket() as sock:
            while len(fds) < n:
                fds += reduction.recvfds(sock, min(n - len(fds), FDS_PER_MESSAGE))
        return fds

    def shutdown(self) -> None:
        """End the conversation for both ends; wakes a blocked send."""
        with suppress(OSError), self._socket() as sock:
            sock.shutdown(socket.SHUT_RDWR)

    @contextmanager
    def _socket(self) -> Iterator[socket.socket]:
        with socket.socket(fileno=os.dup(self.fileno())) as sock:
            yield sock


class Descriptor:
    """A file descriptor among a child's arguments. The child gets the number of a copy."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        return _ReceivedFd.detach, (reduction.DupFd(self.fd),)


class _ReceivedFd:
    """A descriptor in a pickle: the number of the descriptor among those that follow."""

    received: Sequence[int] = ()  # in the child

    def __init__(self, number: int) -> None:
        self.number = number

    def detach(self) -> int:
        return self.received[self.number]


class _FdCollector:
    """Collects the descriptors in the arguments. The reducers of `multiprocessing` and torch find it in the context."""

    DupFd = _ReceivedFd

    def __init__(self) -> None:
        self.fds: list[int] = []

    def duplicate_for_child(self, fd: int) -> int:
        self.fds.append(fd)
        return len(self.fds) - 1

    def dumps(self, value: Any, share_tensors: bool) -> bytes:
        context.set_spawning_popen(self)  # type: ignore[arg-type]
        try:
            return bytes(reduction.ForkingPickler.dumps(value)) if share_tensors else pickle.dumps(value)
        finally:
            context.set_spawning_popen(None)


class Child:
    """A process that calls `entry(channel, *args)`. It computes with one thread unless it sets another number.

    Args:
        entry: "module:function" of an importable module. EOFError and ConnectionError end it quietly: the parent is gone.
        name: for messages.
        preload: modules that the fork server imports first; none starts a new interpreter.
        nice: added to the priority. policy: "SCHED_BATCH": a wake-up does not preempt other processes; "SCHED_IDLE".
        cores: CPU cores; () for those of this process.
        ignore: signals that the child ignores. A terminal or a scheduler sends them to all processes of a job.
        new_session: `kill` ends the children of the child, too.
        share_tensors: tensors among the arguments are moved to shared memory. Otherwise the child gets copies.
    """

    def __init__(
        self,
        entry: str,
        *args: Any,
        name: str = "",
        preload: Collection[str] = (),
        nice: int = 0,
        policy: str = "",
        cores: Collection[int] = (),
        ignore: Collection[signal.Signals] = (signal.SIGINT,),
        new_session: bool = False,
        share_tensors: bool = False,
    ) -> None:
        self.name, self.new_session, self._killed = name or entry, new_session, False
        collector = _FdCollector()
        environment = {**os.environ, **fork_server.ONE_THREAD}
        payload = collector.dumps((entry, args), share_tensors)
        setup = {
            "name": self.name,
            "sys_path": sys.path,
            "main": getattr(sys.modules["__main__"], "__file__", None),
            "authkey": bytes(process.current_process().authkey),
            "environment": environment,
            "directory": _directory(),
            "parent": os.getpid(),
            "nice": nice,
            "policy": policy,
            "cores": sorted(cores) or _own_cores(),
            "ignore": [int(number) for number in ignore],
            "new_session": new_session,
            "in_main_thread": threading.current_thread() is threading.main_thread(),
            "fds": len(collector.fds),
        }
        self.channel, child_end = Channel.pair()
        self._running: fork_server.NewInterpreter | fork_server.Forked
        with child_end:
            if preload and fork_server.available():
                self._running = fork_server.fork(child_end.fileno(), preload)
            else:
                self._running = fork_server.NewInterpreter(child_end.fileno(), environment)
        self.pid = self._running.pid
        with suppress(ConnectionError):  # it is dead already, which its first reader learns
            self.channel.send(setup)
            self.channel.send_bytes(payload)
            self.channel.send_fds(collector.fds)

    @property
    def sentinel(self) -> Any:
        """An object for `multiprocessing.connection.wait` that is ready when the process has ended."""
        return self._running.sentinel

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None if the process runs."""
        return self._running.poll()

    def wait(self, seconds: float | None = None) -> int | None:
        """Return the exit code after at most `seconds`; None if the process still runs."""
        if self.poll() is None:
            wait([self.sentinel], seconds)
        return self.poll()

    def kill(self) -> int:
        """Kill the process and, with `new_session`, its children, which may outlive it; return its exit code."""
        with suppress(OSError):
            if self.new_session and not self._killed:
                os.killpg(self.pid, signal.SIGKILL)
            elif self.poll() is None:
                os.kill(self.pid, signal.SIGKILL)
        self._killed = True
        code = self.wait()
        assert code is not None
        return code

    def close(self, seconds: float = 5.0) -> int:
        """Close the channel, wait for the end, and kill the process after `seconds`; return its exit code."""
        self.channel.close()
        code = self.wait(seconds)
        return self.kill() if code is None else code

    def is_stopped(self) -> bool:
        """Return whether a signal (SIGSTOP, SIGTSTP) has stopped the process, which then has not ended."""
        import psutil

        with suppress(psutil.Error):
            return bool(psutil.Process(self.pid).status() == psutil.STATUS_STOPPED)
        return False

    def exit_description(self) -> str:
        """Return "NAME (process 17) was killed by SIGKILL" after the end of the process."""
        code = self.poll()
        return f"{self.name} (process {self.pid}) {'runs' if code is None else describe_exit(code)}"


def wait_for(objects: Sequence[Any], seconds: float | None, children: Iterable[Child]) -> list[Any]:
    """Return the objects that are ready after at most `seconds`; None: no limit. See `multiprocessing.connection.wait`.

    A child that a signal has stopped answers nothing and has not ended: a warning names it, and the wait continues.

    children: those on which the objects depend.
    """
    deadline = math.inf if seconds is None else time.monotonic() + seconds
    while True:
        left = deadline - time.monotonic()
        ready: list[Any] = wait(objects, max(0.0, min(left, STOPPED_SECONDS)))
        if ready or left <= STOPPED_SECONDS:
            return ready
        for child in children:
            if child.is_stopped():
                warnings.warn(
                    f"{child.name} (process {child.pid}) is stopped by a signal, and this process waits for it; "
                    f"`kill -CONT {child.pid}` continues it",
                    RuntimeWarning, stacklevel=2,
                )  # fmt: skip


def describe_exit(code: int) -> str:
    """Return what an exit code means, as the end of a sentence."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def run_child(fd: int) -> int:
    """Main function of a child: read the setup and the arguments, call the function, return the exit code."""
    channel = Channel(fd)
    try:
        setup = channel.recv()
        payload = channel.recv_bytes()
        _prepare(setup)
        _ReceivedFd.received = channel.receive_fds(setup["fds"])
        entry, args = _Unpickler(payload, setup["main"]).load()
        import_attribute(entry)(channel, *args)
    except (EOFError, ConnectionError, KeyboardInterrupt):
        return 0
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _prepare(setup: Mapping[str, Any]) -> None:
    if setup["new_session"]:
        os.setsid()
    for number in setup["ignore"]:
        signal.signal(number, signal.SIG_IGN)
    parent = setup["parent"]
    _set_name(setup["name"])
    if setup["in_main_thread"] or os.getppid() != parent:  # a child of the fork server, which has one thread
        die_with_parent(signal.SIGKILL)
    threading.Thread(target=_exit_with, args=(parent,), name="parent", daemon=True).start()
    os.environ.clear()
    os.environ.update(setup["environment"])
    sys.path[:] = setup["sys_path"]
    with suppress(OSError, TypeError):  # it was deleted
        os.chdir(setup["directory"])
    process.current_process().authkey = setup["authkey"]
    os.nice(setup["nice"])
    with suppress(OSError, AttributeError):  # forbidden in some containers, or not Linux
        os.sched_setaffinity(0, setup["cores"])
        if setup["policy"]:
            os.sched_setscheduler(0, getattr(os, setup["policy"]), os.sched_param(0))


def die_with_parent(number: signal.Signals) -> None:
    """Let the kernel send this process a signal when the thread that started it ends. No effect outside of Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def _set_name(name: str) -> None:
    """Set the name of this process for `top` and `ps`, of which Linux keeps 15 bytes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def _exit_with(parent: int) -> None:
    """End this process when the process `parent` ends."""
    try:
        select.select([os.pidfd_open(parent)], [], [])
    except ProcessLookupError:
        pass
    except (AttributeError, OSError):  # not Linux, where there is no fork server either
        while os.getppid() == parent:
            time.sleep(0.5)
    os._exit(1)


def _directory() -> str | None:
    with suppress(OSError):  # it was deleted
        return str(Path.cwd())
    return None


def _own_cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


class _Unpickler(pickle.Unpickler):
    """Imports the parent's main script if an argument's class is defined there."""

    def __init__(self, data: bytes, main: str | None) -> None:
        super().__init__(io.BytesIO(data))
        self._main = main

    def find_class(self, module: str, name: str) -> Any:
        if module == "__main__" and self._main is not None:
            from multiprocessing import spawn

            spawn.import_main_path(self._main)
        return super().find_class(module, name)


# argv: the parent's process id, cores ("0,1", or "" for any), the command. Both settings survive the exec.
_EXEC = """
import os, signal, sys
from whorl.machine.process import die_with_parent
parent, cores, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
die_with_parent(signal.SIGTERM)
if cores and hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {int(c) for c in cores.split(",")})
if os.getppid() != parent:  # the parent died before
    sys.exit(1)
os.execvp(command[0], command)
"""


def start_command(
    command: Sequence[str], cores: Collection[int] = (), env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a command, which gets SIGTERM when this process ends. Call it from a thread that lasts.

    Python code between fork and exec is unsafe in a process with threads. So a short script makes the settings, and then
    becomes the command.
    """
    words = [sys.executable, "-c", _EXEC, str(os.getpid()), ",".join(map(str, cores)), *command]
    return subprocess.Popen(words, env=env, stdin=subprocess.DEVNULL)
