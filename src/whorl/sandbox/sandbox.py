"""Run untrusted programs: many, small, in parallel.

A model writes programs and a reward depends on whether they work. Search finds every shortcut to the reward, such as
`os._exit(0)`, a faked report or a fork bomb. A training step needs 128 verdicts or more while the learner waits.

    with Sandbox(ResourceLimits(wall_seconds=1), workers=2) as sandbox:
        results = sandbox.run_all([Program(source, tests="assert add(1, 2) == 3"), ...])

Each worker is a zygote (`zygote.py`), a preloaded process that forks per program. The fork confines itself
(`confinement.py`, `seccomp.py`) and runs the program (`program_runner.py`). A second fork runs the tests, which call the
program's functions from there (`test_process.py`, `rpc/`). The protections are

    separate processes and sessions that cannot create processes and are killed as a whole
    files: read the interpreter's library, read and write the work folder, access no other      (Landlock)
    system calls: no sockets, exec, signals to others, or any call outside a short list         (seccomp)
    no capabilities, no environment, no inherited descriptors; limits on time, memory, files, output

Each worker applies and *tests* them before its first program; `protections()` returns the active ones. Without a
required one the sandbox does not start, unless `allow_missing` names it.

A worker that is killed, stopped or stuck is restarted. Its current program counts as crashed; no other is lost. For the
remaining weaknesses see `confinement.py` and `docs/sandbox.md`. To protect valuable secrets use a virtual machine.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import selectors
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from whorl.errors import ConfigError, WhorlError, one_of
from whorl.sandbox.frames import receive_with_deadline, send
from whorl.sandbox.limits import ExampleOutput, Program, ProgramResult, ResourceLimits
from whorl.sandbox.unit_tests import compile_checks
from whorl.sandbox.work_folder import check_paths, clear

REQUIRED_PROTECTIONS = ("landlock", "seccomp")
GRACE_SECONDS = 10.0  # time beyond a program's wall_seconds before its worker counts as stuck
START_SECONDS = 60.0
# The library's hooks after a fork are left out: they change many pages, and a program's process forks no other.
_BOOTSTRAP = "import os, sys; os.register_at_fork = lambda **hooks: None; sys.path.append(sys.argv.pop(1)); "
_BOOTSTRAP += "from whorl.sandbox.zygote import main; main()"

# Runs first in each worker. Prints the protection of every attempt that should fail but succeeds.
_PROBE_PROGRAM = """
import os
def attempt(name, f):
    try:
        f()
    except (OSError, RuntimeError, MemoryError):
        return
    print(name)
