"""Drives an engine, or one of the older schemes, through requests that arrive over time, without waiting for any of them.

The clock counts the seconds that this process computes (so it is for one thread), and jumps while nothing is computed: what
waits for an arrival, or for a batch to fill, waits in the books alone. So a load of a minute of which ten seconds are work
takes ten seconds to measure, and who else uses the machine changes little.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.engine.support.static_batching import Batches

from whorl.engine.engine import Engine
from whorl.engine.request import Request
from whorl.tracking.seeds import numpy_rng


class Clock:
    """Seconds of work since it was made, and those that were jumped over."""

    def __init__(self) -> None:
        self._began = time.process_time()

    def __call__(self) -> float:
        return time.process_time() - self._began

    def jump(self, to: float) -> None:
        """To a moment; nothing if it is past."""
        self._began -= max(0.0, to - self())


@dataclass
class Answer:
    """Of one request: when it was due, and when each of its tokens came."""

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
    scheme: Engine | Batches, asked: Sequence[Request], due: Sequence[float], clock: Clock
) -> dict[str, Answer]:
    """All of `asked`, each added at its time (seconds of `clock`, ascending)."""
    answers = {r.id: Answer(at) for r, at in zip(asked, due, strict=True)}
    came = 0
    while came < len(asked) or scheme.busy:
        while came < len(asked) and due[came] <= clock():
            scheme.add(asked[came])
            came += 1
        if came == len(asked) and isinstance(scheme, Batches):
            scheme.close()
        deltas = scheme.step() if scheme.busy else []
        now = clock()
        for delta in deltas:
            one = answers[delta.request_id]
            one.at += [now] * len(delta.tokens)
            one.ids += [token.id for token in delta.tokens]
            one.finish = delta.finish_reason
        if (not deltas and isinstance(scheme, Batches)) or not scheme.busy:
            waited = scheme.deadline() if isinstance(scheme, Batches) else None
            moments = [t for t in (due[came] if came < len(asked) else None, waited) if t is not None]
            if moments:
                clock.jump(min(moments))
    return answers


def poisson(n: int, rate: float, seed: int = 0) -> list[float]:
    """Arrivals, the same rhythm at every rate."""
    gaps = numpy_rng(seed, "bench", "arrivals").exponential(1.0, n)
    return [float(t) / rate for t in gaps.cumsum()]
