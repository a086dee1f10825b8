"""Executors run the calls of a stage: in this process, in a pool of child processes, or as tasks of Ray.

They differ in where a call runs, never in what it writes. A process that is killed, for its memory perhaps, costs its
unit only, which runs again. A unit whose process is killed `ATTEMPTS` times ends the stage with its name. A function
that raises ends it at once: it would raise again.
"""

from __future__ import annotations

import os
import pickle
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any, Protocol

from whorl.corpus.mapreduce.units import Call
from whorl.errors import DataError
from whorl.machine.process import Channel, Child
from whorl.slots.ray import init_ray

ATTEMPTS = 3


class Executor(Protocol):
    """Where calls run."""

    def execute(self, calls: Sequence[Call]) -> Iterator[int]:
        """Run all calls, each once or more often, and yield their numbers as they finish, in any order.

        Raises:
            DataError: a call's process was killed `ATTEMPTS` times.
            Exception: what a call raised.
        """


class LocalPool:
    """Child processes, each with one thread; with one worker, this process.

    Args:
        workers: number of processes.
    """

    def __init__(self, workers: int = 1) -> None:
        self.workers = workers

    def execute(self, calls: Sequence[Call]) -> Iterator[int]:
        """See `Executor`."""
        if min(self.workers, len(calls)) <= 1:
            for number, call in enumerate(calls):
                call()
                yield number
            return
        waiting, attempts = deque(range(len(calls))), [0] * len(calls)
        running: dict[Any, tuple[Child, int]] = {}  # channel -> child, number of its call

        def start(child: Child) -> None:
            number = waiting.popleft()
            attempts[number] += 1
            running[child.channel] = child, number
            with suppress(ConnectionError):  # it is dead already, which is seen below
                child.channel.send(calls[number])

        try:
            for _ in range(min(self.workers, len(calls))):
                start(_worker())
            while running:
                ready: list[Any] = wait(list(running))
                for channel in ready:
                    child, number = running.pop(channel)
                    try:
                        error: Exception | None = channel.recv()
                    except (EOFError, ConnectionError):
                        child.close()
                        _check_attempts(calls[number], attempts[number], child.exit_description())
                        waiting.appendleft(number)
                        start(_worker())
                        continue
                    if error is not None:
                        child.close()
                        raise error
                    if waiting:
                        start(child)
                    else:
                        child.close()
                    yield number
        finally:
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


def serve_calls(channel: Channel) -> None:
    """Run calls from the channel until it closes; answer each with None or its error."""
    while True:
        call: Call = channel.recv()
        try:
            call()
        except Exception as error:
            channel.send(_picklable(error))
        else:
            channel.send(None)


def _worker() -> Child:
    return Child("whorl.corpus.mapreduce.executors:serve_calls", name="corpus worker", preload=(__name__,))


def _run(call: Call) -> None:
    call()


def _check_attempts(call: Call, attempts: int, reason: str) -> None:
    if attempts >= ATTEMPTS:
        inputs = ", ".join(i.path for i in call.unit.inputs[:3])
        raise DataError(
            f"{call.stage.function} of {inputs} was ended {attempts} times: {reason}",
            do="give it more memory, fewer workers, or smaller documents; finished units are kept",
        )


def _picklable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
