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
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from whorl.embedding.embedder import Vectors, embed_ids, pad
from whorl.errors import DataError
from whorl.models.encoder import Encoder, EncoderConfig
from whorl.objectives.contrastive import info_nce
from whorl.objectives.next_token import Loss
from whorl.tokens.shards import TokenSet, TokenSplit
from whorl.tokens.tokenizer import Ids
from whorl.tracking.seeds import generator, numpy_rng
from whorl.train.checkpoint.remote import CheckpointConfig
from whorl.train.config import FiniteGuardConfig
from whorl.train.learner.learner import Learner, SharedState
from whorl.train.learner.loop import Stopwatch
from whorl.train.learner.update import MicroBatch, OptimizerName, ParamOptim, Update
from whorl.train.metrics.layer_stats import LayerStats
from whorl.train.optim.decay_mask import decayed_parameters
from whorl.train.optim.lr_schedule import warmup_stable_decay
from whorl.train.trainer import RunOptions, Task, TrainCallback, Trainer

BUCKET_SIZE = 32  # spans encoded together


class EmbedJob(BaseModel):
    """All settings that determine the weights of an embedder."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tokens: str = Field(description="folder of the token set")
    encoder: EncoderConfig
    min_span: int = Field(default=16, ge=1, description="ids of the shortest span")
    batch_size: int = Field(
        default=128, ge=2, description="pairs per step; each has one positive and batch_size - 1 negatives"
    )
    steps: int = Field(default=2000, ge=1)
    seed: int = 0
    temperature: float = Field(default=0.05, gt=0)
    optimizer: Literal["muon", "adamw"] = "muon"
    lr_muon: float = Field(
        default=0.02, gt=0, description="peak learning rate of Muon, for the blocks' matrices"
    )
    lr_adamw: float = Field(
        default=0.01, gt=0, description="peak learning rate of AdamW, for the other parameters (or all)"
    )
    weight_decay: float = Field(default=0.0, ge=0)
    clip_norm: float = Field(default=1.0, gt=0)
    warmup_ratio: float = Field(default=0.02, ge=0, le=1)
    decay_ratio: float = Field(default=0.5, gt=0, le=1)
    held_out: int = Field(default=512, ge=2, description="maximum number of held-out documents for recall")
    evaluations: int = Field(default=10, ge=1, description="recall evaluations during the run")
    spike_guard: FiniteGuardConfig = FiniteGuardConfig()
    ema: float = Field(default=0.0, ge=0, lt=1, description="decay per step of averaged weights; 0 for none")
    threads: int = Field(default=1, ge=1)
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"

    @model_validator(mode="after")
    def _possible(self) -> EmbedJob:
        if self.min_span > self.encoder.max_length:
            raise ValueError(
                f"min_span ({self.min_span}) is more than max_length ({self.encoder.max_length})"
            )
        return self


class Spans(NamedTuple):
    """Two disjoint spans of each of some documents, and the documents' numbers [n]."""

    first: list[Ids]
    second: list[Ids]
    documents: NDArray[np.int64]


