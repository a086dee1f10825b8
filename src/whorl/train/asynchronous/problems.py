"""The interface of a problem to train on, and a language model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Protocol

from torch import nn

from whorl.parallel.process_group import ProcessGroup
from whorl.train.job import Job, row_shape
from whorl.train.learner.update import MicroBatch, Update
from whorl.train.lm.batches import job_batches, micro_batches
from whorl.train.lm.build import allocate_shared, build_learner, build_model
from whorl.train.lm.kernels import torch_kernels
from whorl.train.optim.lr_schedule import lr_scale


class Problem(Protocol):
    """The network to train. It pickles small: each process calls `make`, which gives equal bits.

    max_rows: the most rows of one table in a worker's batch.
    """

    @property
    def max_rows(self) -> int: ...
    def make(self) -> tuple[nn.Module, Update]: ...
    def lr_scale(self, step: float) -> float: ...
    def batches(self, first: int, worker: int, workers: int) -> Iterator[list[MicroBatch]]:
        """Yield a worker's share of batch `first` and of those that follow."""
        ...


@dataclass(frozen=True)
class LanguageModelProblem:
    """Pretraining of a job, with torch's kernels in all processes."""

    job: Job

    @property
    def max_rows(self) -> int:
        return self.job.batch_size * self.job.seq_len

    def make(self) -> tuple[nn.Module, Update]:
        network = build_model(self.job)
        shared = allocate_shared(network, self.job)
        learner = build_learner(network, self.job, shared, ProcessGroup(), kernels=torch_kernels())
        return network, learner.updates[0].update

    def batches(self, first: int, worker: int, workers: int) -> Iterator[list[MicroBatch]]:
        job, rank = self.job, ProcessGroup(worker, workers)
        with job_batches(job, rank, first, partial(row_shape, job), None) as batches:
            for step in count(first):
                yield micro_batches(next(batches), job, step, worker)

    def lr_scale(self, step: float) -> float:
        return lr_scale(min(step, self.job.steps - 1), self.job.steps, self.job.schedule)
