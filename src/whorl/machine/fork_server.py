"""The fork server: a process with one thread that has imported large modules, and forks children that need them.

`import torch` takes two seconds of CPU, in each new interpreter. Forks of a process that has it start at once and share
its memory. A process with threads or a CUDA context cannot be forked safely, so the server has neither: it imports
modules and forks, nothing else.

    owner    preload names, then descriptors [channel, status, stdout, stderr]
    server   imports, forks; the child's pid over `status`, and its exit code when it ends

The server starts with the first child and ends when its owner does, which closes the control channel. Its children
then get SIGKILL from the kernel. Linux only (pidfd); elsewhere `available` is False, and children are new interpreters.
`WHORL_FORK_SERVER=0` has the same effect.
"""

from __future__ import annotations

import atexit
import importlib
import os
import random
import select
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from multiprocessing import reduction
from multiprocessing.connection import Connection, Pipe
from socket import socket, socketpair

_PID, _CODE = struct.Struct("<q"), struct.Struct("<i")
_BOOTSTRAP = """
import sys
from whorl.machine.fork_server import main
from whorl.machine.process import run_child
main(int(sys.argv[1]), run_child)
"""
_NEW_INTERPRETER = (
    "import sys; from whorl.machine.process import run_child; sys.exit(run_child(int(sys.argv[1])))"
)
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1") | {
    "JE_ARROW_MALLOC_CONF": "background_thread:false"  # of pyarrow's allocator
}


def available() -> bool:
    """Whether children can be forked here."""
    return hasattr(os, "pidfd_open") and os.environ.get("WHORL_FORK_SERVER", "") != "0"


class Forked:
    """A child of the server. `sentinel` is ready when it has ended."""

    def __init__(self, status: Connection) -> None:
        self.sentinel = status
        self._code: int | None = None
        self.pid: int = _PID.unpack(status.recv_bytes())[0]
        if self.pid < 0:
            raise OSError(-self.pid, f"no process could be forked: {os.strerror(-self.pid)}")

    def poll(self) -> int | None:
        if self._code is None and self.sentinel.poll():
            try:
                self._code = _CODE.unpack(self.sentinel.recv_bytes())[0]
            except (EOFError, OSError):  # the server died, and the kernel killed its children
                self._code = -signal.SIGKILL
        return self._code


class NewInterpreter:
    """A child that is a new interpreter, where none can be forked."""

    def __init__(self, fd: int, environment: Mapping[str, str]) -> None:
        path = os.pathsep.join(p for p in sys.path if p)
        self._popen = subprocess.Popen(
            [sys.executable, "-c", _NEW_INTERPRETER, str(fd)],
            pass_fds=(fd,),
            stdin=subprocess.DEVNULL,
            env={**environment, "PYTHONPATH": path},
        )
        self.pid = self._popen.pid
        self.sentinel = _Sentinel(self._popen)

    def poll(self) -> int | None:
        return self._popen.poll()


class _Sentinel:
    """A pidfd; on systems without, a pipe that a waiting thread closes."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        try:
            self._end = Connection(os.pidfd_open(popen.pid), writable=False)
        except (AttributeError, OSError):
            self._end, other = Pipe(duplex=False)
            threading.Thread(target=_close_after, args=(popen, other), daemon=True).start()

    def fileno(self) -> int:
        return self._end.fileno()


def _close_after(popen: subprocess.Popen[bytes], end: Connection) -> None:
    popen.wait()
    end.close()


class _Server:
    """The owner's side. It starts again if it died, or in a fork of the owner."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.owner = 0  # the process that started it
        self.control: Connection

    def fork(self, channel: int, preload: Collection[str]) -> Forked:
        with self.lock:
            try:
                return self._request(channel, preload)
            except (EOFError, ConnectionError):  # it died
                self.owner = 0
            try:
                return self._request(channel, preload)
            except EOFError as error:
                raise OSError("the fork server died") from error

    def _request(self, channel: int, preload: Collection[str]) -> Forked:
        if self.owner != os.getpid():
            self._start()
        own_end, other_end = socketpair()
        with other_end:
            self.control.send_bytes(",".join(preload).encode())
            with socket(fileno=os.dup(self.control.fileno())) as sock:
                reduction.sendfds(sock, [channel, other_end.fileno(), 1, 2])
        return Forked(Connection(own_end.detach()))

    def _start(self) -> None:
        own_end, other_end = socketpair()
        with other_end:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOTSTRAP, str(other_end.fileno())],
                pass_fds=(other_end.fileno(),),
                stdin=subprocess.DEVNULL,
                env={**os.environ, **ONE_THREAD, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            )
        self.control, self.owner = Connection(own_end.detach()), os.getpid()

    def close(self) -> None:
        """End the server, at the exit of its owner."""
        if self.owner == os.getpid():
            self.owner = 0
            self.control.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
            self._process.kill()
            self._process.wait()


_SERVER = _Server()
fork = _SERVER.fork
atexit.register(_SERVER.close)


def main(control_fd: int, run_child: Callable[[int], int]) -> None:
    """Main function of the server. run_child: runs a child on a channel and returns its exit code."""
    control = Connection(control_fd)
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
    ):  # sent to all processes of a job; the owner handles them
        signal.signal(number, signal.SIG_IGN)
    children: dict[int, tuple[int, Connection]] = {}  # by pidfd: pid and status
    while True:
        ready, _, _ = select.select([control_fd, *children], [], [])
        for pidfd in ready:
            if pidfd != control_fd:
                pid, status = children.pop(pidfd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with suppress(OSError), status:
                    status.send_bytes(_CODE.pack(code))
                os.close(pidfd)
        if control_fd in ready:
            try:
                names = control.recv_bytes().decode().split(",")
                with socket(fileno=os.dup(control_fd)) as sock:
                    channel, status_fd, out, err = reduction.recvfds(sock, 4)
            except (EOFError, OSError):
                os._exit(0)  # the owner ended
            for name in names:
                with suppress(ImportError):  # the child reports it
                    importlib.import_module(name)
            status = Connection(status_fd)
            try:
                pid = os.fork()
            except OSError as error:  # no memory or no process number
                pid = -(error.errno or 1)
            if pid == 0:
                others = [control, status, *(s for _, s in children.values())]
                _become_child(out, err, others, list(children))
                os._exit(run_child(channel))
            if pid > 0:
                children[os.pidfd_open(pid)] = pid, status
            with suppress(OSError):
                status.send_bytes(_PID.pack(pid))
            for fd in (channel, out, err):
                os.close(fd)


def _become_child(out: int, err: int, others: Collection[Connection], pidfds: Collection[int]) -> None:
    """Drop what belongs to the server, and take over the owner's streams."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    for other in others:
        other.close()
    for pidfd in pidfds:
        os.close(pidfd)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
