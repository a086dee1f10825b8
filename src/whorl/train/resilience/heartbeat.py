"""Heartbeat and stall detection of a run.

`heartbeat.json` in the run's folder holds the step, the current phase, timestamps and memory use, for external
monitors. A thread of rank 0 writes it and detects stalls: no progress for twenty times the usual step, and at least two
minutes. On a stall the stacks of all threads are dumped: by that thread for rank 0, by a signal for the other ranks.
`faulthandler` writes them from C, so it also works when Python is blocked (a deadlock in a library, a lock that is
never released).

A process that the kernel kills for memory leaves no message. The next process reads its last heartbeat and reports it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import IO

from whorl.machine.process import Child
from whorl.parallel.process_group import ProcessGroup
from whorl.tracking.run import write_json

STALL_SECONDS = 120.0
STALL_STEPS = 20.0  # times the usual step
FIRST_STEP_SECONDS = 600.0  # the first step includes compilation
POLL_SECONDS = 1.0
STACK_SIGNAL = getattr(signal, "SIGUSR1", None)  # missing on some systems


def stacks_file(folder: Path, rank: int, pid: int | None) -> Path:
    """The file for a process's stack traces. It exists if the process handles the signal."""
    return folder / f"stacks-rank-{rank}-{pid}.txt"


def register_stack_dump(folder: Path, rank: int) -> IO[str] | None:
    """Make this process dump its stacks to `folder` on SIGUSR1, until the returned file is closed."""
    if STACK_SIGNAL is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    file = stacks_file(folder, rank, os.getpid()).open("a")
    faulthandler.register(STACK_SIGNAL, file=file, all_threads=True)
    return file


def open_heartbeat(
    folder: Path | None, steps: int, group: ProcessGroup, phase: Callable[[], str], log: Callable[[str], None]
) -> Heartbeat | None:
    """Return the heartbeat of rank 0. Other ranks only dump their stacks on request. Nothing without a folder."""
    if folder is not None and group.rank:
        register_stack_dump(folder, group.rank)
    return (
        None
        if folder is None or group.rank
        else Heartbeat(folder, steps, replicas=group.children, phase=phase, log=log)
    )


