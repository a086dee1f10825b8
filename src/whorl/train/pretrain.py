"""Pretraining: the loop of `loop.py` over batches of text, with a look at held-out text on the way.

Everything that decides the weights is in `Job` and in the step number: the data order, the learning rates, the seed. No
clock, no measured speed. So a run that was killed and continued ends with the same bits as one that was not, and
time decides only when a checkpoint is written (rank 0 writes it from shared memory while the other replicas already
compute the next gradients: weights change only after all have met).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from whorl.corpus.blocks import Source
from whorl.errors import BudgetError
from whorl.models import Decoder, DecoderConfig
from whorl.objectives import Loss, next_token
from whorl.runs.seeds import generator
from whorl.slots import Drain, Slot
from whorl.tokens.loader import TokenBatch, open_batches
from whorl.tokens.shards import TokenSet
from whorl.tokens.stream import StreamBatches, StreamConfig
from whorl.train.checkpoint import Keeper, restore
from whorl.train.config import OptimConfig
from whorl.train.held_out import HeldOut
from whorl.train.learner import Learner, Shared
from whorl.train.loop import Clock, learn
from whorl.train.schedule import warmup_stable_decay
from whorl.train.update import Part, Treatment, Update
from whorl.train.world import World, start_replicas

PLAIN = ("tokens", "targets", "loss_mask")  # all that a batch of plain rows needs


class RawText(BaseModel):
    """Raw files to learn from, tokenised on the way, in place of the token set's training split."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tokenizer: str = Field(description="folder of the tokenizer")
    sources: list[Source] = Field(min_length=1)
    record_bytes: int = Field(
        default=1 << 19, ge=1, description="raw text whose documents are shuffled together"
    )
    block_bytes: int = Field(default=1 << 14, ge=1, description="raw text that is read in one piece")
    horizon: int = Field(
        default=1000, ge=1, description="records over which weights go to their final values"
    )
    workers: int = Field(default=1, ge=0, description="processes that tokenise, for each replica")


