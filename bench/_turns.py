"""Contenders that run their steps in turn, each in a separate process.

Contenders in one process disturb each other through threads, compiler caches and allocators. Contenders measured at
different times see different machines. So each contender waits at a gate while another one runs a step. A contender is
a function that calls `gate(report)` after each step. Its process measures the step from the opening of the gate to the
next call of `gate`, so the time holds all work of the step.

Every contender gets the allocator setting that Whorl uses (freed memory is kept) unless `keep_memory` is False. The
setting is no property of a trainer, and some trainers are a quarter faster with it.

    steps = in_turn({"ours": Turn(train, folder, threads=2), "peer": Turn(peer, folder, threads=2)}, warm=2, rounds=5)
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
    """Duration and report of one step of a contender."""

    seconds: float
    report: dict[str, Any]


class _Stop(BaseException):  # not an Exception, so that libraries do not catch it
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
        except (EOFError, BrokenPipeError):  # the parent process ended
            raise _Stop from None
        if more is None:
            raise _Stop
        began = time.perf_counter()

    try:
        import torch

        from whorl.machine.malloc import keep_freed_memory

        torch.set_num_threads(threads)
        if keep_memory:
            keep_freed_memory()
        gate({})  # reports that the process started
        work(gate, *args)
        raise RuntimeError("the contender ended before the last step")
    except _Stop:
        pass
    except BaseException:
        pipe.send(traceback.format_exc())


class Turn:
    """A contender in a separate process.

    Args:
        work: called in a fresh process as `work(gate, *args)`.
        threads: of PyTorch and OpenMP, set before either is loaded.
        keep_memory: the allocator keeps freed memory.

    Raises:
        RuntimeError: (any method) the contender failed; the message holds its traceback.
    """

    def __init__(self, work: Callable[..., None], *args: Any, threads: int, keep_memory: bool = True) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, child_pipe = context.Pipe()
        before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = str(threads)
        try:
            self._process = context.Process(
                target=_child, args=(child_pipe, threads, keep_memory, work, args)
            )
            self._process.start()
        finally:
            os.environ.pop("OMP_NUM_THREADS")
            if before is not None:
                os.environ["OMP_NUM_THREADS"] = before
        child_pipe.close()
        self._receive()

    def _receive(self) -> Step:
        try:
            message = self._pipe.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(f"a contender died, exit code {self._process.exitcode}") from None
        if isinstance(message, str):
            raise RuntimeError(f"a contender failed:\n{message}")
        assert isinstance(message, Step)
        return message

    def step(self) -> Step:
        """Run one step and return it."""
        self._pipe.send(True)
        return self._receive()

    def close(self) -> None:
        """End the process."""
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
    """Return the steps of each contender without the first `warm` rounds, and close all contenders.

    Each round runs one step of every contender. Durations are printed on stderr.
    """
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
    """Return one line: the median duration of the steps and of each reported part."""
    median = {
        part: statistics.median(s.report["parts"].get(part, 0.0) for s in steps)
        for part in parts
        if any(part in s.report["parts"] for s in steps)
    }
    seconds = statistics.median(s.seconds for s in steps)
    split = ", ".join(f"{part} {value:.3f}" for part, value in median.items())
    return f"{name}: {seconds:.3f} s ({split}, rest {seconds - sum(median.values()):.3f})"
