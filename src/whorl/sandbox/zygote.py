"""The zygote: a small preloaded process without torch that forks per program and monitors the forks.

Starting an interpreter takes over 20 ms, a fork of this process about 1 ms. The zygote reads a request from standard
input (`length, JSON`: source and limits) and forks the processes of the program and of its tests. It then reads the
second part (tests and examples), which is therefore not in the memory of the first.

    parent --request--> zygote --fork--> program: new session, five descriptors, confined (`program_runner.py`)
                               --fork--> tests: the same confinement (`test_process.py`); it waits
                               <--its statements are over-- program
           <--reply--          --source of the tests--> tests
                                         tests <--calls, values--> program
                               <--reason-- tests

Only the process of the tests holds the pipe of the reason, and no statement of the program runs in it. A child cannot
fork, so killing two processes kills all that a program started.
"""

from __future__ import annotations

import base64
import contextlib
import gc
import importlib
import json
import os
import random
import resource
import secrets
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from whorl.sandbox import work_folder as folder
from whorl.sandbox.confinement import Confinement, ConfinementCall, ProtectionUnavailable, stdlib_paths
from whorl.sandbox.frames import receive, send, write_frame
from whorl.sandbox.limits import REASON_KINDS
from whorl.sandbox.monitor import Monitor
from whorl.sandbox.program_runner import ProgramRunner, StandardStreams
from whorl.sandbox.rpc.event_loop import install_policy
from whorl.sandbox.test_process import TestRunner

PRELOADED_MODULES = """
abc argparse array ast base64 binascii bisect calendar cmath codecs collections.abc colorsys contextlib copy csv
dataclasses datetime decimal difflib doctest enum fractions functools graphlib hashlib heapq html io itertools json
keyword locale math numbers operator os.path pathlib pickle pprint queue random re secrets shutil statistics string
struct tempfile textwrap threading time timeit tokenize traceback types typing unicodedata unittest unittest.mock uuid
warnings weakref zlib zoneinfo _bz2 _lzma _posixsubprocess _sha3 _blake2 select mmap
""".split()  # noqa: SIM905
FORBIDDEN = ("[Errno 1] Operation not permitted", "can't start new thread")
FORBIDDEN_HINT = " (not allowed in the sandbox; docs/sandbox.md lists what is not)"
MANY_ENTRIES = 32  # entries of the work folder that are removed at once; more are removed by another process


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
        install_policy()
        random.seed(0)  # deterministic verdicts
        hide_modules()
        streams = StandardStreams()
        self.program_runner, self.test_runner = ProgramRunner(streams), TestRunner(streams)
        self.null = os.open(os.devnull, os.O_RDONLY)
        self.descriptors = min(max(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1024), 1 << 20)
        self.cleaners: list[int] = []  # processes that remove the folders of earlier programs

    def serve(self) -> None:
        gc.freeze()  # a collection in a fork would touch, and so copy, the zygote's pages
        with contextlib.suppress(EOFError, BrokenPipeError):  # the parent may be killed at any time
            send(1, {"ready": os.getpid()})
            while True:
                send(1, self.run_program(receive(0)))
        self.shut_down()

    def shut_down(self) -> NoReturn:
        """Remove the folder, since the parent is gone, and exit."""
        for pid in self.cleaners:
            os.waitpid(pid, 0)
        with contextlib.suppress(OSError):
            folder.clear(self.work_folder.parent)
            self.work_folder.parent.rmdir()
        os._exit(0)

    def run_program(self, head: dict[str, Any]) -> dict[str, Any]:
        """Run one program and return its report. Reads the second part of the request."""
        start_time = time.perf_counter()
        pairs = [os.pipe() for _ in range(5 if head["has_checks"] else 3)]
        (output, output_end), (requests_end, requests), (replies, replies_end), *own = pairs
        limits, program_runner, test_runner = head["limits"], self.program_runner, self.test_runner
        folder.write_files(self.work_folder, head["files"])
        calls = self.confinement.prepare(
            limits["cpu_seconds"], limits["memory_bytes"], limits["file_bytes"], limits["processes"] > 1
        )
        pids = [
            self._fork(
                [requests_end, replies_end], output_end, calls, replies_end,
                lambda: program_runner.run(head["source"], head["has_checks"], requests_end, replies_end),
            )
        ]  # fmt: skip
        tests = verdict = -1
        if own:  # at once: the zygote has changed few pages since the first fork
            (tests_end, tests), (verdict, verdict_end) = own
            keep = [tests_end, requests, replies, verdict_end]
            pids.append(
                self._fork(
                    keep, output_end, calls, verdict_end,
                    lambda: test_runner.run(tests_end, replies, requests, verdict_end),
                )
            )  # fmt: skip
            os.close(tests_end)
            os.close(verdict_end)
        for end in (output_end, requests_end, replies_end):
            os.close(end)
        os.set_blocking(output, False)
        checks = base64.b64decode(receive(0)) if head["has_checks"] else b""
        monitor = Monitor(limits, self.work_folder, output)
        monitor.pids += pids
        try:
            reason, outputs = self._collect(monitor, replies, tests, verdict, checks)
        finally:
            for end in {output, requests, replies, tests, verdict} - {-1}:
                os.close(end)
            if monitor.pids:
                monitor.kill_all()
        kept: dict[str, Any] = {}
        if head["keep_files"]:
            kept["files"], kept["left_out"] = folder.read_files(self.work_folder, limits["file_bytes"])
        self._clear_folder()
        return {
            **kept,
            "reason": monitor.reason or reason,
            "example_outputs": [] if monitor.reason else outputs,
            "output": bytes(monitor.output).decode("utf-8", "replace"),
            "seconds": time.perf_counter() - start_time,
        }

    def _fork(
        self,
        keep: list[int],
        output: int,
        calls: list[ConfinementCall],
        report: int,
        run: Callable[[], NoReturn],
    ) -> int:
        """Return the pid of a confined fork that keeps some descriptors and runs a function."""
        zygote_pid = os.getpid()
        rules = {self.confinement.landlock_ruleset, self.confinement.read_only_ruleset} - {-1}
        kept = sorted({*keep, *rules})
        pid = os.fork()
        if pid == 0:
            try:
                self._enter_child(kept, rules, output, calls, zygote_pid, report)
                run()
            finally:
                os._exit(70)
        return pid

    def _collect(
        self, monitor: Monitor, replies: int, tests: int, verdict: int, checks: bytes
    ) -> tuple[str, list[tuple[str, str | None]]]:
        """Return the reason and the outputs of the examples, after the end of all processes."""
        os.set_blocking(replies, False)
        frame = monitor.read_frame(replies)
        reason, outputs = ("", []) if frame is None else parse_report(frame)
        if reason == "passed" and checks:
            os.set_blocking(replies, True)  # only the tests read it from now on
            os.set_blocking(tests, False)
            os.set_blocking(verdict, False)
            frame = monitor.read_frame(verdict, tests, len(checks).to_bytes(4, "little") + checks)
            reason = "failed: the process of the tests ended before them"
            if frame is not None:
                reason, outputs = parse_report(frame)
            reason = reason.removeprefix("exited")
        if not reason and not monitor.reason:  # the program closed its pipe: it has ended, or will not answer
            monitor.wait_end(monitor.pids[0])
        status, used = monitor.kill_all()[0]
        return reason or _exit_reason(status, used, monitor.limits), outputs

    def _clear_folder(self) -> None:
        """Empty the work folder. A full one is renamed, replaced, and removed by another process meanwhile."""
        self.cleaners = [pid for pid in self.cleaners if os.waitpid(pid, os.WNOHANG)[0] == 0]
        if folder.is_empty(self.work_folder):
            return
        if not folder.has_many(self.work_folder, MANY_ENTRIES):
            folder.clear(self.work_folder)
            return
        aside = self.work_folder.with_name(f"removed-{secrets.token_hex(8)}")
        self.work_folder.rename(aside)
        self.work_folder.mkdir()
        os.chdir(self.work_folder)
        self.confinement.replace_rulesets()
        zygote_pid = os.getpid()
        pid = os.fork()
        if pid:
            self.cleaners.append(pid)
            return
        try:
            self.confinement.die_with_parent(zygote_pid)
            os.closerange(0, 3)
            os.nice(19)
            folder.clear(aside)
            aside.rmdir()
        finally:
            os._exit(0)

    def _enter_child(
        self,
        kept: list[int],
        rules: set[int],
        output: int,
        calls: list[ConfinementCall],
        zygote_pid: int,
        report: int,
    ) -> None:
        """In a fork: close all descriptors except `kept`, confine the process, and forget what leads outside."""
        os.setsid()
        self.confinement.die_with_parent(zygote_pid)
        for source, to in ((self.null, 0), (output, 1), (output, 2)):
            os.dup2(source, to)
        for low, high in zip([2, *kept], [*kept, self.descriptors], strict=True):
            os.closerange(low + 1, high)
        try:
            self.confinement.apply(calls)
        except (ProtectionUnavailable, OSError) as error:
            write_frame(report, json.dumps({"reason": f"crashed: unconfined {error}"}).encode())
            os._exit(71)
        for rule in rules:
            os.close(rule)
        calls.clear()  # the frames below keep these objects, and they hold functions of libc
        vars(self.confinement).clear()
        vars(self).clear()