class Job(BaseModel):
    """All that decides the weights of a run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tokens: str = Field(description="folder of the token set")
    raw: RawText | None = Field(default=None, description="learn from raw files instead")
    model: DecoderConfig
    optim: OptimConfig = OptimConfig()
    length: int = Field(ge=2, description="tokens a row")
    batch_rows: int = Field(ge=1, description="rows a step, over all replicas")
    micro_rows: int | None = Field(default=None, ge=1, description="rows a forward, a replica; default all")
    steps: int = Field(ge=1)
    seed: int = 0
    z_loss: float = Field(default=1e-5, ge=0)
    warmup: float = Field(default=0.02, ge=0, le=1)
    decay: float = Field(default=0.5, gt=0, le=1)
    evaluations: int = Field(default=40, ge=1, description="looks at held-out text during the run")
    replicas: int = Field(default=1, ge=1)
    threads: int = Field(default=1, ge=1, description="threads a replica")
    device: str = "cpu"
    dtype: str = "float32"
    compile: bool = True
    serial_loader: bool = Field(default=False, description="fill batches in the training process itself")


class Observer(Protocol):
    """What rank 0 tells while it trains. All calls are made between updates."""

    def on_step(self, step: int, metrics: dict[str, float]) -> None: ...
    def on_evaluation(self, step: int, metrics: dict[str, float], model: Decoder) -> None: ...
    def on_checkpoint(self, step: int, seconds: float) -> None: ...


def build_model(job: Job) -> Decoder:
    """The untrained model of `job`, the same bits for the same seed."""
    dtype = getattr(torch, job.dtype)
    return Decoder(job.model, generator(job.seed, "weights"), dtype).to(job.device)


def pretrain(
    job: Job,
    scratch: Path,
    observer: Observer,
    *,
    checkpoint_seconds: float = 30.0,
    say: Callable[[str], None] = lambda _: None,
    stop_after: int | None = None,
) -> Decoder:
    """Trains `job` to its end, from the newest checkpoint in `scratch` if there is one, and returns the model.

    Args:
        scratch: folder for checkpoints.
        checkpoint_seconds: time between checkpoints.
        stop_after: return after this many steps in all (the planner's timing, tests).

    Raises:
        BudgetError: fewer rows than one batch. ReplicaError, ProducerError: a helper process failed.
    """
    if job.batch_rows % job.replicas:
        raise BudgetError(
            f"batch_rows is {job.batch_rows}, for {job.replicas} replicas",
            expected="a multiple of the replicas",
        )
    model = build_model(job)
    shared = shared_of(model, job)
    keeper = Keeper(scratch, _identity(job), seconds=checkpoint_seconds, say=say)
    found, first, place = keeper.resume(), 0, None
    if found is not None:
        first, place = found.step, found.record.get("stream")
        restore(shared.tensors(), found.tensors)
        say(f"continues at step {first:,} of {job.steps:,}")
    last = job.steps if stop_after is None else min(stop_after, job.steps)
    world = start_replicas(job.replicas, _replica, job, shared, first, last, place)
    try:
        _train(world, job, model, shared, first, last, place, observer, keeper)
    finally:
        world.close()
    return model


def _replica(
    world: World, job: Job, shared: Shared, first: int, last: int, place: dict[str, Any] | None
) -> None:
    _train(world, job, build_model(job), shared, first, last, place, None, None)


def _train(
    world: World,
    job: Job,
    model: Decoder,
    shared: Shared,
    first: int,
    last: int,
    place: dict[str, Any] | None,
    observer: Observer | None,
    keeper: Keeper | None,
) -> None:
    """What every replica runs."""
    if job.device == "cpu":
        torch.set_num_threads(job.threads)
    learner = learner_of(model, job, shared, world, steps_done=first)
    held_out = HeldOut(job, world)
    every = max(1, math.ceil(job.steps / job.evaluations))
    window = _Window()

    def factor(step: int) -> float:
        return warmup_stable_decay(step, job.steps, job.warmup, job.decay)

    def after(done: int, metrics: dict[str, float], clock: Clock) -> None:
        window.add(metrics, clock.take())
        if observer is not None and (done % max(1, job.steps // 500) == 0 or done == last):
            rate = factor(done - 1) * job.optim.matrix_rate
            observer.on_step(done, {**window.close(), "learning_rate": rate})
        if done % every == 0 or done == job.steps:
            figures = held_out(model, world)
            if observer is not None:
                observer.on_evaluation(done, figures, model)
        if keeper is not None and observer is not None and (done == job.steps or keeper.due()):
            more = {"stream": records.state} if isinstance(records, StreamBatches) else {}
            observer.on_checkpoint(done, keeper.save(done, shared.tensors(), more))

    def passes(record: Any) -> list[list[Part]]:
        return [_share(record, job)]

    with _records(job, world, first, place) as records:
        learn(
            learner,
            records,
            passes,
            first=first,
            last=last,
            factor=factor,
            after=after,
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
    config = StreamConfig(
        Path(raw.tokenizer),
        raw.sources,
        job.length,
        job.seed,
        record_bytes=raw.record_bytes,
        block_bytes=raw.block_bytes,
        horizon=raw.horizon,
    )
    workers = 0 if job.serial_loader else raw.workers
    return StreamBatches(
        config, rows=job.batch_rows, workers=workers, state=place, rank=world.rank, world=world.size
    )


def shared_of(model: Decoder, job: Job) -> Shared:
    """The memory that all replicas of `job` see."""
    rows = job.batch_rows // job.replicas * job.length
    return Shared.of(model, treatments(model, job.optim), job.replicas, rows)


def learner_of(model: Decoder, job: Job, shared: Shared, world: World, steps_done: int = 0) -> Learner:
    """The learner of a language model: one update, next-token prediction."""
    optim = job.optim
    update = Update(
        LossOf(model, job),
        treatments(model, optim),
        clip_norm=optim.clip_norm,
        momentum=optim.momentum,
        matrix_every=optim.matrix_every,
        weight_decay=optim.weight_decay,
        betas=(0.8, 0.95),
        eps=1e-10,
    )
    return Learner(model, [update], shared, world, dtype=model.dtype, steps_done=steps_done)


def treatments(model: Decoder, optim: OptimConfig) -> dict[str, Treatment]:
    """Muon for the matrices of the blocks, sparse rows for n-gram tables, AdamW for the rest."""
    found = {}
    for name, p in model.named_parameters():
        if name.startswith("memory."):
            found[name] = Treatment("rows", optim.memory_rate)
        elif name in ("embedding", "head"):
            found[name] = Treatment("adamw", optim.embedding_rate)
        elif name.startswith("blocks.") and p.ndim == 2 and min(p.shape) > 1:
            found[name] = Treatment("muon", optim.matrix_rate)
        else:
            found[name] = Treatment("adamw", optim.scalar_rate)
    return found


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


class LossOf:
    """The objective over a micro-batch. Plain rows (one document each, the many) take the compiled path, without a
    document mask; mixed rows (the few) run uncompiled with segments and positions."""

    def __init__(self, model: Decoder, job: Job) -> None:
        self.model, self.z_loss = model, job.z_loss
        self.fast: Callable[..., tuple[Tensor, ...]] = self._loss
        if job.compile:
            # Another job's graphs would count against the limit of variants, beyond which nothing is compiled.
            torch.compiler.reset()
            self.fast = torch.compile(self._loss, dynamic=False)

    def _loss(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        targets: Tensor,
        mask: Tensor,
        segments: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        hidden = self.model.trunk(x, rotary, segments)
        loss = next_token(
            hidden.flatten(0, 1), self.model.head_weight, targets.flatten(), mask.flatten(), self.z_loss
        )
        return loss.total, loss.count, loss.metrics["nll"]

    def __call__(self, part: Part) -> Loss:
        segments = part.get("segment_ids")
        x = self.model.embed(part["tokens"], segments)
        if segments is None:
            rotary = self.model.rotary.between(0, x.shape[1], x.device)
            total, count, nll = self.fast(x, rotary, part["targets"], part["loss_mask"])
        else:
            rotary = self.model.rotary.at(part["positions"])
            total, count, nll = self._loss(x, rotary, part["targets"], part["loss_mask"], segments)
        return Loss(total, count, {"nll": nll})


class _Window:
    """Figures since the last report: means weighted by tokens, and where the time went."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self.sums: dict[str, float] = {}
        self.tokens = self.seconds = self.waited = 0.0
        self.steps = 0

    def add(self, metrics: dict[str, float], seconds: dict[str, float]) -> None:
        for name in ("loss", "nll"):
            self.sums[name] = self.sums.get(name, 0.0) + metrics[name] * metrics["count"]
        self.sums["norm"] = self.sums.get("norm", 0.0) + metrics["gradient_norm"]
        self.tokens += metrics["count"]
        self.seconds += sum(seconds.values())
        self.waited += seconds["wait"]
        self.steps += 1

    def close(self) -> dict[str, float]:
        out = {
            "loss": self.sums["loss"] / self.tokens,
            "nll": self.sums["nll"] / self.tokens,
            "gradient_norm": self.sums["norm"] / self.steps,
            "tokens_per_second": self.tokens / self.seconds,
            "loader_share": self.waited / self.seconds,
        }
        self._reset()
        return out


def _identity(job: Job) -> dict[str, Any]:
    """What must be the same for a checkpoint to fit: the ids, but not where they lie nor how many replicas there are."""
    whole = job.model_dump(
        mode="json", exclude={"tokens", "replicas", "threads", "device", "serial_loader", "raw"}
    )
    if job.raw is not None:
        places: Any = {"tokenizer": True, "workers": True, "sources": {"__all__": {"files": True}}}
        whole["raw"] = job.raw.model_dump(mode="json", exclude=places)
    return {
        **whole,
        "data": TokenSet(Path(job.tokens)).split("train").fingerprint,
    }
