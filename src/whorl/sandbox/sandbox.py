"""Running programs that nobody trusts: many, small, and at once.

A model writes programs, and a reward says whether they work. They are hostile, if not by intent then by search: whatever
raises the reward will be found, be it `os._exit(0)`, a print in the place of a proof, or a fork bomb. And there are many: a
step of training asks for 128 verdicts or more, while the learner waits.

    with Sandbox(Limits(wall_seconds=1), workers=2) as sandbox:
        outcomes = sandbox.run_all([Program(source, tests="assert add(1, 2) == 3"), ...])

Each worker is a zygote (`zygote.py`), a small warm process that forks for each program; the fork confines itself
(`confine.py`, `calls.py`) and then runs program and tests (`child.py`). What stands between a program and the user:

    another process in a session of its own, which cannot make further ones and is killed whole
    no reading but the interpreter's own library and its folder; no writing but in its folder    (Landlock)
    no sockets, no exec, no signals to others, no call that is not in a short list              (seccomp)
    no capabilities, no environment, no descriptors of ours; limits on time, memory, files, output

`protections()` says which of them are in force: each worker puts them on and *tries* them before the first program runs.
Where one that is essential cannot be had the sandbox refuses to start, unless it is named in `without`.

A worker that is killed, stopped or stuck is noticed and started again; the program it was at counts as crashed, and no
other is lost. What remains possible is told where it belongs: `confine.py` (what can still be seen) and `child.py` (how a
verdict can still be faked). For a secret whose loss would hurt, this is not enough: use a virtual machine.
"""

from __future__ import annotations

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

import whorl
from whorl.errors import ConfigError, WhorlError, one_of
from whorl.sandbox.frames import receive_with_deadline, send
from whorl.sandbox.limits import ExampleOutput, Program, ProgramResult, ResourceLimits
from whorl.sandbox.work_folder import clear

REQUIRED_PROTECTIONS = ("landlock", "seccomp")
GRACE_SECONDS = 10.0  # what a worker may take beyond a program's own time before it counts as stuck
START_SECONDS = 60.0
_BOOTSTRAP = "import sys; sys.path.append(sys.argv.pop(1)); from whorl.sandbox.zygote import main; main()"

