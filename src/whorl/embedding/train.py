"""Training an embedder without labels: two spans of one document are a positive pair.

    document d   ids[0 .. n)                       without bos and eos
    pair         ids[s .. s + a),  ids[t .. t + b)   min_span <= a, b <= min(max_length, n / 2),  disjoint
    loss         info_nce(encoder(first), encoder(second), 1 / temperature)          over the pairs of a batch

Contriever (Izacard et al. 2021, arXiv:2112.09118, section 3.1): two crops of a text are a pair, and crops of other texts are
negatives. Here the negatives are those of the batch (its section 3.2, first kind), for both sides. Two differences: its
crops may overlap, ours may not, since a shared sentence is matched by its words alone; and lengths are log-uniform, so that
short queries are as common as pages.

The subtle point is false negatives. Every pass over the documents has its own order, so a document may occur twice in the
batch at the end of a pass. Its two pairs are positives too, and `groups` keeps them from being negatives. Copies of a
document under other names would be false negatives too; curation removes them.

The weights depend on `EmbedJob` and the step number only: batch s is made from (seed, s), so a killed run resumes with the
same batches and ends with the same bits. The contrastive loss depends on the batch and does not measure quality.
`RecallEvaluator` does: for each span of N held-out documents, it searches the other span of the same document among all N.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import torch

from whorl.embedding.embedder import embed_ids
from whorl.embedding.job import EmbedJob
from whorl.embedding.objective import build_update, collate
from whorl.embedding.span_pairs import open_pairs
from whorl.models.encoder import Encoder
from whorl.tracking.seeds import generator
from whorl.train.config import CheckpointConfig
from whorl.train.learner.learner import Learner, SharedState
from whorl.train.learner.loop import Stopwatch
from whorl.train.learner.update import MicroBatch
from whorl.train.metrics.layer_stats import LayerStats
from whorl.train.optim.lr_schedule import check_warmup, lr_scale
from whorl.train.trainer import RunOptions, StepFunction, Task, Trainer


def build_encoder(job: EmbedJob) -> Encoder:
    """Return the untrained encoder of `job`, the same bits for the same seed."""
    return Encoder(job.encoder, generator(job.seed, "weights"), getattr(torch, job.dtype)).to(job.device)


def train_embedder(
    job: EmbedJob,
    observe: Callable[[int, dict[str, float], Encoder], None] = lambda step, metrics, encoder: None,
    *,
    scratch: Path | None = None,
    checkpoint_seconds: float = 30.0,
    log: Callable[[str], None] = lambda text: None,
    heartbeat_dir: Path | None = None,
    checkpoint_config: CheckpointConfig | None = None,
) -> Encoder:
    """Train `job` to its end, from the newest checkpoint in `scratch` if there is one; returns the encoder.

    Args:
        observe: called after every step with the number of finished steps, the metrics and the encoder. Metrics: loss,
            correct (fraction of pairs that were nearest in their batch), grad_norm, pairs_per_second; at evaluations also
            recall_at_1 and recall_at_10.
        scratch: folder for checkpoints; None keeps none.
        checkpoint_config: retention and remote storage.
        heartbeat_dir: where the heartbeat and stack traces of a stall are written; None for neither.

    Raises:
        DataError: no training split, or fewer long enough documents than a batch needs.
        CheckpointError: the checkpoint in `scratch` is of another job.
        ConfigError: a warm-up in steps that does not fit into the run.
    """
    check_warmup(job.steps, job.train.schedule)
    task = EmbedTask(job, log)
    options = RunOptions(
        scratch=scratch,
        checkpoint_seconds=checkpoint_seconds,
        checkpoint_config=checkpoint_config,
        threads=job.threads,
        spike_guard=job.train.spike_guard,
        ema=job.train.ema,
        deterministic=job.train.deterministic,
        heartbeat_dir=heartbeat_dir,
    )
    callback = StepFunction(lambda step, metrics: observe(step, metrics, task.networks), observe)
    Trainer(task, options, callback, log=log).fit()
    return task.networks


class EmbedTask(Task[MicroBatch]):
    """Contrastive training: a record is a batch of pairs."""

    networks: Encoder
    unsupported: ClassVar[Mapping[str, str]] = {"replicas": "the loss compares all pairs of a batch"}

    def __init__(self, job: EmbedJob, log: Callable[[str], None] = lambda text: None) -> None:
        self.job, self.steps, self.dtype = job, job.steps, getattr(torch, job.dtype)
        self.pairs, self.evaluator = open_pairs(job, log)
        self.networks = build_encoder(job)
        self.evaluate_every = max(1, -(-job.steps // job.evaluations))

    @property
    def identity(self) -> dict[str, Any]:
        settings = self.job.model_dump(mode="json", exclude={"tokens", "tokenizer", "threads", "device"})
        return {**settings, "data": self.pairs.split.fingerprint}

    def allocate(self, replicas: int) -> SharedState:
        return SharedState.for_updates(self.networks, [build_update(self.networks, self.job)])

    def make_learner(self, trainer: Trainer[MicroBatch]) -> Learner:
        update = replace(build_update(self.networks, self.job), accept_step=trainer.accept_step)
        self.reported_at = time.perf_counter()
        return Learner(
            self.networks, [update], trainer.shared, dtype=self.dtype, steps_done=trainer.rounds_done
        )

    def make_layer_stats(self, learner: Learner, steps_done: int) -> LayerStats:
        return LayerStats(learner, steps=self.steps, batch_rows=self.job.batch_size, steps_done=steps_done)

    def batches(self, first: int) -> AbstractContextManager[Iterator[MicroBatch]]:
        job = self.job
        pairs = (self.pairs.batch(job.seed, step, job.batch_size) for step in count(first))
        return nullcontext(collate(spans, job.device) for spans in pairs)

    def minibatches(self, record: MicroBatch) -> list[list[MicroBatch]]:
        return [[record]]

    def lr_scale(self, step: int) -> float:
        return lr_scale(step, self.job.steps, self.job.train.schedule)

    def report(self, steps_done: int, metrics: dict[str, float], clock: Stopwatch) -> dict[str, float] | None:
        clock.pop_seconds()
        seconds = time.perf_counter() - self.reported_at
        metrics = {**metrics, "pairs_per_second": self.job.batch_size / seconds}
        is_due = steps_done % self.evaluate_every == 0 or steps_done == self.steps
        if self.evaluator is not None and is_due:
            metrics |= self.evaluator(lambda texts: embed_ids(self.networks, texts))
        self.reported_at = time.perf_counter()
        return metrics
