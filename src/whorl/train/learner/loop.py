"""The training loop. A language model, A2C, PPO and IMPALA all train with `train_loop`.

    batches        records from producers: batches of text, rollouts (a slot reader, or any iterator)
    minibatches    passes over a record: one for text and A2C, several with shuffled parts for PPO. Each pass is a list of
                   micro-batches whose gradients are summed before the step
    updates        the learner's updates, run in order on each pass: one for a language model, two for a GAN
    sync_weights   publishes the new weights to producers that act with them

An algorithm is a choice of these four. Differences in the loss belong in the objective.
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
    """Accumulates seconds by activity. Always on: one reading costs microseconds, a step milliseconds."""

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
        """Return the seconds since the last call, and reset."""
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
    """Train on records `first` to `last` - 1.

    Args:
        lr_scale: maps a step number to a factor on every learning rate.
        sync_weights: called with the number of steps done when the weights are in place.
        on_step_end: called after each record with the number of steps done, the means of all metrics, and the
            stopwatch. Phases: "data" (wait for a record), "logprobs" (everything `minibatches` computes, such as
            log-probabilities of a reference or values of a critic), "backward" (forward and backward), "optimizer".
        stopwatch: accumulates the phases.
    """
    stopwatch = stopwatch or Stopwatch()
    for step in range(first, last):
        with stopwatch("data"):
            record = next(batches)
            passes = iter(minibatches(record))
        step_metrics: list[dict[str, float]] = []
        while True:
            with stopwatch("logprobs"):
                micro_batches = next(passes, None)
            if micro_batches is None:
                break
            for update in learner.updates:
                if learner.rounds % update.every == 0:
                    with stopwatch("backward"):
                        for micro_batch in micro_batches:
                            update.accumulate(update.objective(micro_batch))
                    with stopwatch("optimizer"):
                        step_metrics.append(update.step(lr_scale(step)))
            learner.end_round()
        sync_weights(step + 1)
        on_step_end(step + 1, _mean(step_metrics), stopwatch)


def _mean(step_metrics: list[dict[str, float]]) -> dict[str, float]:
    """Means over a record's steps, weighted by `loss_tokens`; `loss_tokens` is the sum.

    Steps that were skipped are left out, unless all were. The mean of a metric is over the steps that have it.
    """
    applied = [metrics for metrics in step_metrics if "skipped" not in metrics]
    step_metrics = applied or step_metrics
    if len(step_metrics) == 1:
        return step_metrics[0]
    names = {name: None for f in step_metrics for name in f if name != "loss_tokens"}
    means = {}
    for name in names:
        having = [f for f in step_metrics if name in f]
        total = max(1.0, sum(f["loss_tokens"] for f in having))
        means[name] = sum(f[name] * f["loss_tokens"] for f in having) / total
    return {**means, "loss_tokens": sum(f["loss_tokens"] for f in step_metrics)}