# Tried in each worker before anything else runs there. Prints what it could do and should not have been able to.
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
    """One zygote, seen from the parent. Raises ConfigError where it cannot be had."""

    def __init__(self, allow_missing: frozenset[str]) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="whorl-sandbox-"))
        (self.root / "box").mkdir()
        above = str(Path(whorl.__file__).parent.parent)
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-s",
                "-S",
                "-B",
                "-c",
                _BOOTSTRAP,
                above,
                str(self.root / "box"),
                *sorted(allow_missing),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8"},  # the same program gets the same verdict
            start_new_session=True,  # Ctrl-C is for the parent
            bufsize=0,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.request_fd, self.reply_fd = self.process.stdin.fileno(), self.process.stdout.fileno()
        self.job = -1  # index of the program it is at
        self.deadline = 0.0
        hello = self.read_reply(time.monotonic() + START_SECONDS)
        if hello is None or "missing" in hello:
            self.kill()
        if hello is None:
            raise WhorlError(
                "a worker of the sandbox did not start",
                expected=f"{sys.executable} to start and to import the standard library",
                do="look at memory and at the limits of processes (ulimit -u), and try again",
            )
        if "missing" in hello:
            raise _missing_protection(hello["missing"], hello["reason"])

    def submit(self, program: Program, limits: ResourceLimits, job: int) -> None:
        """Sends a program; a worker that is gone is noticed when it is read from."""
        has_checks = bool(program.tests or program.examples)
        parts: list[Any] = [
            {"source": program.source, "limits": dataclasses.asdict(limits), "has_checks": has_checks}
        ]
        if has_checks:
            parts.append({"tests": program.tests, "examples": program.examples})
        self.job, self.deadline = job, time.monotonic() + limits.wall_seconds + GRACE_SECONDS
        with contextlib.suppress(BrokenPipeError):
            for part in parts:
                send(self.request_fd, part)

    def read_reply(self, deadline: float) -> Any:
        """The worker's next answer; None when it ended, or said nothing whole before the deadline."""
        return receive_with_deadline(self.reply_fd, deadline)

    def kill(self) -> None:
        """Kills the zygote; what it had started dies with it."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        with contextlib.suppress(OSError):
            clear(self.root)
            self.root.rmdir()


class Sandbox:
    """Runs programs that nobody trusts, `workers` at a time. A context manager; use it from one thread at a time or many.

    Args:
        limits: what each program may use.
        workers: programs at one time; as many as there are cores to spare.
        without: protections to do without where this machine does not give them ("landlock", "seccomp"): for programs that
            are known to be harmless only.

    Raises:
        ConfigError: not Linux; an essential protection is missing; a number of workers below 1.
        WhorlError: a worker does not start.
    """

    def __init__(
        self, limits: ResourceLimits | None = None, workers: int = 2, allow_missing: Collection[str] = ()
    ) -> None:
        self.limits, self.allow_missing = limits or ResourceLimits(), frozenset(allow_missing)
        if not sys.platform.startswith("linux"):
            raise ConfigError(
                f"programs cannot be confined on {sys.platform}",
                expected="Linux 5.13 or later: confinement is made of Landlock and seccomp",
                do="run this step on Linux (a container or a virtual machine will do)",
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
        """Name to what it does, for each protection that was found in force when the workers were started."""
        return dict(self._active_protections)

    def run(self, program: Program | str) -> ProgramResult:
        """Runs one program."""
        return self.run_all([program])[0]

    def run_all(self, programs: Sequence[Program | str]) -> list[ProgramResult]:
        """Runs programs, each alone in a process; outcomes in their order.

        A program that crashes its worker, or whose worker is killed, has crashed; the others do not notice.

        Raises:
            ConfigError: the sandbox is closed.
            WhorlError: a worker that ended cannot be started again.
        """
        given = [Program(p) if isinstance(p, str) else p for p in programs]
        outcomes: list[ProgramResult | None] = [None] * len(given)
        waiting = deque(range(len(given)))
        with self._lock:
            if self._closed:
                raise ConfigError("the sandbox is closed", do="make a new one")
            try:
                while waiting or self._busy():
                    for place, worker in enumerate(self._workers):
                        if waiting and (worker is None or worker.job < 0):
                            if worker is None:
                                worker = self._workers[place] = self._start_worker()
                            worker.submit(given[waiting[0]], self.limits, waiting.popleft())
                    for place, worker in self._ready():
                        job, worker.job = worker.job, -1
                        outcomes[job] = self._collect_result(worker, place)
            finally:
                for place, worker in self._busy():  # interrupted: answers to come would be taken for others
                    worker.kill()
                    self._workers[place] = None
        return [o for o in outcomes if o is not None]

    def close(self) -> None:
        """Ends the workers. A second call does nothing."""
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
        """Busy workers that have something to say, or have said nothing for too long."""
        busy = self._busy()
        with selectors.DefaultSelector() as selector:
            for place, worker in busy:
                selector.register(worker.reply_fd, selectors.EVENT_READ, place)
            first = min(w.deadline for _, w in busy)
            speaking = {key.data for key, _ in selector.select(max(0.0, first - time.monotonic()))}
        return [(i, w) for i, w in busy if i in speaking or w.deadline <= time.monotonic()]

    def _collect_result(self, worker: SandboxWorker, place: int) -> ProgramResult:
        said = worker.read_reply(worker.deadline)
        if said is None:
            self._workers[place] = None
            self.restarts += 1
            worker.kill()
            why = f"crashed: the sandbox's worker ended ({worker.process.returncode})"
            return ProgramResult(ok=False, reason=why, output="", seconds=0.0)
        return _parse_result(said)

    def _start_worker(self) -> SandboxWorker:
        """A worker that has shown that its protections hold."""
        worker = SandboxWorker(self.allow_missing)
        try:
            patient = dataclasses.replace(self.limits, wall_seconds=30, cpu_seconds=30, output_bytes=4096)
            worker.submit(Program(_PROBE_PROGRAM.format(memory=2 * self.limits.memory_bytes)), patient, 0)
            worker.deadline = time.monotonic() + START_SECONDS
            said = worker.read_reply(worker.deadline)
            worker.job = -1
            outcome = _parse_result(said) if said is not None else None
            if outcome is None or not outcome.ok:
                why = outcome.reason if outcome else "it ended"
                raise WhorlError(
                    f"a worker of the sandbox failed its trials: {why}", expected="that all of them run"
                )
            broken = set(outcome.output.split())
            for name in sorted(broken - self.allow_missing):
                raise _missing_protection(name, "a trial that it should stop went through")
            self._active_protections = {n: t for n, t in _PROTECTION_TEXT.items() if n not in broken}
        except BaseException:
            worker.kill()
            raise
        return worker


_PROTECTION_TEXT = {
    "process": "each program in a process and session of its own, killed whole",
    "limits": "time, memory, size of files, output, descriptors",
    "environment": "empty",
    "landlock": "reads the interpreter's library and its own folder, writes in its own folder",
    "seccomp": "no sockets, exec, fork, signals to others, nor any call outside a short list",
}


def _missing_protection(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"programs cannot be confined here: {name} is missing ({why})",
        expected="Linux 5.13 or later on x86-64 or aarch64, with Landlock among the kernel's security modules and seccomp",
        do=f"use such a machine; or, for programs known to be harmless, Sandbox(..., allow_missing={{{name!r}}})",
    )


def _parse_result(said: dict[str, Any]) -> ProgramResult:
    printed = tuple(ExampleOutput(text, error) for text, error in said["example_outputs"])
    reason = said["reason"]
    return ProgramResult(reason == "passed", reason, said["output"], said["seconds"], printed)
