"""Pretraining: the training loop over batches of text, with periodic validation.

The weights depend only on `Job` and the step number: data order, learning rates, seed. No clock and no measured speed
enters. So a run that was killed and resumed ends with the same bits as an undisturbed run. Time decides only when a
checkpoint is taken. Rank 0 copies it from shared memory while the other replicas compute the next gradients: weights
change only after a barrier.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whorl.errors import BudgetError
from whorl.models import LanguageModel, make_model
from whorl.nn.float8 import use_float8
from whorl.parallel.process_group import ProcessGroup, spawn_replicas
from whorl.slots import FIFOReader, Slot
from whorl.tokens.loader import TokenBatch, open_batches
from whorl.tokens.stream import StreamBatches
from whorl.tracking.seeds import derive, generator
from whorl.train.checkpoint.format import restore
from whorl.train.checkpoint.manager import CheckpointManager, CheckpointStats
from whorl.train.checkpoint.remote import CheckpointConfig
from whorl.train.determinism import deterministic
from whorl.train.job import Job, identity, stream_config
from whorl.train.learner.ema import EMA, allocate_ema
from whorl.train.learner.learner import Learner, SharedState
from whorl.train.learner.loop import Stopwatch, train_loop
from whorl.train.learner.loss_scaler import LossScaler
from whorl.train.learner.update import AcceptStep, MicroBatch, Update, accept_if_finite
from whorl.train.lm.decay_branches import resume_from_branch
from whorl.train.lm.objective import LMObjective, param_optims
from whorl.train.lm.precision import activation_dtype, make_rounding, muon_dtype
from whorl.train.metrics.layer_stats import LayerStats
from whorl.train.metrics.meter import TrainCallback
from whorl.train.metrics.moe_balance import MoEBalancer
from whorl.train.metrics.validation import Validator
from whorl.train.optim import mup
from whorl.train.optim.lr_schedule import check_warmup as check_schedule
from whorl.train.optim.lr_schedule import lr_scale as schedule_factor
from whorl.train.resilience.memory_budget import apply_activation_checkpointing
from whorl.train.resilience.monitor import RunMonitor
from whorl.train.resilience.oom_advice import with_oom_advice
from whorl.train.resilience.rollback import ensure_local_snapshot

UNPACKED_FIELDS = (
    "tokens",
    "targets",
    "loss_mask",
)  # the fields of a batch whose rows hold one document each


def build_model(job: Job) -> LanguageModel:
    """Return the untrained model of `job`; the seed determines its bits.

    Raises:
        BudgetError: the activations do not fit into `activation_budget`.
    """
    with deterministic(job.deterministic):
        model = make_model(job.model, generator(job.seed, "weights"), activation_dtype(job.dtype)).to(
            job.device
        )
        mup.scale_head_init(model, job.optim)
        if job.dtype == "float8":
            use_float8(model)
        return apply_activation_checkpointing(model, job)


@with_oom_advice
def pretrain(
    job: Job,
    scratch: Path,
    callback: TrainCallback,
    *,
    checkpoint_seconds: float = 30.0,
    checkpoint_config: CheckpointConfig | None = None,
    checkpoint_stats: CheckpointStats | None = None,
    log: Callable[[str], None] = lambda _: None,
    stop_after: int | None = None,
    branch_points: Collection[int] = (),
    branch_start: Path | None = None,
    folder: Path | None = None,
) -> LanguageModel:
    """Train `job` to its end, from the newest checkpoint if there is one, and return the model.

    Args:
        scratch: folder for checkpoints.
        callback: receives metrics, evaluations, checkpoints and events.
        checkpoint_seconds: time between checkpoints.
        checkpoint_config: retention and remote storage.
        checkpoint_stats: updated with counts and stall times.
        stop_after: return after this many steps in total (planner timing, tests).
        branch_points: steps after which the state is saved in `scratch` for a decay branch (`decay_branches.py`).
        branch_start: such a state, used if there is no checkpoint yet.
        folder: where the heartbeat and, after a stall, stack traces are written; None for neither.

    Raises:
        BudgetError: fewer rows than one batch, or activations above their budget.
        ConfigError: the warm-up does not fit into the steps.
        ReplicaError, ProducerError: a helper process failed.
        DivergedError: training diverged and could not recover.
        OutOfMemoryError: with the settings to reduce.
        PreemptedError: SIGTERM.
        DiskFullError, CheckpointError: a checkpoint could not be written; the previous one is intact.
    """
    if job.batch_size % job.replicas:
        raise BudgetError(
            f"batch_size is {job.batch_size}, for {job.replicas} replicas",
            expected="a multiple of the number of replicas",
        )
    check_schedule(job.steps, job.schedule)
    model = build_model(job)
    shared = allocate_shared(model, job)
    with CheckpointManager(
        scratch,
        identity(job),
        seconds=checkpoint_seconds,
        log=log,
        config=checkpoint_config,
        stats=checkpoint_stats,
    ) as checkpointer:
        found, first, record = checkpointer.resume(), 0, dict[str, Any]()
        if found is not None:
            first, record = found.step, found.metadata
            restore(shared.tensors(), found.tensors)
            record = ensure_local_snapshot(checkpointer, record, first, shared.tensors())
            log(f"continues at step {first:,} of {job.steps:,}")
        elif branch_start is not None:
            first, record = resume_from_branch(checkpointer, branch_start, shared.tensors())
        checkpointer.prepare(shared.tensors(), model.params()["total"])
        last = job.steps if stop_after is None else min(stop_after, job.steps)
        world = spawn_replicas(job.replicas, _replica, job, shared, first, last, record, folder)
        try:
            monitor = RunMonitor(
                job,
                world,
                shared,
                first,
                record,
                callback,
                checkpointer,
                branch_points=branch_points,
                folder=folder,
                log=log,
            )
            _train(world, job, model, shared, first, last, monitor, callback, checkpointer)
        finally:
            world.close()
    EMA(shared, job.ema, ProcessGroup()).bind(model, use_ema=last == job.steps)
    return model


def _replica(
    process_group: ProcessGroup,
    job: Job,
    shared: SharedState,
    first: int,
    last: int,
    metadata: dict[str, Any],
    folder: Path | None,
) -> None:
    monitor = RunMonitor(job, process_group, shared, first, metadata, folder=folder)
    _train(process_group, job, build_model(job), shared, first, last, monitor, None, None)


def _train(
    process_group: ProcessGroup,
    job: Job,
    model: LanguageModel,
    shared: SharedState,
    first: int,
    last: int,
    monitor: RunMonitor,
    callback: TrainCallback | None,
    checkpointer: CheckpointManager | None,
) -> None:
    """The part that every replica runs."""
    if job.device == "cpu":
        torch.set_num_threads(job.threads)
    moe = MoEBalancer(model, job.routing, process_group, monitor.expert_loads)
    learner = build_learner(
        model,
        job,
        shared,
        process_group,
        moe,
        steps_done=first,
        accept_step=monitor.accept_step,
        loss_scaler=monitor.loss_scaler,
    )
    monitor.moe = moe
    validator = Validator(job, process_group)
    layer_stats = LayerStats(model, job, learner, process_group, validator.fixed_ids(), steps_done=first)
    every = max(1, math.ceil(job.steps / job.evaluations))
    ema, meter = EMA(shared, job.ema, process_group), monitor.meter

    def lr_factor(step: int) -> float:
        return schedule_factor(step, job.steps, job.schedule)

    def validate(done: int) -> None:
        model.eval()
        with ema.average_parameters(model):
            with monitor.preemption.during("validation"):
                figures = validator(model, process_group)
            monitor.validation_pending = False
            if callback is not None:
                callback.on_evaluation(done, figures, model)
        model.train()

    def on_step_end(done: int, metrics: dict[str, float], clock: Stopwatch) -> None:
        skipped = "skipped" in metrics
        moe.discard_step() if skipped else moe.on_step_end()
        ema.on_step_end(done)
        if monitor.on_step_end(done, records, skipped=skipped):
            layer_stats.reset()
        layer_stats.on_step_end(done)
        meter.add(metrics, clock.pop_seconds())
        report = done % max(1, job.steps // 500) == 0 or done == last
        if callback is not None and report and meter.tokens:
            averages, rates = meter.pop_metrics(), layer_stats.learning_rates(lr_factor(done - 1))
            speed = {"flops_per_second": averages["tokens_per_second"] * layer_stats.flops_per_token}
            callback.on_step(
                done, {**averages, **speed, **rates, **moe.pop_metrics(), **layer_stats.pop_metrics()}
            )
        if done % every == 0 or done == job.steps:
            validate(done)
        if checkpointer is not None and callback is not None and (done == job.steps or checkpointer.due()):
            callback.on_checkpoint(done, monitor.save())

    def minibatches(record: Any) -> list[list[MicroBatch]]:
        if moe.stochastic:  # seeded by step number, so that a resumed run draws the same numbers
            torch.manual_seed(derive(job.seed, "dropout", learner.rounds, process_group.rank))
        return [_micro_batches(record, job)]

    with (
        monitor,
        deterministic(job.deterministic),
        _batches(job, process_group, first, monitor.stream_state) as records,
    ):
        if monitor.validation_pending:
            validate(first)
        train_loop(
            learner,
            records,
            minibatches,
            first=first,
            last=last,
            lr_scale=lr_factor,
            on_step_end=on_step_end,
            stopwatch=monitor.preemption,
        )


def _batches(
    job: Job, process_group: ProcessGroup, first: int, stream_state: dict[str, Any] | None
) -> FIFOReader[TokenBatch] | StreamBatches:
    """This replica's share of the batches from number `first` on."""
    stream = job.stream
    if stream is None:
        return open_batches(
            Path(job.tokens),
            "train",
            seq_len=job.seq_len,
            batch_size=job.batch_size,
            seed=job.seed,
            start=first,
            serial=job.serial_loader,
            rank=process_group.rank,
            world_size=process_group.size,
        )
    workers = 0 if job.serial_loader else stream.workers
    return StreamBatches(
        stream_config(job, stream),
        batch_size=job.batch_size,
        workers=workers,
        state=stream_state,
        rank=process_group.rank,
        world_size=process_group.size,
    )


