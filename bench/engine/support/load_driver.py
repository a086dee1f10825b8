"""Runs an engine or a static batching scheme with requests that arrive over time, without waiting for arrivals.

The clock counts the CPU seconds of this process, so it is for one thread, and jumps over idle time: waiting for an
arrival or for a batch to fill takes no time. A load of a minute with ten seconds of work takes ten seconds to measure,
and other load on the machine changes little.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.engine.support.static_batching import StaticBatchEngine

from whorl.engine.engine import Engine
from whorl.engine.request import Request
from whorl.tracking.seeds import numpy_rng


class Clock:
    """CPU seconds since construction, plus the seconds that were skipped."""

    def __init__(self) -> None:
        self._began = time.process_time()

    def __call__(self) -> float:
        return time.process_time() - self._began

    def jump(self, to: float) -> None:
        """Advance to a time; no effect if it has passed."""
        self._began -= max(0.0, to - self())


@dataclass
class Answer:
    """Arrival time, token times and ids of one request."""

    due: float
    at: list[float] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    finish: str | None = None

    @property
    def latency(self) -> float:
        return self.at[-1] - self.due

    @property
    def ttft(self) -> float:
        return self.at[0] - self.due


def drive(
    scheme: Engine | StaticBatchEngine, requests: Sequence[Request], due: Sequence[float], clock: Clock
) -> dict[str, Answer]:
    """Run all requests, each added at its time in `due` (seconds of `clock`, ascending)."""
    answers = {r.id: Answer(at) for r, at in zip(requests, due, strict=True)}
    n_added = 0
    while n_added < len(requests) or scheme.busy:
        while n_added < len(requests) and due[n_added] <= clock():
            scheme.add(requests[n_added])
            n_added += 1
        if n_added == len(requests) and isinstance(scheme, StaticBatchEngine):
            scheme.close()
        deltas = scheme.step() if scheme.busy else []
        now = clock()
        for delta in deltas:
            one = answers[delta.request_id]
            one.at += [now] * len(delta.tokens)
            one.ids += [token.id for token in delta.tokens]
            one.finish = delta.finish_reason
        if (not deltas and isinstance(scheme, StaticBatchEngine)) or not scheme.busy:
            waited = scheme.deadline() if isinstance(scheme, StaticBatchEngine) else None
            moments = [
                t for t in (due[n_added] if n_added < len(requests) else None, waited) if t is not None
            ]
            if moments:
                clock.jump(min(moments))
    return answers


def poisson(n: int, rate: float, seed: int = 0) -> list[float]:
    """Arrival times of a Poisson process; another rate scales the same times."""
    gaps = numpy_rng(seed, "bench", "arrivals").exponential(1.0, n)
    return [float(t) / rate for t in gaps.cumsum()]
