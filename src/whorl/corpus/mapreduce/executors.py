"""Executors run the calls of a stage: in this process, in a pool of child processes, or as tasks of Ray.

They differ in where a call runs, never in what it writes. A process that is killed, for its memory perhaps, costs its
unit only, which runs again. A unit whose process is killed `ATTEMPTS` times ends the stage with its name. A function
that raises ends it at once: it would raise again.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from whorl.corpus.mapreduce.units import Call
from whorl.corpus.mapreduce.workers import CREW, new_worker
from whorl.errors import DataError
from whorl.machine.process import Child, wait_for
from whorl.slots.ray import init_ray

ATTEMPTS = 3
START_BYTES = 16_000_000  # of a stage's inputs, from which workers are started at once
START_SECONDS = 0.5  # that the rest of a stage takes in this process, from which they are started later


class LocalPool:
    """Child processes, each with one thread; with one worker, this process.

    The processes are shared and outlive a stage (`workers.py`). A stage whose inputs are small runs in this process, and
    so do the first units of a larger one while its workers start.

    Args:
        workers: number of processes.
        isolate: run no unit in this process, unless there is one worker; see `Stage.isolate`.
    """

    def __init__(self, workers: int = 1, *, isolate: bool = False) -> None:
        self.workers, self.isolate = workers, isolate

    def execute(self, calls: Sequence[Call]) -> Iterator[int]:
        """See `Executor`."""
        workers, waiting = min(self.workers, len(calls)), deque(range(len(calls)))
        isolate = workers > 1 and (self.isolate or any(call.stage.isolate for call in calls))
        modules = _modules(calls)
        if workers > 1 and (isolate or _has_bytes(calls, START_BYTES)):
            CREW.start(workers, modules)
        crew, began = list[Child](), time.perf_counter()
        while waiting and not isolate and not (workers > 1 and (crew := CREW.take(workers))):
            number = waiting.popleft()
            calls[number]()
            yield number
            left = (time.perf_counter() - began) / (len(calls) - len(waiting)) * len(waiting)
            if workers > 1 and left > START_SECONDS:
                CREW.start(workers, modules)
        if waiting:
            yield from self._in_children(calls, waiting, workers, crew)

    def _in_children(
        self, calls: Sequence[Call], waiting: deque[int], workers: int, crew: list[Child]
    ) -> Iterator[int]:
        """Run the waiting calls in children: those of `crew`, and more as they start."""
        attempts = [0] * len(calls)
        running: dict[Any, tuple[Child, int]] = {}  # channel -> child, number of its call

        def start(child: Child) -> None:
            number = waiting.popleft()
            attempts[number] += 1
            running[child.channel] = child, number
            with suppress(ConnectionError):  # it is dead already, which is seen below
                child.channel.send(calls[number])

        try:
            while waiting or running:
                crew += CREW.take(min(workers, len(waiting) + len(running)) - len(running) - len(crew))
                while crew and waiting:
                    start(crew.pop())
                if not running and not CREW.is_starting:
                    crew.append(new_worker(_modules(calls)))
                    continue
                is_short = len(running) < workers and waiting and CREW.is_starting
                ready = wait_for(list(running), 0.01 if is_short else None, [c for c, _ in running.values()])
                for channel in ready:
                    child, number = running.pop(channel)
                    try:
                        error: Exception | None = channel.recv()
                    except (EOFError, ConnectionError):
                        child.close()
                        _check_attempts(calls[number], attempts[number], child.exit_description())
                        waiting.appendleft(number)
                        start(new_worker(_modules(calls)))
                        continue
                    if error is not None:
                        CREW.give(child)
                        raise error
                    if waiting:
                        start(child)
                    else:
                        CREW.give(child)
                    yield number
        finally:
            for child in crew:
                CREW.give(child)
            for child, _ in running.values():
                child.kill()
                child.close()


class RayTasks:
    """Tasks of Ray, on the cluster of RAY_ADDRESS or on this machine. All nodes must see the unit folder and the inputs.

    Args:
        workers: tasks at a time; default as many as the cluster has CPUs.
    """

    def __init__(self, workers: int | None = None) -> None:
        self.workers = workers

    def execute(self, calls: Sequence[Call]) -> Iterator[int]:
        """See `Executor`. Raises ConfigError: Ray is not installed."""
        if not calls:
            return
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        init_ray()
        import ray

        cluster: Any = ray
        limit = self.workers or int(cluster.cluster_resources().get("CPU", 1))
        task: Any = ray.remote(_run).options(num_cpus=1, max_retries=ATTEMPTS - 1, retry_exceptions=False)
        waiting, running = deque(range(len(calls))), dict[Any, int]()
        try:
            while waiting or running:
                while waiting and len(running) < limit:
                    number = waiting.popleft()
                    running[task.remote(calls[number])] = number
                for reference in ray.wait(list(running))[0]:
                    number = running.pop(reference)
                    try:
                        ray.get(reference)
                    except ray.exceptions.RayTaskError as error:
                        raise error.cause from None
                    except ray.exceptions.RayError as error:
                        _check_attempts(calls[number], ATTEMPTS, str(error).partition("\n")[0])
                    yield number
        finally:
            for reference in running:
                ray.cancel(reference, force=True)


def _modules(calls: Sequence[Call]) -> list[str]:
    """Return the modules of this package that the calls need: a fork server may import them, and Parquet, once."""
    found = {call.stage.function.partition(":")[0] for call in calls}
    return ["pyarrow.parquet", *sorted(name for name in found if name.startswith("whorl."))]


def _has_bytes(calls: Sequence[Call], least: int) -> bool:
    """Return whether the inputs together have at least so many bytes; true for those that are no local files."""
    total = 0
    for path in (i.path for call in calls for i in call.unit.inputs):
        try:
            total += Path(path).stat().st_size
        except OSError:
            return True
        if total >= least:
            return True
    return False


def _run(call: Call) -> None:
    call()


def _check_attempts(call: Call, attempts: int, reason: str) -> None:
    if attempts >= ATTEMPTS:
        inputs = ", ".join(i.path for i in call.unit.inputs[:3])
        raise DataError(
            f"{call.stage.function} of {inputs} was ended {attempts} times: {reason}",
            do="give it more memory, fewer workers, or smaller documents; finished units are kept",
        )
