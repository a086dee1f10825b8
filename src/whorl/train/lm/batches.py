"""The batches of a pretraining job: rows of a token set or of raw text, this replica's share, as micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whorl.objectives.generative import masked
from whorl.parallel.process_group import ProcessGroup
from whorl.slots import FIFOReader, Slot
from whorl.tokens.loader import TokenBatch, open_batches
from whorl.tokens.stream import StreamBatches
from whorl.tracking.seeds import derive, generator
from whorl.train.job import Job, RowShape, first_long_step, row_shape, stream_config
from whorl.train.learner.update import MicroBatch

Batch = Slot[TokenBatch] | dict[str, Tensor]
UNPACKED_FIELDS = ("tokens", "targets", "loss_mask")  # of a batch whose rows hold one document each


def job_batches(
    job: Job,
    process_group: ProcessGroup,
    first: int,
    rows_of: Callable[[int], RowShape],
    stream_state: dict[str, Any] | None,
) -> Any:
    """This replica's share of the batches from number `first` on: an iterator and a context."""
    stream = job.stream
    if stream is None:
        return closing(_token_batches(job, process_group, first, rows_of))
    workers = 0 if job.serial_loader else stream.workers
    return StreamBatches(
        stream_config(job, stream),
        batch_size=job.batch_size,
        workers=workers,
        state=stream_state,
        group=process_group,
    )


def _token_batches(
    job: Job, process_group: ProcessGroup, first: int, rows_of: Callable[[int], RowShape]
) -> Iterator[Slot[TokenBatch]]:
    """Yield the batches of a token set from number `first` on. That of long rows opens at once, at its planned step."""

    def reader(start: int, rows: RowShape) -> FIFOReader[TokenBatch]:
        return open_batches(
            Path(job.tokens),
            "train",
            seq_len=rows.seq_len,
            batch_size=rows.batch_size,
            seed=job.seed,
            start=start,
            serial=job.serial_loader,
            rank=process_group.rank,
            world_size=process_group.size,
        )

    with ExitStack() as stack:
        rows, switch = rows_of(first), first_long_step(job)
        batches = stack.enter_context(reader(first, rows))
        is_ahead = rows != row_shape(job, job.steps)
        ahead = stack.enter_context(reader(switch, row_shape(job, switch))) if is_ahead else batches
        for step in count(first):
            if rows_of(step) != rows:  # a run behind its plan has long rows earlier
                rows = rows_of(step)
                batches = ahead if step == switch else stack.enter_context(reader(step, rows))
            yield next(batches)


def micro_batches(batch: Batch, job: Job, step: int = 0, rank: int = 0) -> list[MicroBatch]:
    """Copy this replica's rows of a batch out of the slot and split them into micro-batches.

    step, rank: number of the batch and of this replica. Masks of masked diffusion and of the experts' dropout are functions
        of the step and of a row's number in the whole batch, so they are those of any number of replicas.
    """
    if isinstance(batch, dict):
        views, plain = batch, bool((batch["segment_ids"] <= 1).all())
    else:
        views, plain = batch.tensors(), bool(batch.data.single_segment)
    names = UNPACKED_FIELDS if plain else (*UNPACKED_FIELDS, "segment_ids", "positions")
    tensors = {name: views[name].to(job.device, copy=True) for name in names}
    rows, length = tensors["tokens"].shape
    own = slice(rank, None, job.replicas) if job.stream else slice(rank * rows, (rank + 1) * rows)
    if job.model.masked is not None:
        predicted = masked.targets(views["loss_mask"])
        time, order = masked.draws(rows * job.replicas, length, generator(job.seed, "masks", step))
        packed = (None, None) if plain else (views["segment_ids"], views["positions"])
        weights = masked.weights(predicted, (time[own], order[own]), job.model.masked.block, *packed)
        tensors |= {"weights": weights.to(job.device), "loss_mask": predicted.to(job.device)}
    experts = job.model.experts
    if experts is not None and (experts.expert_dropout or experts.token_dropout):
        numbers = torch.arange(rows * job.replicas)[own]
        tensors |= {"row": numbers, "seed": torch.full_like(numbers, derive(job.seed, "dropout", step))}
    size = max(1, job.micro_batch_size * job.seq_len // length) if job.micro_batch_size else rows
    return [{n: t[i : i + size] for n, t in tensors.items()} for i in range(0, rows, size)]
