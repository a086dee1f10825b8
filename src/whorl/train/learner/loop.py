"""The loop: records in, updates out. A language model, A2C, PPO and IMPALA are all trained by the dozen lines of `learn`.

    records   what producers made: batches of text, stretches of experience (a reader of slots, or any iterator)
    passes    how a record is used: once, for text or A2C; several times in shuffled parts, for PPO. Each pass is a list of
              micro-batches whose gradients are summed before the step
    updates   what is learnt from each pass, in order: one for a language model, two for a GAN
    publish   where the newest weights go, for producers that act with them

Every algorithm is a choice of these four. What differs between algorithms is in their objectives, not here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from whorl.train.learner.learner import Learner
from whorl.train.learner.update import MicroBatch

T = TypeVar("T")


class StopTraining(Exception):
    """Raise this in a callback to end training early and keep the current weights."""


class Stopwatch:
    """Seconds by what they were spent on. Always on: a reading costs microseconds, a step milliseconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def pop_seconds(self) -> dict[str, float]:
        """What was counted since the last call."""
        seconds, self.seconds = self.seconds, {}
        return seconds


def train_loop(
    learner: Learner,
    batches: Iterator[T],
    minibatches: Callable[[T], Iterable[Sequence[MicroBatch]]],
    *,
    first: int = 0,
    last: int,
    lr_scale: Callable[[int], float] = lambda step: 1.0,
    sync_weights: Callable[[int], None] = lambda step: None,
    on_step_end: Callable[[int, dict[str, float], Stopwatch], None] = lambda step, metrics, clock: None,
    stopwatch: Stopwatch | None = None,
) -> None:
    """Learns from the records number `first` to `last` - 1.

    Args:
        factor: of a step number, on every learning rate.
        publish: called when the weights of that many steps are in place.
        after: called behind each record with how many there were, the means of all metrics, and where time went:
            "wait" for records, "score" (all that `passes` asks between one pass and the next: what older weights, a
            reference or a critic say of a record), "gradients", "step".
        clock: counts that time.
    """
    stopwatch = stopwatch or Stopwatch()
    for step in range(first, last):
        with stopwatch("data"):
            record = next(batches)
            work = iter(minibatches(record))
        found: list[dict[str, float]] = []
        while True:
            with stopwatch("logprobs"):
                parts = next(work, None)
            if parts is None:
                break
            for update in learner.updates:
                if learner.rounds % update.every == 0:
                    with stopwatch("backward"):
                        for part in parts:
                            update.accumulate(update.objective(part))
                    with stopwatch("optimizer"):
                        found.append(update.step(lr_scale(step)))
            learner.end_round()
        sync_weights(step + 1)
        on_step_end(step + 1, _mean(found), stopwatch)


def _mean(found: list[dict[str, float]]) -> dict[str, float]:
    """Means over a record's steps, weighted by their counts; `count` is the sum."""
    if len(found) == 1:
        return found[0]
    total = max(1.0, sum(f["loss_tokens"] for f in found))
    names = {name: None for f in found for name in f if name != "loss_tokens"}
    means = {n: sum(f.get(n, 0.0) * f["loss_tokens"] for f in found) / total for n in names}
    return {**means, "loss_tokens": sum(f["loss_tokens"] for f in found)}
