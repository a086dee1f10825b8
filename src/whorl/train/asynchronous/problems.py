"""Problems: a language model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count

from torch import nn

from whorl.parallel.process_group import ProcessGroup
from whorl.train.determinism import deterministic
from whorl.train.job import Job, row_shape
from whorl.train.learner.update import MicroBatch, Update
from whorl.train.lm.batches import job_batches, micro_batches
from whorl.train.lm.build import allocate_shared, build_learner, build_model
from whorl.train.optim.lr_schedule import lr_scale


@dataclass(frozen=True)
class LanguageModelProblem:
    """Pretraining of a job; kernels are chosen without timing, so that all workers have the same."""

    job: Job

    @property
    def max_rows(self) -> int:
        return self.job.batch_size * self.job.seq_len

    def make(self) -> tuple[nn.Module, Update]:
        network = build_model(self.job)
        with deterministic():
            learner = build_learner(network, self.job, allocate_shared(network, self.job), ProcessGroup())
        return network, learner.updates[0].update

    def batches(self, first: int, worker: int, workers: int) -> Iterator[list[MicroBatch]]:
        job, rank = self.job, ProcessGroup(worker, workers)
        with job_batches(job, rank, first, partial(row_shape, job), None) as batches:
            for step in count(first):
                yield micro_batches(next(batches), job, step, worker)

    def lr_scale(self, step: float) -> float:
        return lr_scale(min(step, self.job.steps - 1), self.job.steps, self.job.schedule)