def hide_modules() -> None:
    """Hide the environment, Whorl's modules, and ctypes (which reads any memory) from all later forks.

    ctypes cannot be loaded again: its library cannot be opened, and no memory can become executable.
    """
    os.environ.clear()
    for name in [n for n in sys.modules if n.split(".")[0] in ("whorl", "ctypes", "_ctypes", "__main__")]:
        module = sys.modules.pop(name)
        if "ctypes" in name:
            vars(module).clear()
    sys.modules["ctypes"] = sys.modules["_ctypes"] = None  # type: ignore[assignment]


def parse_report(frame: bytes) -> tuple[str, list[tuple[str, str | None]]]:
    """Return the reason, and the outputs of examples, of a report that may be forged.

    Anything but a text of a known kind counts as a crash.
    """
    try:
        report = json.loads(frame)
        reason = _text(report["reason"])
        if reason.split(":", 1)[0] not in REASON_KINDS:
            raise ValueError(f"unknown reason {reason[:40]!r}")
        outputs = [
            (_text(text), None if error is None else _text(error))
            for text, error in report.get("outputs", [])
        ]
        return reason + FORBIDDEN_HINT * reason.endswith(FORBIDDEN), outputs
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        return f"crashed: the program wrote a malformed report ({type(error).__name__})", []


def _text(value: Any) -> str:
    """Return a text with valid Unicode; raise TypeError for any other value."""
    if type(value) is not str:
        raise TypeError(f"{type(value).__name__} in place of text")
    return value.encode("utf-8", "backslashreplace").decode()


def _exit_reason(status: int, used: Any, limits: dict[str, Any]) -> str:
    """Return the reason for a process that ended without a report."""
    code = os.waitstatus_to_exitcode(status)
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