def allocate_shared(model: LanguageModel, job: Job) -> SharedState:
    """Allocate the memory that all replicas of `job` share."""
    rows = job.batch_size // job.replicas * job.seq_len
    shared = SharedState.allocate(
        model, param_optims(model, job.optim), job.replicas, rows, bf16_matrices=bool(job.bf16_weights)
    )
    if job.ema:
        allocate_ema(shared, job.replicas)
    return shared


def build_learner(
    model: LanguageModel,
    job: Job,
    shared: SharedState,
    process_group: ProcessGroup,
    moe: MoEBalancer | None = None,
    steps_done: int = 0,
    accept_step: AcceptStep = accept_if_finite,
    loss_scaler: LossScaler | None = None,
) -> Learner:
    """Return the learner of a language model: one update, next-token prediction."""
    optim, treated = job.optim, param_optims(model, job.optim)
    update = Update(
        LMObjective(
            model,
            moe or MoEBalancer(model, job.routing, process_group),
            z_loss=job.z_loss,
            compile=job.compile,
        ),
        treated,
        clip_norm=optim.clip_norm,
        momentum=optim.momentum,
        muon_every=optim.muon_every,
        weight_decay=optim.weight_decay,
        betas=(0.8, 0.95),
        eps=1e-10,
        fused=optim.fused,
        accept_step=accept_step,
        loss_scaler=loss_scaler or (LossScaler() if job.dtype == "float16" else None),
        rounding=make_rounding(job.bf16_weights, job.seed, treated),
    )
    return Learner(
        model, [update], shared, process_group, dtype=muon_dtype(model.dtype), steps_done=steps_done
    )


def _micro_batches(batch: Slot[TokenBatch] | dict[str, Tensor], job: Job) -> list[MicroBatch]:
    """Copy this replica's rows of a batch out of the slot and split them into micro-batches."""
    if isinstance(batch, dict):
        views, plain = batch, bool((batch["segment_ids"] <= 1).all())
    else:
        views, plain = batch.tensors(), bool(batch.data.single_segment)
    names = UNPACKED_FIELDS if plain else (*UNPACKED_FIELDS, "segment_ids", "positions")
    tensors = {name: views[name].to(job.device, copy=True) for name in names}
    rows = tensors["tokens"].shape[0]
    size = job.micro_batch_size or rows
    return [{n: t[i : i + size] for n, t in tensors.items()} for i in range(0, rows, size)]
