"""Records of a training step: metrics, evaluations and events in the run, checkpoints in its log, a note next to the bar."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from whorl.recipes.registry import StepContext
from whorl.tracking.run import MetricsLog, event_record

if TYPE_CHECKING:
    from whorl.tracking.progress import ProgressTask

Metrics = dict[str, float]
NOT_METRICS = ("step", "time", "n_documents")  # numbers of a record that measure nothing


class StageRecorder:
    """Records a training function: a `TrainCallback` that can also be called as a function of step and metrics.

    Metrics, evaluations and events go to the metrics of the run, checkpoints to its log, a note to the bar. The first record
    opens the metrics, so that a resumed run keeps those of the steps before it.

    Args:
        note: the newest value of every metric -> text next to the bar.
        after_step: called with the arguments of each call, after its metrics are recorded.
        log_if: whether the metrics of a step are written; the bar shows all.
    """

    def __init__(
        self,
        ctx: StepContext,
        bar: ProgressTask,
        note: Callable[[Metrics], str],
        after_step: Callable[..., None] | None = None,
        *,
        log_if: Callable[[int, Metrics], bool] = lambda step, metrics: True,
    ) -> None:
        self.ctx, self.bar, self.note, self.after_step, self.log_if = ctx, bar, note, after_step, log_if
        self.last: Metrics = {}  # newest value of every metric of this attempt
        self._log: MetricsLog | None = None

    def __call__(self, step: int, metrics: Metrics, *more: Any) -> None:
        self.on_step(step, metrics, *more)

    def on_start(self, steps: int) -> None:
        """Give the bar its total, if the number of epochs decides it."""
        if self.bar.total is None:
            self.bar.update(total=steps)

    def on_step(self, step: int, metrics: Metrics, *more: Any) -> None:
        values = self.step_values(metrics)
        self.last |= values
        log = self._open(step)
        if self.log_if(step, values):
            log.write(step, values)
        self.bar.update(done=step, note=self.note(self.last))
        if self.after_step is not None:
            self.after_step(step, metrics, *more)

    def on_evaluation(self, step: int, metrics: Metrics, networks: Any) -> None:
        values = self.evaluation_values(step, metrics, networks)
        self.last |= {name: value for name, value in values.items() if isinstance(value, float)}
        # `step + 1` keeps the metrics of the step itself if the evaluation is repeated after an interruption
        self._open(step + 1).write(step, values)

    def on_checkpoint(self, step: int, seconds: float) -> None:
        self.ctx.run.log(f"checkpoint of step {step}: stall {seconds:.3f} s")

    def on_event(self, step: int, event: Mapping[str, Any]) -> None:
        self._open(step).write(step, event_record(event))

    def step_values(self, metrics: Metrics) -> Metrics:
        """Return the values to record for a step."""
        return metrics

    def evaluation_values(self, step: int, metrics: Metrics, networks: Any) -> dict[str, float | str]:
        """Return the values to record for an evaluation."""
        return {**metrics}

    def _open(self, step: int) -> MetricsLog:
        if self._log is None:
            self._log = self.ctx.run.metrics(self.ctx.name, resume_at=step)
        return self._log

    def close(self) -> None:
        if self._log is not None:
            self._log.close()


def last_values(curve: Iterable[Mapping[str, Any]]) -> Metrics:
    """Return the last value of every metric of a run, over all attempts."""
    last: Metrics = {}
    for record in curve:
        numbers = {n: v for n, v in record.items() if isinstance(v, float | int) and n not in NOT_METRICS}
        last |= numbers
    return last
