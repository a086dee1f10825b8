"""Pretraining: the loop of `loop.py` over batches of text, with a look at held-out text on the way.

Everything that decides the weights is in `Job` and in the step number: the data order, the learning rates, the seed. No
clock, no measured speed. So a run that was killed and continued ends with the same bits as one that was not, and
time decides only when a checkpoint is taken (rank 0 copies it from shared memory while the other replicas already
compute the next gradients: weights change only after all have met).
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
from whorl.parallel.process_group import World, start_replicas
from whorl.slots import Drain, Slot
from whorl.tokens.loader import TokenBatch, open_batches
from whorl.tokens.stream import StreamBatches
from whorl.tracking.seeds import derive, generator
from whorl.train.checkpoint.format import restore
from whorl.train.checkpoint.manager import Account, Keeper
from whorl.train.checkpoint.remote import Tiers
from whorl.train.determinism import deterministic
from whorl.train.job import Job, identity, stream_config
from whorl.train.learner.ema import Averaged, allocate
from whorl.train.learner.learner import Learner, Shared
from whorl.train.learner.loop import Clock, learn
from whorl.train.learner.loss_scaler import LossScaling
from whorl.train.learner.update import Judge, Part, Update, refuse
from whorl.train.lm.decay_branches import begin
from whorl.train.lm.objective import LossOf, treatments
from whorl.train.lm.precision import activations, orthogonalisation, rounding_of
from whorl.train.metrics.layer_stats import Figures
from whorl.train.metrics.meter import Observer
from whorl.train.metrics.moe_balance import Mixtures
from whorl.train.metrics.validation import HeldOut
from whorl.train.optim import mup
from whorl.train.optim.lr_schedule import check as check_schedule
from whorl.train.optim.lr_schedule import factor as schedule_factor
from whorl.train.resilience.memory_budget import within_budget
from whorl.train.resilience.monitor import Vigil
from whorl.train.resilience.oom_advice import advising
from whorl.train.resilience.rollback import on_this_machine

PLAIN = ("tokens", "targets", "loss_mask")  # all that a batch of plain rows needs


def build_model(job: Job) -> LanguageModel:
    """The untrained model of `job`, the same bits for the same seed.

    Raises:
        BudgetError: its activations do not fit into `activation_budget`.
    """
    with deterministic(job.deterministic):
        model = make_model(job.model, generator(job.seed, "weights"), activations(job.dtype)).to(job.device)
        mup.start(model, job.optim)
        if job.dtype == "float8":
            use_float8(model)
        return within_budget(model, job)


@advising
def pretrain(
    job: Job,
    scratch: Path,
    observer: Observer,
    *,
    checkpoint_seconds: float = 30.0,
    tiers: Tiers | None = None,
    account: Account | None = None,
    say: Callable[[str], None] = lambda _: None,
    stop_after: int | None = None,
    stable: Collection[int] = (),
    start: Path | None = None,
    folder: Path | None = None,
) -> LanguageModel:
    """Trains `job` to its end, from the newest checkpoint if there is one, and returns the model.

    Args:
        scratch: folder for checkpoints.
        checkpoint_seconds: time between checkpoints.
        tiers: how many stay, and where else they go.
        account: told what checkpoints came to.
        stop_after: return after this many steps in all (the planner's timing, tests).
        stable: after which steps the state is put aside in `scratch`, to branch from it (`branches.py`).
        start: such a state, to go on from where there is no checkpoint yet.
        folder: where the heartbeat and, after a stall, stacks are written; None for neither.

    Raises:
        BudgetError: fewer rows than one batch, or more activations than their budget. ConfigError: a warm-up that the steps
            have no room for. ReplicaError, ProducerError: a helper process failed. DivergedError: it went astray and could
            not be mended. MemoryFullError: what to make smaller. StoppedError: by SIGTERM. DiskFullError, CheckpointError: a
            checkpoint could not be written; the one before is whole.
    """
    if job.batch_rows % job.replicas:
        raise BudgetError(
            f"batch_rows is {job.batch_rows}, for {job.replicas} replicas",
            expected="a multiple of the replicas",
        )
    check_schedule(job.steps, job.schedule)
    model = build_model(job)
    shared = shared_of(model, job)
    with Keeper(
        scratch, identity(job), seconds=checkpoint_seconds, say=say, tiers=tiers, account=account
    ) as keeper:
        found, first, record = keeper.resume(), 0, dict[str, Any]()
        if found is not None:
            first, record = found.step, found.record
            restore(shared.tensors(), found.tensors)
            record = on_this_machine(keeper, record, first, shared.tensors())
            say(f"continues at step {first:,} of {job.steps:,}")
        elif start is not None:
            first, record = begin(keeper, start, shared.tensors())
        keeper.prepare(shared.tensors(), model.params()["total"])
        last = job.steps if stop_after is None else min(stop_after, job.steps)
        world = start_replicas(job.replicas, _replica, job, shared, first, last, record, folder)
        try:
            vigil = Vigil(
                job, world, shared, first, record, observer, keeper, stable=stable, folder=folder, say=say
            )
            _train(world, job, model, shared, first, last, vigil, observer, keeper)
        finally:
            world.close()
    Averaged(shared, job.ema, World()).bind(model, averages=last == job.steps)
    return model


def _replica(
    world: World, job: Job, shared: Shared, first: int, last: int, record: dict[str, Any], folder: Path | None
) -> None:
    vigil = Vigil(job, world, shared, first, record, folder=folder)
    _train(world, job, build_model(job), shared, first, last, vigil, None, None)


def _train(
    world: World,
    job: Job,
    model: LanguageModel,
    shared: Shared,
    first: int,
    last: int,
    vigil: Vigil,
    observer: Observer | None,
    keeper: Keeper | None,
) -> None:
    """What every replica runs."""
    if job.device == "cpu":
        torch.set_num_threads(job.threads)
    mixtures = Mixtures(model, job.routing, world, vigil.loads)
    learner = learner_of(
        model, job, shared, world, mixtures, steps_done=first, judge=vigil.judge, scaling=vigil.scaling
    )
    vigil.mixtures = mixtures
    held_out = HeldOut(job, world)
    watched = Figures(model, job, learner, world, held_out.some_ids(), steps_done=first)
    every = max(1, math.ceil(job.steps / job.evaluations))
    averaged, window = Averaged(shared, job.ema, world), vigil.window

    def factor(step: int) -> float:
        return schedule_factor(step, job.steps, job.schedule)

    def look(done: int) -> None:
        model.eval()
        with averaged.used(model):
            with vigil.clock.during("held_out"):
                figures = held_out(model, world)
            vigil.owes_a_look = False
            if observer is not None:
                observer.on_evaluation(done, figures, model)
        model.train()

    def after(done: int, metrics: dict[str, float], clock: Clock) -> None:
        skipped = "skipped" in metrics
        mixtures.forget() if skipped else mixtures.end_step()
        averaged.end_step(done)
        if vigil.settle(done, records, skipped=skipped):
            watched.forget()
        watched.after(done)
        window.add(metrics, clock.take())
        report = done % max(1, job.steps // 500) == 0 or done == last
        if observer is not None and report and window.tokens:
            seen, rates = window.close(), watched.rates(factor(done - 1))
            speed = {"flops_per_second": seen["tokens_per_second"] * watched.flops_per_token}
            observer.on_step(done, {**seen, **speed, **rates, **mixtures.figures(), **watched.take()})
        if done % every == 0 or done == job.steps:
            look(done)
        if keeper is not None and observer is not None and (done == job.steps or keeper.due()):
            observer.on_checkpoint(done, vigil.save())

    def passes(record: Any) -> list[list[Part]]:
        if mixtures.random:  # by the step's number, so that a run goes on with what it would have drawn
            torch.manual_seed(derive(job.seed, "dropout", learner.rounds, world.rank))
        return [_share(record, job)]

    with vigil, deterministic(job.deterministic), _records(job, world, first, vigil.place) as records:
        if vigil.owes_a_look:
            look(first)
        learn(
            learner,
            records,
            passes,
            first=first,
            last=last,
            factor=factor,
            after=after,
            clock=vigil.clock,
        )


def _records(
    job: Job, world: World, first: int, place: dict[str, Any] | None
) -> Drain[TokenBatch] | StreamBatches:
    """This replica's share of the batches from number `first` on."""
    raw = job.raw
    if raw is None:
        return open_batches(
            Path(job.tokens),
            "train",
            length=job.length,
            batch_rows=job.batch_rows,
            seed=job.seed,
            start=first,
            serial=job.serial_loader,
            rank=world.rank,
            world=world.size,
        )
    workers = 0 if job.serial_loader else raw.workers
    return StreamBatches(
        stream_config(job, raw),
        rows=job.batch_rows,
        workers=workers,
        state=place,
        rank=world.rank,
        world=world.size,
    )


def shared_of(model: LanguageModel, job: Job) -> Shared:
    """The memory that all replicas of `job` see."""
    rows = job.batch_rows // job.replicas * job.length
    shared = Shared.of(model, treatments(model, job.optim), job.replicas, rows, narrow=bool(job.rounding))
    if job.ema:
        allocate(shared, job.replicas)
    return shared


def learner_of(
    model: LanguageModel,
    job: Job,
    shared: Shared,
    world: World,
    mixtures: Mixtures | None = None,
    steps_done: int = 0,
    judge: Judge = refuse,
    scaling: LossScaling | None = None,
) -> Learner:
    """The learner of a language model: one update, next-token prediction."""
    optim, treated = job.optim, treatments(model, job.optim)
    update = Update(
        LossOf(
            model, mixtures or Mixtures(model, job.routing, world), z_loss=job.z_loss, compile=job.compile
        ),
        treated,
        clip_norm=optim.clip_norm,
        momentum=optim.momentum,
        matrix_every=optim.matrix_every,
        weight_decay=optim.weight_decay,
        betas=(0.8, 0.95),
        eps=1e-10,
        fused=optim.fused,
        judge=judge,
        scaling=scaling or (LossScaling() if job.dtype == "float16" else None),
        rounding=rounding_of(job.rounding, job.seed, treated),
    )
    return Learner(
        model, [update], shared, world, dtype=orthogonalisation(model.dtype), steps_done=steps_done
    )


def _share(record: Slot[TokenBatch] | dict[str, Tensor], job: Job) -> list[Part]:
    """This replica's rows of a batch, cut into micro-batches, copied out of the slot."""
    if isinstance(record, dict):
        views, plain = record, bool((record["segment_ids"] <= 1).all())
    else:
        views, plain = record.tensors(), bool(record.data.plain)
    names = PLAIN if plain else (*PLAIN, "segment_ids", "positions")
    tensors = {name: views[name].to(job.device, copy=True) for name in names}
    rows = tensors["tokens"].shape[0]
    size = job.micro_rows or rows
    return [{n: t[i : i + size] for n, t in tensors.items()} for i in range(0, rows, size)]