attempt("landlock", lambda: os.listdir("/"))
attempt("landlock", lambda: open("/proc/self/environ").read())
attempt("landlock", lambda: open("../escaped", "w"))
attempt("seccomp", lambda: os.fork() or os._exit(0))
attempt("seccomp", lambda: os.execv("/bin/true", ["true"]))
attempt("seccomp", lambda: os.kill(os.getppid(), 0))
attempt("seccomp", lambda: os.chmod(".", 0o700))
attempt("limits", lambda: bytearray({memory}))
if os.environ: print("environment")
"""


class SandboxWorker:
    """One zygote, as used by the parent. Raises ConfigError if a protection is missing."""

    def __init__(self, allow_missing: frozenset[str]) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="whorl-sandbox-"))
        (self.root / "box").mkdir()
        package_parent = str(Path(__file__).parents[2])
        options = ["-P", "-s", "-S", "-B", "-c", _BOOTSTRAP, package_parent, str(self.root / "box")]
        self.process = subprocess.Popen(
            [sys.executable, *options, *sorted(allow_missing)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # Deterministic verdicts; addresses of functions are resolved at the start, not after each fork.
            env={"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "LD_BIND_NOW": "1"},
            start_new_session=True,  # Ctrl-C only reaches the parent
            bufsize=0,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.request_fd, self.reply_fd = self.process.stdin.fileno(), self.process.stdout.fileno()
        self.job = -1  # index of the current program; -1 if idle
        self.deadline = 0.0
        ready = self.read_reply(time.monotonic() + START_SECONDS)
        if ready is None or "missing" in ready:
            self.kill()
        if ready is None:
            raise WhorlError(
                "a sandbox worker did not start",
                expected=f"{sys.executable} to start and import the standard library",
                do="check free memory and the process limit (ulimit -u), then try again",
            )
        if "missing" in ready:
            raise _missing_protection(ready["missing"], ready["reason"])

    def submit(self, program: Program, limits: ResourceLimits, job: int) -> None:
        """Send a program. A worker that has ended is detected when its reply is read."""
        has_checks = bool(program.tests or program.examples)
        parts: list[Any] = [
            {
                "source": program.source, "limits": dataclasses.asdict(limits),
                "has_checks": has_checks, "keep_files": program.keep_files,
                "files": {name: base64.b64encode(data).decode() for name, data in program.files.items()},
            }
        ]  # fmt: skip
        if has_checks:
            parts.append(base64.b64encode(compile_checks(program.tests, program.examples)).decode())
        self.job, self.deadline = job, time.monotonic() + limits.wall_seconds + GRACE_SECONDS
        with contextlib.suppress(BrokenPipeError):
            for part in parts:
                send(self.request_fd, part)

    def read_reply(self, deadline: float) -> Any:
        """Return the worker's next reply, or None if it ended or sent no complete reply before the deadline."""
        return receive_with_deadline(self.reply_fd, deadline)

    def kill(self) -> None:
        """Kill the zygote; its child dies with it."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        with contextlib.suppress(OSError):
            clear(self.root)
            self.root.rmdir()


class Sandbox:
    """Runs untrusted programs, `workers` at a time. A context manager; methods may be called from several threads.

    Args:
        limits: limits of each program.
        workers: number of parallel programs; at most the number of free cores.
        allow_missing: protections that may be missing on this machine ("landlock", "seccomp"). Only for programs that
            are known to be harmless.

    Raises:
        ConfigError: not Linux; a required protection is missing; workers below 1.
        WhorlError: a worker does not start.
    """

    def __init__(
        self, limits: ResourceLimits | None = None, workers: int = 2, allow_missing: Collection[str] = ()
    ) -> None:
        self.limits, self.allow_missing = limits or ResourceLimits(), frozenset(allow_missing)
        if not sys.platform.startswith("linux"):
            raise ConfigError(
                f"programs cannot be confined on {sys.platform}",
                expected="Linux 5.13 or later: confinement uses Landlock and seccomp",
                do="run this step on Linux (a container or virtual machine suffices)",
            )
        if workers < 1:
            raise ConfigError(f"sandbox: workers is {workers}", expected="at least 1")
        for name in self.allow_missing:
            if name not in REQUIRED_PROTECTIONS:
                raise ConfigError(
                    f"sandbox: allow_missing names {name!r}", expected=one_of(name, REQUIRED_PROTECTIONS)
                )
        self.restarts = 0
        self._lock = threading.Lock()
        self._closed = False
        self._workers: list[SandboxWorker | None] = [None] * workers
        self._active_protections: dict[str, str] = {}
        try:
            self._workers = [self._start_worker() for _ in range(workers)]
        except BaseException:
            self.close()
            raise

    def protections(self) -> dict[str, str]:
        """Return the protections that were active when the workers started, with a description of each."""
        return dict(self._active_protections)

    def run(self, program: Program | str) -> ProgramResult:
        """Run one program."""
        return self.run_all([program])[0]

    def run_all(self, programs: Sequence[Program | str]) -> list[ProgramResult]:
        """Run programs, each in a separate process, and return their results in order.

        A program counts as crashed if it crashes its worker or if its worker is killed. Other programs are not
        affected.

        Raises:
            ConfigError: the sandbox is closed, or a path of a program's files leads out of its folder.
            WhorlError: a worker that ended cannot be restarted.
        """
        jobs = [Program(p) if isinstance(p, str) else p for p in programs]
        for program in jobs:
            check_paths(program.files)
        results: list[ProgramResult | None] = [None] * len(jobs)
        pending = deque(range(len(jobs)))
        with self._lock:
            if self._closed:
                raise ConfigError("the sandbox is closed", do="create a new one")
            try:
                while pending or self._busy():
                    for index, worker in enumerate(self._workers):
                        if pending and (worker is None or worker.job < 0):
                            if worker is None:
                                worker = self._workers[index] = self._start_worker()
                            worker.submit(jobs[pending[0]], self.limits, pending.popleft())
                    for index, worker in self._ready():
                        job, worker.job = worker.job, -1
                        results[job] = self._collect_result(worker, index)
            finally:
                # Interrupted: later replies would be assigned to other programs.
                for index, worker in self._busy():
                    worker.kill()
                    self._workers[index] = None
        return [o for o in results if o is not None]

    def close(self) -> None:
        """Stop the workers. Further calls do nothing."""
        self._closed = True
        for worker in self._workers:
            if worker is not None:
                worker.kill()
        self._workers = []

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _busy(self) -> list[tuple[int, SandboxWorker]]:
        return [(i, w) for i, w in enumerate(self._workers) if w is not None and w.job >= 0]

    def _ready(self) -> list[tuple[int, SandboxWorker]]:
        """Return busy workers that have a reply or are past their deadline."""
        busy = self._busy()
        with selectors.DefaultSelector() as selector:
            for index, worker in busy:
                selector.register(worker.reply_fd, selectors.EVENT_READ, index)
            first = min(w.deadline for _, w in busy)
            readable = {key.data for key, _ in selector.select(max(0.0, first - time.monotonic()))}
        return [(i, w) for i, w in busy if i in readable or w.deadline <= time.monotonic()]

    def _collect_result(self, worker: SandboxWorker, index: int) -> ProgramResult:
        reply = worker.read_reply(worker.deadline)
        if reply is None:
            self._workers[index] = None
            self.restarts += 1
            worker.kill()
            why = f"crashed: the sandbox worker ended ({worker.process.returncode})"
            return ProgramResult(ok=False, reason=why, output="", seconds=0.0)
        return _parse_result(reply)

    def _start_worker(self) -> SandboxWorker:
        """Start a worker and test that its protections hold."""
        worker = SandboxWorker(self.allow_missing)
        try:
            limits = dataclasses.replace(self.limits, wall_seconds=30, cpu_seconds=30, output_bytes=4096)
            worker.submit(Program(_PROBE_PROGRAM.format(memory=2 * self.limits.memory_bytes)), limits, 0)
            worker.deadline = time.monotonic() + START_SECONDS
            reply = worker.read_reply(worker.deadline)
            worker.job = -1
            result = _parse_result(reply) if reply is not None else None
            if result is None or not result.ok:
                why = result.reason if result else "it ended"
                raise WhorlError(f"a sandbox worker failed its probes: {why}", expected="all probes to run")
            failed = set(result.output.split())
            for name in sorted(failed - self.allow_missing):
                raise _missing_protection(name, "a probe that it should block succeeded")
            self._active_protections = {n: t for n, t in _PROTECTION_TEXT.items() if n not in failed}
        except BaseException:
            worker.kill()
            raise
        return worker


_PROTECTION_TEXT = {
    "process": "a separate process and session per program, killed as a whole",
    "limits": "time, memory, file size, output, descriptors",
    "environment": "empty",
    "landlock": "read the interpreter's library and the work folder, write the work folder",
    "seccomp": "no sockets, exec, fork, signals to others, or any call outside a short list",
}


def _missing_protection(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"programs cannot be confined here: {name} is missing ({why})",
        expected="Linux 5.13 or later on x86-64 or aarch64, with Landlock among the kernel's security modules and seccomp",
        do=f"use such a machine, or, for programs known to be harmless, Sandbox(..., allow_missing={{{name!r}}})",
    )


def _parse_result(reply: dict[str, Any]) -> ProgramResult:
    printed = tuple(ExampleOutput(text, error) for text, error in reply["example_outputs"])
    reason = reply["reason"]
    files = {name: base64.b64decode(data) for name, data in reply.get("files", {}).items()}
    return ProgramResult(
        reason == "passed",
        reason,
        reply["output"],
        reply["seconds"],
        printed,
        files,
        reply.get("left_out", 0),
    )
