"""Contenders that take turns, each in a process of its own, stopped between its steps.

What is compared must not meet: threads of one library disturb another's, a compiler's cache fills, an allocator keeps what
it was given. And what is compared must be measured in the same minutes: so each contender waits behind a gate while another
one works. A contender is a function that calls `gate(report)` whenever it has finished a step; the time of a step is taken
in its own process, from one opening of the gate to the next knock: it holds everything that the contender does for a step.

Every contender is given the allocator's setting that ours has (freed memory is kept), unless told otherwise: it is no merit
of a trainer, and others gain a quarter by it.

    steps = in_turn({"ours": Turn(train, folder, threads=2), "theirs": Turn(peer, folder, threads=2)}, warm=2, rounds=5)
    steps["ours"][0].seconds, steps["ours"][0].report
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

Gate = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Step:
    """One step of a contender: how long it took, and what it said of it."""

    seconds: float
    report: dict[str, Any]


class _Stop(BaseException):  # no Exception: a library that catches those must not catch this one
    pass


def _child(
    pipe: Connection, threads: int, keep_memory: bool, work: Callable[..., None], args: tuple[Any, ...]
) -> None:
    began = 0.0

    def gate(report: dict[str, Any]) -> None:
        nonlocal began
        try:
            pipe.send(Step(time.perf_counter() - began, report))
            more = pipe.recv()
        except (EOFError, BrokenPipeError):  # nobody is there any more
            raise _Stop from None
        if more is None:
            raise _Stop
        began = time.perf_counter()

    try:
        import torch

        from whorl.machine.device_probe import keep_freed_memory

        torch.set_num_threads(threads)
        if keep_memory:
            keep_freed_memory()
        gate({})  # the first knock: here, and nothing done yet
        work(gate, *args)
        raise RuntimeError("it came to its end before it was told to stop")
    except _Stop:
        pass
    except BaseException:
        pipe.send(traceback.format_exc())


class Turn:
    """A contender at its gate.

    Args:
        work: called in a fresh process as `work(gate, *args)`.
        threads: of PyTorch and OpenMP, set before either is loaded.
        keep_memory: tell the allocator to keep what is freed.

    Raises:
        RuntimeError: (any method) the contender failed; its traceback.
    """

    def __init__(self, work: Callable[..., None], *args: Any, threads: int, keep_memory: bool = True) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = str(threads)
        try:
            self._process = context.Process(target=_child, args=(theirs, threads, keep_memory, work, args))
            self._process.start()
        finally:
            os.environ.pop("OMP_NUM_THREADS")
            if before is not None:
                os.environ["OMP_NUM_THREADS"] = before
        theirs.close()
        self._hear()

    def _hear(self) -> Step:
        try:
            heard = self._pipe.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(f"a contender died, exit code {self._process.exitcode}") from None
        if isinstance(heard, str):
            raise RuntimeError(f"a contender failed:\n{heard}")
        assert isinstance(heard, Step)
        return heard

    def step(self) -> Step:
        """Opens the gate for one step."""
        self._pipe.send(True)
        return self._hear()

    def close(self) -> None:
        """Ends it."""
        if self._process.is_alive():
            try:
                self._pipe.send(None)
                self._process.join(20)
            except BrokenPipeError:
                pass
            if self._process.is_alive():
                self._process.kill()
                self._process.join()


def in_turn(turns: Mapping[str, Turn], *, warm: int, rounds: int) -> dict[str, list[Step]]:
    """Steps of all, round by round, told of on stderr; the first `warm` rounds are not kept. Everybody is ended."""
    steps: dict[str, list[Step]] = {name: [] for name in turns}
    try:
        for _ in range(warm + rounds):
            for name, turn in turns.items():
                steps[name].append(turn.step())
                print(f"{name}: {steps[name][-1].seconds:.3f} s", file=sys.stderr, flush=True)
    finally:
        for turn in turns.values():
            turn.close()
    return {name: made[warm:] for name, made in steps.items()}


def table(name: str, steps: Sequence[Step], parts: Sequence[str]) -> str:
    """One line: the median of the steps, and of each part of them that was reported."""
    median = {
        part: statistics.median(s.report["parts"].get(part, 0.0) for s in steps)
        for part in parts
        if any(part in s.report["parts"] for s in steps)
    }
    seconds = statistics.median(s.seconds for s in steps)
    split = ", ".join(f"{part} {value:.3f}" for part, value in median.items())
    return f"{name}: {seconds:.3f} s ({split}, rest {seconds - sum(median.values()):.3f})"
