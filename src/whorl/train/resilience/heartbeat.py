"""The pulse: a file that says whether a run is alive, and what to look at when it is not.

`heartbeat.json`, in the run's folder, tells the step, what is being done, since when, and the memory held; anything that
watches many runs can read it. A thread of the first replica keeps it, and notices a stall: no sign of progress for twenty
times the usual step, and for two minutes at least. Then the stacks of all threads are written: of the first replica by that
thread, of the others by themselves, asked by a signal. `faulthandler` writes them from C, so that it works also where
Python no longer runs (a deadlock in a library, a lock held for ever).

A process that the system kills for want of memory says nothing. But it leaves its heartbeat, and the next one reads it.
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
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from typing import IO

from whorl.tracking.run import write_json

STALL_SECONDS = 120.0
STALL_STEPS = 20.0  # usual steps
FIRST_STEP_SECONDS = 600.0  # the first step compiles
POLL_SECONDS = 1.0
STACK_SIGNAL = getattr(signal, "SIGUSR1", None)  # not everywhere


def stacks_file(folder: Path, rank: int, pid: int | None) -> Path:
    """Where a process writes its stacks. That it is there says that the process can be asked."""
    return folder / f"stacks-rank-{rank}-{pid}.txt"


def register_stack_dump(folder: Path, rank: int) -> IO[str] | None:
    """Have this process write its stacks to `folder` whenever it is sent SIGUSR1, until the file is closed."""
    if STACK_SIGNAL is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    file = stacks_file(folder, rank, os.getpid()).open("a")
    faulthandler.register(STACK_SIGNAL, file=file, all_threads=True)
    return file


class Heartbeat:
    """The first replica's. Entered, it watches; `beat` is a sign of progress.

    Args:
        folder: where the heartbeat and stacks are written.
        replicas: the other processes.
        phase: what is being done just now.
        stall_seconds, first_seconds: the least silence that is a stall; before the second step is done.
        say: hears of a stall, and of its end.
    """

    def __init__(
        self,
        folder: Path,
        steps: int,
        *,
        replicas: Sequence[BaseProcess] = (),
        phase: Callable[[], str] = lambda: "",
        log: Callable[[str], None] = lambda _: None,
        stall_seconds: float = STALL_SECONDS,
        first_step_seconds: float = FIRST_STEP_SECONDS,
    ) -> None:
        self.folder, self.steps, self.replicas, self.phase, self.log = folder, steps, replicas, phase, log
        self.stall_seconds, self.first_step_seconds = stall_seconds, first_step_seconds
        self.step, self.started_at = 0, time.time()
        self.step_seconds = deque[float](maxlen=50)
        self.stall_messages: list[str] = []  # told once by the training thread
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
        for path in self.folder.glob("stacks-rank-*.txt"):  # of those who were never asked
            if not path.stat().st_size:
                path.unlink(missing_ok=True)

    def beat(self, step: int) -> None:
        """Step number `step` is done."""
        now = time.monotonic()
        if step > self.step > 0:
            self.step_seconds.append((now - self._step_at) / (step - self.step))
        self.step, self._step_at, self._last = step, now, now

    def stall_limit(self) -> float:
        """Seconds without a sign after which the run counts as stalled."""
        if not self.step_seconds:
            return self.first_step_seconds
        return max(self.stall_seconds, STALL_STEPS * median(list(self.step_seconds)))

    def report_previous_crash(self) -> None:
        """Says so if the process before this one vanished in the middle of its work."""
        try:
            last = json.loads((self.folder / "heartbeat.json").read_text())
            if last["state"] in ("training", "stalled") and not _alive(int(last["pid"])):
                self.log(
                    f"the process before this one ended without a word after step {last['step']:,}: killed, or out of "
                    f"memory (it held {last['memory_bytes'] / 1e9:.2f} GB; {last['memory_free_bytes'] / 1e9:.2f} GB "
                    "were free then)"
                )
        except (OSError, ValueError, KeyError, TypeError):
            return  # there was none, or it is damaged

    def _watch(self) -> None:
        wait = min(POLL_SECONDS, self.stall_seconds / 4)
        while not self._done.wait(wait):
            phase = self.phase()
            if phase != self._phase_seen:  # another thing is being done: a sign of progress too
                self._phase_seen, self._last = phase, max(self._last, time.monotonic())
            quiet = time.monotonic() - self._last
            if not self.stalled and quiet > self.stall_limit():
                self.stalled = True
                self._dump_stacks(quiet)
            elif self.stalled and quiet < self.stall_limit():
                self.stalled = False
                self.log(f"it goes on: step {self.step:,}")
            with contextlib.suppress(OSError):  # a full disk is for the training thread to report
                self._write("stalled" if self.stalled else "training")

    def _dump_stacks(self, quiet: float) -> None:
        """Stacks of all threads of all replicas, into the folder."""
        mine = stacks_file(self.folder, 0, os.getpid())
        with contextlib.suppress(OSError):
            with mine.open("a") as file:
                file.write(f"no progress for {quiet:.0f} s after step {self.step}\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
            for rank, child in enumerate(self.replicas, start=1):
                ready = stacks_file(self.folder, rank, child.pid).exists()
                if STACK_SIGNAL is not None and ready and child.pid is not None and child.is_alive():
                    os.kill(child.pid, STACK_SIGNAL)
        gone = [str(rank) for rank, child in enumerate(self.replicas, start=1) if not child.is_alive()]
        usual = f" (usually {median(list(self.step_seconds)):.2g} s)" if self.step_seconds else ""
        words = (
            f"no progress for {quiet:.0f} s after step {self.step:,}{usual}, in: {self.phase() or 'unknown'}; the stacks "
            f"of all threads are in {self.folder}/stacks-rank-*.txt"
            + (f"; dead replicas: {', '.join(gone)}" if gone else "")
        )
        self.stall_messages.append(words)
        self.log(words)

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
                "started_at": self.started_at, "updated_at": time.time(), "last_step_at": time.time() - (time.monotonic() - self._step_at),
                "step_seconds": median(list(self.step_seconds)) if self.step_seconds else None,
                "replicas": [child.pid for child in self.replicas],
                "memory_bytes": held, "memory_free_bytes": psutil.virtual_memory().available,
            },
        )  # fmt: skip


def _alive(pid: int) -> bool:
    import psutil

    return bool(psutil.pid_exists(pid))