class SpanPairs:
    """The documents of a split that are long enough for two spans.

    Args:
        max_span: ids of the longest span.
        min_span: ids of the shortest; documents of fewer than twice as many are skipped and counted in `skipped`.
    """

    def __init__(self, split: TokenSplit, max_span: int, min_span: int) -> None:
        self.split, self.max_span, self.min_span = split, max_span, min_span
        self.documents = np.flatnonzero(split.lengths - 2 >= 2 * min_span)  # lengths count bos and eos
        self.skipped = len(split.lengths) - len(self.documents)
        self._shuffled, self._order = (-1, -1), self.documents

    def __len__(self) -> int:
        return len(self.documents)

    def batch(self, seed: int, step: int, size: int) -> Spans:
        """Return the pairs of a step, a function of the arguments; each pass over the documents has its own order."""
        positions = range(step * size, (step + 1) * size)
        return self.spans(
            np.array([self._document_at(seed, position) for position in positions]),
            numpy_rng(seed, "spans", step),
        )

    def spans(self, documents: NDArray[np.int64], rng: np.random.Generator) -> Spans:
        """Draw two spans of each of `documents`."""
        n = self.split.lengths[documents] - 2  # [N]
        longest = np.minimum(self.max_span, n // 2)
        # Log-uniform over [min_span, longest + 1), rounded down, independently for each of the two lengths.
        sizes = self.min_span * ((longest + 1) / self.min_span) ** rng.random((2, len(n)))
        a, b = np.minimum(sizes.astype(np.int64), longest)
        low, high = np.sort(rng.integers(0, n - a - b + 1, (2, len(n))), axis=0)
        begin = self.split.starts[documents] + 1
        earlier, later = begin + low, begin + high + a
        taken = [
            (self.split[s : s + m], self.split[t : t + k])
            for s, m, t, k in zip(earlier.tolist(), a.tolist(), later.tolist(), b.tolist(), strict=True)
        ]
        swapped = rng.random(len(n)) < 0.5  # either side may be the earlier one
        first = [pair[int(turn)] for pair, turn in zip(taken, swapped, strict=True)]
        second = [pair[1 - int(turn)] for pair, turn in zip(taken, swapped, strict=True)]
        return Spans(first, second, documents)

    def _document_at(self, seed: int, place: int) -> int:
        epoch, within = divmod(place, len(self.documents))
        if (seed, epoch) != self._shuffled:
            self._shuffled = seed, epoch
            self._order = numpy_rng(seed, "documents", epoch).permutation(self.documents)
        return int(self._order[within])


class RecallEvaluator:
    """How often the other span of a held-out document is among the nearest of all N.

    The spans are the same for every job with the same lengths, so that values can be compared.
    """

    def __init__(self, pairs: SpanPairs, max_documents: int) -> None:
        step = max(1, -(-len(pairs) // max_documents))  # spread over the split
        self.spans = pairs.spans(pairs.documents[::step], numpy_rng(0, "held-out spans"))

    def __len__(self) -> int:
        return len(self.spans.documents)

    def __call__(self, embed: Callable[[list[Ids]], Vectors]) -> dict[str, float]:
        """Return recall_at_1 and recall_at_10, averaged over both directions."""
        x, y = embed(self.spans.first), embed(self.spans.second)
        return {f"recall_at_{k}": recall(x, y, k) for k in (1, 10)}


def recall(x: Vectors, y: Vectors, k: int) -> float:
    """Fraction of rows of x whose own row of y is among the k nearest of all of y, averaged over both directions.

    x, y: [N, d]. A tie with the own row counts as nearer, so equal vectors have recall 0.
    """
    cosines = x @ y.T
    found = []
    for similarity in (cosines, cosines.T):
        # A comparison with NaN is False.
        farther = (similarity < np.diagonal(similarity)[:, None]).sum(axis=1)
        found.append(float(((len(similarity) - 1 - farther) < k).mean()))
    return sum(found) / 2


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
    """
    task = EmbedTask(job, log)
    options = RunOptions(
        scratch=scratch,
        checkpoint_seconds=checkpoint_seconds,
        checkpoint_config=checkpoint_config,
        threads=job.threads,
        spike_guard=job.spike_guard,
        ema=job.ema,
        heartbeat_dir=heartbeat_dir,
    )
    Trainer(task, options, _Observer(observe, task.networks), log=log).fit()
    return task.networks


class _Observer(TrainCallback):
    def __init__(self, observe: Callable[[int, dict[str, float], Encoder], None], encoder: Encoder) -> None:
        self.observe, self.encoder = observe, encoder

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        self.observe(step, metrics, self.encoder)


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
        settings = self.job.model_dump(mode="json", exclude={"tokens", "threads", "device"})
        return {**settings, "data": self.pairs.split.fingerprint}

    def allocate(self, replicas: int) -> SharedState:
        param_optims = build_update(self.networks, self.job).param_optims
        return SharedState.allocate(self.networks, param_optims, contiguous=True)

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
        job = self.job
        return warmup_stable_decay(step, job.steps, job.warmup_ratio, job.decay_ratio)

    def report(self, steps_done: int, metrics: dict[str, float], clock: Stopwatch) -> dict[str, float] | None:
        clock.pop_seconds()
        seconds = time.perf_counter() - self.reported_at
        metrics = {**metrics, "pairs_per_second": self.job.batch_size / seconds}
        is_due = steps_done % self.evaluate_every == 0 or steps_done == self.steps
        if self.evaluator is not None and is_due:
            metrics |= self.evaluator(lambda texts: embed_ids(self.networks, texts))
        self.reported_at = time.perf_counter()
        return metrics


def open_pairs(
    job: EmbedJob, log: Callable[[str], None] = lambda text: None
) -> tuple[SpanPairs, RecallEvaluator | None]:
    """Return the training pairs and the recall evaluator, None with fewer than two held-out documents.

    Raises:
        DataError: as `train_embedder`.
    """
    tokens = TokenSet(Path(job.tokens))
    if tokens.vocab_size > job.encoder.vocab_size:
        raise DataError(
            f"{job.tokens} has {tokens.vocab_size:,} ids and the encoder {job.encoder.vocab_size:,}",
            expected="an encoder whose vocab_size is at least the token set's",
        )
    pairs = SpanPairs(tokens.split("train"), job.encoder.max_length, job.min_span)
    if pairs.skipped:
        log(
            f"{pairs.skipped:,} of {pairs.split.n_documents:,} documents skipped: "
            f"fewer than {2 * job.min_span} ids, too short for two spans"
        )
    if len(pairs) < job.batch_size:
        raise DataError(
            f"{len(pairs):,} documents are long enough for two spans of {job.min_span} ids",
            expected=f"at least the {job.batch_size} of a batch",
            do="lower batch_size or min_span, or use more documents",
        )
    evaluator = None
    if "validation" in tokens.splits:
        validation = SpanPairs(tokens.split("validation"), job.encoder.max_length, job.min_span)
        evaluator = RecallEvaluator(validation, job.held_out) if len(validation) > 1 else None
    if evaluator is None:
        log("fewer than two held-out documents are long enough: recall is not measured")
    return pairs, evaluator


def build_update(encoder: Encoder, job: EmbedJob) -> Update:
    """Return the learner's only update: InfoNCE, with Muon for the blocks' matrices (optional) and AdamW for the rest."""

    def objective(part: MicroBatch) -> Loss:
        x, y = encode_in_buckets(encoder, part["ids"], part["mask"]).chunk(2)
        return info_nce(x, y, 1 / job.temperature, part["documents"])

    treatments, decaying = {}, decayed_parameters(encoder)
    for name, p in encoder.named_parameters():
        matrix = name.startswith("blocks.") and p.ndim == 2 and min(p.shape) > 1
        muon = matrix and job.optimizer == "muon"
        rule: OptimizerName = "muon" if muon else "adamw"
        treatments[name] = ParamOptim(rule, job.lr_muon if muon else job.lr_adamw, float(name in decaying))
    return Update(
        objective, treatments, clip_norm=job.clip_norm, weight_decay=job.weight_decay, betas=(0.9, 0.98)
    )


def collate(spans: Spans, device: str = "cpu") -> dict[str, Tensor]:
    """Return ids and mask [2 N, T], the first spans above the second; documents [N]."""
    ids, mask = pad([*spans.first, *spans.second])
    made = {"ids": ids, "mask": mask, "documents": torch.from_numpy(spans.documents)}
    return {name: t.to(device) for name, t in made.items()}


def encode_in_buckets(encoder: Encoder, ids: Tensor, mask: Tensor) -> Tensor:
    """`encoder.embed` of rows [n, T] of different lengths, in buckets of similar length: [n, d] fp32.

    Spans fill little more than half of a padded batch. Only the encoder runs in buckets; the loss uses the whole batch.
    """
    lengths = mask.sum(dim=1)
    order = lengths.argsort(stable=True)
    buckets = torch.split(order, BUCKET_SIZE)
    max_lengths = [int(lengths[rows[-1]]) for rows in buckets]
    parts = [
        encoder.embed(ids[rows, :length], mask[rows, :length])
        for rows, length in zip(buckets, max_lengths, strict=True)
    ]
    return torch.cat(parts)[order.argsort()]