class Heartbeat:
    """Writes the heartbeat of a run and detects stalls; rank 0 only, as a context manager.

    Args:
        folder: for the heartbeat and the stack traces.
        steps: of the whole run.
        replicas: the other processes.
        phase: returns the current phase.
        log: receives messages about stalls.
        stall_seconds, first_step_seconds: minimum time without progress that counts as a stall; for the first step.
    """

    def __init__(
        self,
        folder: Path,
        steps: int,
        *,
        replicas: Sequence[Child] = (),
        phase: Callable[[], str] = lambda: "",
        log: Callable[[str], None] = lambda _: None,
        stall_seconds: float = STALL_SECONDS,
        first_step_seconds: float = FIRST_STEP_SECONDS,
    ) -> None:
        self.folder, self.steps, self.replicas, self.phase, self.log = folder, steps, replicas, phase, log
        self.stall_seconds, self.first_step_seconds = stall_seconds, first_step_seconds
        self.step, self.started_at = 0, time.time()
        self.step_seconds = deque[float](maxlen=50)
        self.stall_messages: list[str] = []  # reported once by the training thread
        self.stalled = False
        self._last = self._step_at = time.monotonic()
        self._phase_seen = ""
        self._answers: IO[str] | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="pulse", daemon=True)

    def __enter__(self) -> Heartbeat:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.report_previous_crash()
        self._answers = register_stack_dump(self.folder, 0)
        self._write("training")
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self._done.set()
        self._thread.join(timeout=5)
        self._write("ended" if error is None else f"ended: {type(error).__name__}")
        if STACK_SIGNAL is not None and self._answers is not None:
            faulthandler.unregister(STACK_SIGNAL)
            self._answers.close()
        for path in self.folder.glob(
            "stacks-rank-*.txt"
        ):  # remove empty files of processes that dumped nothing
            if not path.stat().st_size:
                path.unlink(missing_ok=True)

    def beat(self, step: int) -> list[str]:
        """Record that step number `step` is done; return the messages about stalls since the last call."""
        now = time.monotonic()
        if step > self.step > 0:
            self.step_seconds.append((now - self._step_at) / (step - self.step))
        self.step, self._step_at, self._last = step, now, now
        messages, self.stall_messages = self.stall_messages, []
        return messages

    def stall_limit(self) -> float:
        """Seconds without progress after which the run counts as stalled."""
        if not self.step_seconds:
            return self.first_step_seconds
        return max(self.stall_seconds, STALL_STEPS * median(list(self.step_seconds)))

    def report_previous_crash(self) -> None:
        """Log a message if the previous process ended without a final heartbeat."""
        try:
            last = json.loads((self.folder / "heartbeat.json").read_text())
            if last["state"] in ("training", "stalled") and not _alive(int(last["pid"])):
                self.log(
                    f"the previous process ended without a final heartbeat after step {last['step']:,}: killed, or out of "
                    f"memory (it used {last['memory_bytes'] / 1e9:.2f} GB; {last['memory_free_bytes'] / 1e9:.2f} GB "
                    "were free)"
                )
        except (OSError, ValueError, KeyError, TypeError):
            return  # missing or damaged

    def _watch(self) -> None:
        wait = min(POLL_SECONDS, self.stall_seconds / 4)
        while not self._done.wait(wait):
            phase = self.phase()
            if phase != self._phase_seen:  # a new phase is progress too
                self._phase_seen, self._last = phase, max(self._last, time.monotonic())
            idle_seconds = time.monotonic() - self._last
            if not self.stalled and idle_seconds > self.stall_limit():
                self.stalled = True
                self._dump_stacks(idle_seconds)
            elif self.stalled and idle_seconds < self.stall_limit():
                self.stalled = False
                self.log(f"training resumed: step {self.step:,}")
            with contextlib.suppress(OSError):  # the training thread reports a full disk
                self._write("stalled" if self.stalled else "training")

    def _dump_stacks(self, idle_seconds: float) -> None:
        """Write the stacks of all threads of all replicas to the folder."""
        own_file = stacks_file(self.folder, 0, os.getpid())
        with contextlib.suppress(OSError):
            with own_file.open("a") as file:
                file.write(f"no progress for {idle_seconds:.0f} s after step {self.step}\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
            for rank, child in enumerate(self.replicas, start=1):
                ready = stacks_file(self.folder, rank, child.pid).exists()
                if STACK_SIGNAL is not None and ready and child.poll() is None:
                    os.kill(child.pid, STACK_SIGNAL)
        states = {
            "dead": [c.poll() is not None for c in self.replicas],
            "stopped": [c.is_stopped() for c in self.replicas],
        }
        ranks = {
            state: [str(rank) for rank, found in enumerate(all_, start=1) if found]
            for state, all_ in states.items()
        }
        usual = f" (usually {median(list(self.step_seconds)):.2g} s)" if self.step_seconds else ""
        message = (
            f"no progress for {idle_seconds:.0f} s after step {self.step:,}{usual}, in phase {self.phase() or 'unknown'}; "
            f"the stacks of all threads are in {self.folder}/stacks-rank-*.txt"
            + "".join(f"; {state} replicas: {', '.join(found)}" for state, found in ranks.items() if found)
        )
        self.stall_messages.append(message)
        self.log(message)

    def _write(self, state: str) -> None:
        import psutil

        held = 0
        for pid in (os.getpid(), *(child.pid for child in self.replicas)):
            with contextlib.suppress(psutil.Error, TypeError):
                held += psutil.Process(pid).memory_info().rss
        write_json(
            self.folder / "heartbeat.json",
            {
                "state": state, "pid": os.getpid(), "step": self.step, "steps": self.steps, "phase": self.phase(),
                "started_at": self.started_at, "updated_at": time.time(),
                "last_step_at": time.time() - (time.monotonic() - self._step_at),
                "step_seconds": median(list(self.step_seconds)) if self.step_seconds else None,
                "replicas": [child.pid for child in self.replicas],
                "memory_bytes": held, "memory_free_bytes": psutil.virtual_memory().available,
            },
        )  # fmt: skip


def _alive(pid: int) -> bool:
    import psutil

    return bool(psutil.pid_exists(pid))
