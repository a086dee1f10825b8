"""Pretraining as a task of the trainer: next-token prediction on batches of text, with periodic validation.

The weights depend only on `Job` and the step number, so a resumed run ends with the same bits (`train/trainer.py`). A job
with planned seconds is shortened if it falls behind (`resilience/deadline.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from whorl.errors import BudgetError, nearest_divisors
from whorl.models import LanguageModel, load_model
from whorl.parallel.traffic import Traffic
from whorl.tokens.loader import TokenProducer
from whorl.tokens.stream import StreamBatches
from whorl.train.checkpoint.format import Checkpoint
from whorl.train.checkpoint.manager import CheckpointManager
from whorl.train.job import Job, RowShape, identity, last_rows, on_world, row_shape, steps_per_epoch
from whorl.train.learner.learner import Learner, SharedState
from whorl.train.learner.loop import Stopwatch
from whorl.train.lm.batches import Batch, job_batches, micro_batches
from whorl.train.lm.build import allocate_shared, build_learner, build_model
from whorl.train.lm.decay_branches import load_branch
from whorl.train.lm.laid_out import ranks_of, readers_of, save_trace, start_trace, whole_pass
from whorl.train.lm.precision import activation_dtype
from whorl.train.metrics.layer_stats import LayerStats
from whorl.train.metrics.meter import Meter
from whorl.train.metrics.validation import BestWeights, Validator
from whorl.train.optim import lr_schedule, mup
from whorl.train.resilience.deadline import Deadline
from whorl.train.resilience.oom_advice import OutOfMemoryError, suggest
from whorl.train.resilience.provenance import documents_in_batch
from whorl.train.trainer import RunOptions, Task, TrainCallback, Trainer

TRACED_ROUND = 3  # of a run under a layout: the first ones compile and connect


def pretrain(
    job: Job,
    scratch: Path,
    callback: TrainCallback,
    *,
    log: Callable[[str], None] = lambda _: None,
    stop_after: int | None = None,
    branch_start: Path | None = None,
    **options: Any,
) -> LanguageModel:
    """Train `job` to its end, from the newest checkpoint if there is one, and return the model.

    Args:
        scratch: folder for checkpoints.
        branch_start: state of a stable run, used if there is no checkpoint yet (`decay_branches.py`); or the folder of a
            saved model of the same shape, whose weights the run starts from.
        log, stop_after: of `Trainer`. options: those of `RunOptions` that do not follow from the job.

    Raises:
        BudgetError: fewer rows than one batch, or activations above their budget.
        ConfigError: the warm-up does not fit into the steps.
        All errors of `Trainer.fit`.
    """
    job = on_world(job)
    fewest = last_rows(job).batch_size  # the ranks may be others than the planned ones
    if fewest % job.replicas:
        raise BudgetError(
            f"batch_size is {job.batch_size}, {fewest} at the end of the run, for {job.replicas} replicas",
            expected=f"a divisor of {fewest}; the nearest are {nearest_divisors(fewest, job.replicas)}",
        )
    if job.stream is None:  # here, since an error of a producer has its traceback
        for step in {0, job.steps - 1}:
            rows = row_shape(job, step)
            TokenProducer(Path(job.tokens), "train", rows.seq_len, rows.batch_size).check()
    lr_schedule.check_warmup(job.steps, job.schedule)
    task = PretrainTask(job, branch_start)
    run = RunOptions(
        scratch=scratch,
        replicas=job.replicas if job.layout is None else ranks_of(job),
        threads=job.threads if job.device == "cpu" else None,
        spike_guard=job.spike_guard,
        ema=job.ema,
        routing=job.routing,
        deterministic=job.deterministic,
        **options,
    )
    Trainer(task, run, callback, log=log).fit(stop_after=stop_after)
    return task.networks


class PretrainTask(Task[Batch]):
    """The task of a job.

    branch_start: as in `pretrain`.
    """

    def __init__(self, job: Job, branch_start: Path | None = None) -> None:
        is_model = branch_start is not None and (branch_start / "config.json").is_file()
        self.job, self.weights = job, branch_start if is_model else None
        self.branch_start = None if is_model else branch_start
        self.steps, self.dtype = job.steps, activation_dtype(job.dtype)
        # Of another objective no level means divergence.
        self.uniform_loss = math.log(job.model.vocab_size) if job.objective == "next_token" else None
        self.evaluate_every = max(1, math.ceil(job.steps / job.evaluations))
        self.meter, self.best = Meter(), BestWeights()
        self.deadline = Deadline(job.steps, job.seconds)
        self.trace: Traffic | None = None
        self.stream_state: dict[str, Any] | None = None  # position of the next batch in raw text

    @cached_property
    def networks(self) -> LanguageModel:  # type: ignore[override]  # made on first use, on every rank
        model = build_model(self.job)
        if self.weights is not None:
            model.load_state_dict(load_model(self.weights, to_train=True).state_dict())
        return model

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "networks"}

    @property
    def identity(self) -> dict[str, Any]:
        return identity(self.job)

    def find_checkpoint(self, checkpoints: CheckpointManager) -> Checkpoint | None:
        found = checkpoints.resume()
        return load_branch(checkpoints, self.branch_start) if found is None and self.branch_start else found

    def allocate(self, replicas: int) -> SharedState:
        return allocate_shared(self.networks, self.job)

    def make_learner(self, trainer: Trainer[Batch]) -> Learner:
        job, self.trainer = self.job, trainer
        self.readers = trainer.group if job.layout is None else readers_of(job, trainer.group)
        trainer.log_objective(job.objective)
        self.learner = build_learner(
            self.networks,
            job,
            trainer.shared,
            trainer.group,
            trainer.moe,
            steps_done=trainer.steps_done,
            accept_step=trainer.accept_step,
            loss_scaler=trainer.loss_scaler,
        )
        self.validator = Validator(job, trainer.group)
        return self.learner

    def close(self) -> None:
        if (laid := getattr(getattr(self, "learner", None), "laid", None)) is not None:
            laid.mesh.close()

    def make_layer_stats(self, learner: Learner, steps_done: int) -> LayerStats | None:
        job = self.job
        if job.layout is not None:  # a rank has parts of gradients
            return None
        return LayerStats(
            learner, steps=job.steps, batch_rows=job.batch_size, muon_every=job.optim.muon_every,
            model=self.networks, ids=self.validator.fixed_ids()[:, : job.seq_len], steps_done=steps_done,
        )  # fmt: skip

    def batches(self, first: int) -> AbstractContextManager[Iterator[Batch]]:
        self.records: Any = job_batches(self.job, self.readers, first, self.rows, self.stream_state)
        return cast("AbstractContextManager[Iterator[Batch]]", self.records)

    def minibatches(self, record: Batch) -> list[list[Any]]:
        has_folder = self.trainer.options.scratch is not None
        if has_folder and self.learner.laid is not None and self.learner.rounds == TRACED_ROUND:
            self.trace = start_trace(self.learner.laid)
        found = micro_batches(record, self.job, self.learner.rounds, self.readers.rank)
        return [found] if self.job.layout is None else [[whole_pass(found, self.job)]]

    def lr_scale(self, step: int) -> float:
        return lr_schedule.lr_scale(self.deadline.planned(step), self.job.steps, self.job.schedule)

    def rows(self, step: int) -> RowShape:
        """Return the rows of a step."""
        return row_shape(self.job, self.deadline.planned(step))

    def report(self, steps_done: int, metrics: dict[str, float], clock: Stopwatch) -> dict[str, float] | None:
        if self.trace is not None and self.trainer.options.scratch is not None:
            save_trace(self.trace, self.learner.laid, self.trainer.group, self.trainer.options.scratch)
            self.trace = None
        self.meter.add(metrics, clock.pop_seconds())
        self._follow_clock(steps_done)
        is_due = steps_done % max(1, self.steps // 500) == 0 or steps_done == self.trainer.last
        if not (is_due and self.meter.tokens):
            return None
        averages = self.meter.pop_metrics()
        rates = learning_rates(self.networks, self.job, self.lr_scale(steps_done - 1))
        flops = self.networks.flops_per_token(self.rows(steps_done - 1).seq_len)
        planned = {"planned_steps": float(self.steps)} if self.steps != self.job.steps else {}
        return {**averages, "flops_per_second": averages["tokens_per_second"] * flops, **rates, **planned}

    def _follow_clock(self, steps_done: int) -> None:
        on_time = self.deadline.rate == 1
        if not self.deadline.follow(steps_done, self.trainer.group):
            return
        self.steps = self.deadline.steps
        if on_time:
            seconds, planned = self.deadline.seconds, self.job.seconds
            message = f"after {seconds:,.0f} s training is behind its plan of {planned:,.0f} s, {self.job.steps:,} steps"
            action = f"the decay starts earlier; at this speed {self.steps:,} steps"
            self.trainer.report_event(steps_done, {"kind": "behind", "message": message, "action": action})

    def evaluate_at(self, steps_done: int) -> bool:
        return steps_done % self.evaluate_every == 0 or steps_done == self.steps

    def evaluate(self) -> dict[str, float]:
        return self.validator(self.networks, self.trainer.group)

    def keep_best(self, steps_done: int, metrics: dict[str, float]) -> dict[str, float]:
        if "held_out_nll" not in metrics or steps_done < steps_per_epoch(self.job):
            return metrics
        if not self.best.follow(self.trainer, steps_done, metrics["held_out_nll"]):
            return metrics
        self.learner.load()
        return {**self.evaluate(), "kept_step": float(self.best.state["step"])}

    def state_dict(self) -> dict[str, Any]:
        stream = {"stream": self.records.state} if isinstance(self.records, StreamBatches) else {}
        return {
            "meter": self.meter.state_dict(),
            "best": self.best.state,
            "deadline": self.deadline.state_dict(),
            **stream,
        }

    def load_state_dict(self, state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.meter, self.best = Meter(state.get("meter")), BestWeights(state.get("best"))
        self.deadline = Deadline(self.job.steps, self.job.seconds, state.get("deadline"))
        self.steps, self.stream_state = self.deadline.steps, state.get("stream")

    def documents(self, step: int, state: dict[str, Any]) -> dict[str, Any]:
        return documents_in_batch(self.job, step, state.get("stream"), self.rows(step))

    def out_of_memory(self, error: Exception) -> OutOfMemoryError:
        return suggest(error, self.job)


def learning_rates(model: LanguageModel, job: Job, lr_scale: float) -> dict[str, float]:
    """Return the learning rates at `lr_scale` of their peaks: matrices without a suffix, the others by group."""
    optim = job.optim
    matrices = (
        optim.lr_muon if optim.optimizer == "muon" else optim.lr_adamw * mup.inverse_width_mult(model, optim)
    )
    rates = {"": matrices, "/embedding": optim.lr_embedding, "/scalars": optim.lr_scalar}
    if any(name.startswith("memory.") for name, _ in model.named_parameters()):
        rates["/ngram"] = optim.lr_ngram
    return {f"learning_rate{name}": lr_scale * rate for name, rate in rates.items()}
