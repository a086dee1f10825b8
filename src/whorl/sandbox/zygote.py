"""The zygote: a small preloaded process without torch that forks once per program and monitors the fork.

Starting an interpreter takes over 20 ms, a fork of this process about 1 ms. The zygote reads a request from standard
input (`length, JSON`: source and limits) and forks. It then reads the second part (tests and examples), which is
therefore not in the fork's memory. While the fork runs, one `poll` waits for its output, its report, its end (a pidfd),
the deadline, and the parent's end. The reply goes to standard output.

    parent --request--> zygote --fork--> child: new session, six descriptors, confined, runs the program
           <--reply--          --tests, then the secret-->
                               <--output, report with the secret--

A child cannot fork, so killing one process kills all that a program started. The child's report counts only with the
secret, which is drawn after the fork. Reasons of the monitor (deadline, output, files) take precedence over the report.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import resource
import secrets
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from whorl.sandbox import work_folder as folder
from whorl.sandbox.confinement import Confinement, ProtectionUnavailable, stdlib_paths
from whorl.sandbox.frames import receive, send
from whorl.sandbox.library_snapshot import LibrarySnapshot
from whorl.sandbox.limits import REASON_KINDS
from whorl.sandbox.program_runner import SECRET_BYTES, ProgramRunner
from whorl.sandbox.unit_tests import compile_tests

PRELOADED_MODULES = """
abc argparse array ast base64 binascii bisect calendar cmath codecs collections.abc colorsys contextlib copy csv
dataclasses datetime decimal difflib doctest enum fractions functools graphlib hashlib heapq html io itertools json
keyword locale math numbers operator os.path pathlib pickle pprint queue random re secrets shutil statistics string
struct tempfile textwrap threading time timeit tokenize traceback types typing unicodedata unittest unittest.mock uuid
warnings weakref zlib zoneinfo _bz2 _lzma _posixsubprocess _sha3 _blake2 select mmap
""".split()  # noqa: SIM905
POLL_SECONDS = 0.02  # interval of the checks of files and threads
REPORT_EXTRA_BYTES = 64 << 10  # maximum report size beyond the output limit


class ForkMonitor:
    """Monitors one fork from its start to its end."""

    def __init__(
        self, pid: int, pipe_ends: dict[str, int], limits: dict[str, Any], folder: Path, to_send: bytes
    ) -> None:
        self.pid, self.pipe_ends, self.limits, self.folder, self.unsent = (
            pid,
            pipe_ends,
            limits,
            folder,
            to_send,
        )
        self.received = {"output": bytearray(), "verdict": bytearray()}
        self.max_bytes = {
            "output": limits["output_bytes"],
            "verdict": limits["output_bytes"] + REPORT_EXTRA_BYTES,
        }
        self.reason = ""

    def kill(self, reason: str) -> None:
        self.reason = self.reason or reason
        os.kill(self.pid, signal.SIGKILL)  # not reaped yet, so the pid is still this process's

    def wait(self) -> tuple[int, Any]:
        """Wait for the end of the fork and return (wait status, resource usage)."""
        deadline = time.monotonic() + self.limits["wall_seconds"]
        process = os.pidfd_open(self.pid)
        poll = select.poll()
        for descriptor in (self.pipe_ends["output"], self.pipe_ends["verdict"], process):
            poll.register(descriptor, select.POLLIN)
        poll.register(self.pipe_ends["control"], select.POLLOUT)
        poll.register(0, 0)  # only the parent's end raises an event
        polls_usage = self.limits["file_bytes"] > 0 or self.limits["processes"] > 1
        running = True
        while running:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                self.kill("time")
            wait = (
                max(0.0, min(remaining, POLL_SECONDS) if polls_usage else remaining)
                if not self.reason
                else 10.0
            )
            for descriptor, event in poll.poll(wait * 1000 + 0.999):
                if descriptor == 0:
                    self.kill("crashed: the parent ended")
                    os.waitpid(self.pid, 0)
                    raise EOFError
                if descriptor == process:
                    running = False
                elif descriptor == self.pipe_ends["control"]:
                    if not (event & select.POLLOUT and self._write_pending()):
                        poll.unregister(descriptor)
                elif not self._read_available(
                    "output" if descriptor == self.pipe_ends["output"] else "verdict"
                ):
                    poll.unregister(descriptor)
            if running and polls_usage and not self.reason:
                self._check_usage()
        os.close(process)
        _, status, used = os.wait4(self.pid, 0)
        while self._read_available("output") or self._read_available("verdict"):
            pass
        return status, used

    def _write_pending(self) -> bool:
        """Write pending bytes; return False if none remain or the reader is gone."""
        try:
            self.unsent = self.unsent[os.write(self.pipe_ends["control"], self.unsent) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            return False
        return bool(self.unsent)

    def _read_available(self, what: str) -> bool:
        """Read available bytes; return False at the end of the stream (or, after the child's end, if none remain)."""
        try:
            data = os.read(self.pipe_ends[what], 1 << 16)
        except BlockingIOError:
            return False
        buffer = self.received[what]
        buffer += data
        if len(buffer) > self.max_bytes[what]:
            del buffer[self.max_bytes[what] :]
            if not self.reason:
                with contextlib.suppress(ProcessLookupError):
                    self.kill("output")
                self.reason = "output"
        return bool(data)

    def _check_usage(self) -> None:
        if self.limits["file_bytes"] and folder.used_bytes(self.folder) > self.limits["file_bytes"]:
            self.kill("files")
        with contextlib.suppress(OSError, IndexError):
            threads = int(Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[17])
            if threads > self.limits["processes"]:
                self.kill("threads")


class Zygote:
    """Preloaded state; `serve` runs until the parent ends."""

    def __init__(self, work_folder: Path, allow_missing: frozenset[str]) -> None:
        for name in PRELOADED_MODULES:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(
                "1000"
            )  # if memory runs out, the kernel kills programs first
        os.chdir(work_folder)
        sys.path[:] = stdlib_paths()
        self.work_folder = work_folder
        self.confinement = Confinement(work_folder, allow_missing)
        self.library_snapshot = LibrarySnapshot(exclude=("whorl", "ctypes", "_ctypes", "__main__"))

    def serve(self) -> None:
        gc.freeze()  # a collection in a fork would touch, and so copy, the zygote's pages
        with contextlib.suppress(EOFError, BrokenPipeError):  # the parent may be killed at any time
            send(1, {"ready": os.getpid()})
            while True:
                send(1, self.run_program(receive(0)))
        self.shut_down()

    def shut_down(self) -> NoReturn:
        """Remove the folder, since the parent is gone, and exit."""
        with contextlib.suppress(OSError):
            folder.clear(self.work_folder)
            self.work_folder.rmdir()
            self.work_folder.parent.rmdir()
        os._exit(0)

    def run_program(self, head: dict[str, Any]) -> dict[str, Any]:
        """Run one program and return its report. Reads the second part of the request."""
        limits = head["limits"]
        start_time = time.perf_counter()
        pairs = {name: os.pipe() for name in ("output", "verdict", "control")}
        zygote_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                self._run_child(head, pairs, zygote_pid)
            finally:
                os._exit(70)
        secret = secrets.token_bytes(SECRET_BYTES)
        tail = json.dumps(_compiled(receive(0))).encode() if head["has_checks"] else b""
        ends = {"control": pairs["control"][1], "output": pairs["output"][0], "verdict": pairs["verdict"][0]}
        for name, (readable, writable) in pairs.items():
            os.close(readable if name == "control" else writable)
            os.set_blocking(ends[name], False)
        prefix = len(tail).to_bytes(4, "little") + tail if head["has_checks"] else b""
        monitor = ForkMonitor(pid, ends, limits, self.work_folder, prefix + secret)
        status, used = monitor.wait()
        for end in ends.values():
            os.close(end)
        folder.clear(self.work_folder)
        received = bytes(monitor.received["verdict"])
        report: dict[str, Any] = {
            "reason": _exit_reason(status, used, limits, received),
            "example_outputs": [],
        }
        if monitor.reason:
            report["reason"] = monitor.reason
        elif received.startswith(secret) and os.waitstatus_to_exitcode(status) == 0:
            report = parse_report(received[SECRET_BYTES:])
        output = bytes(monitor.received["output"]).decode("utf-8", "replace")
        return {**report, "output": output, "seconds": time.perf_counter() - start_time}

    def _run_child(self, head: dict[str, Any], pairs: dict[str, tuple[int, int]], parent: int) -> NoReturn:
        """In the fork: apply the confinement, then run the program."""
        limits = head["limits"]
        os.setsid()
        self.confinement.die_with_parent(parent)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, to in ((null, 0), (pairs["output"][1], 1), (pairs["output"][1], 2)):
            os.dup2(source, to)
        # Random numbers, so that the program cannot predict them. Most are above its descriptor limit.
        control, verdict = random.SystemRandom().sample(range(32, 900), 2)
        highest = max(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1024)
        for source, to in ((pairs["control"][0], control), (pairs["verdict"][1], verdict)):
            os.dup2(source, to, inheritable=False)
        rules = {self.confinement.landlock_ruleset, self.confinement.read_only_ruleset} - {-1}
        keep = sorted({control, verdict} | rules)
        for low, high in zip([2, *keep], [*keep, min(highest, 1 << 20)], strict=True):
            os.closerange(low + 1, high)
        try:
            self.confinement.apply(
                limits["wall_seconds"], limits["cpu_seconds"], limits["memory_bytes"], limits["file_bytes"],
                limits["processes"] > 1,
            )  # fmt: skip
        except (ProtectionUnavailable, OSError) as error:
            os.write(verdict, f"unconfined {error}".encode())
            os._exit(71)
        for rule in rules:
            os.close(rule)
        child = ProgramRunner(self.library_snapshot, control, verdict)
        _remove_own_modules()
        child.run(head["source"], head["has_checks"])


def _remove_own_modules() -> None:
    """Hide the environment, Whorl's modules, and ctypes (which reads any memory) from the program.

    ctypes cannot be loaded again: its library cannot be opened, and no memory can become executable.
    """
    os.environ.clear()
    for name in [n for n in sys.modules if n.split(".")[0] in ("whorl", "ctypes", "_ctypes", "__main__")]:
        module = sys.modules.pop(name)
        if "ctypes" in name:
            vars(module).clear()
    sys.modules["ctypes"] = sys.modules["_ctypes"] = None  # type: ignore[assignment]


def _compiled(checks: dict[str, Any]) -> dict[str, Any]:
    """Return the second part of a request with its tests as code, in hexadecimal, or with the error of their source."""
    code = compile_tests(checks["tests"]) if checks["tests"] else b""
    error = code if isinstance(code, str) else ""
    return {
        "tests": "" if isinstance(code, str) else code.hex(),
        "examples": checks["examples"],
        "error": error,
    }


def parse_report(data: bytes) -> dict[str, Any]:
    """Return a report with the exact shape that the parent reads; anything else counts as a crash.

    A program that finds the secret may write what it likes. Text that is not valid Unicode is escaped.
    """
    try:
        report = json.loads(data)
        reason, outputs = _text(report["reason"]), report["example_outputs"]
        pairs = [(_text(text), None if error is None else _text(error)) for text, error in outputs]
        if reason.split(":", 1)[0] not in REASON_KINDS:
            raise ValueError(f"unknown reason {reason[:40]!r}")
        return {"reason": reason, "example_outputs": pairs}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        why = f"crashed: the program wrote a malformed report ({type(error).__name__})"
        return {"reason": why, "example_outputs": []}


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"{type(value).__name__} in place of text")
    return value.encode("utf-8", "backslashreplace").decode()


def _exit_reason(status: int, used: Any, limits: dict[str, Any], received: bytes) -> str:
    """Return the reason for a process that ended without a report."""
    code = os.waitstatus_to_exitcode(status)
    if code == 71:
        return "crashed: " + received.decode("utf-8", "replace")
    if code >= 0:
        return f"exited: the process ended with {code} before the program ended"
    if (
        -code in (signal.SIGKILL, signal.SIGXCPU)
        and used.ru_utime + used.ru_stime >= limits["cpu_seconds"] * 0.5
    ):  # the kernel counts coarse ticks
        return "cpu"
    return f"crashed: signal {-code} ({signal.strsignal(-code)})"


def main() -> None:
    """Entry point of the process; the arguments are the folder and the protections that may be missing."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    try:
        zygote = Zygote(Path(sys.argv[1]), frozenset(sys.argv[2:]))
    except ProtectionUnavailable as error:
        send(1, {"missing": error.name, "reason": error.reason})
        return
    zygote.serve()
