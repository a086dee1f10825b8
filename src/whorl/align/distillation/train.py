"""Distillation: a student learns a teacher's distribution, on given texts or on its own completions.

    given texts        teacher scores every target -->  D(p_t, q_t)                                   off-policy
    own completions    student samples --> teacher scores every sampled id -->  D(p_t, q_t)           on-policy

Differences from fine-tuning (`stage/sft.py`): a target is a distribution, not one id. A share `on_policy_fraction` of
each step's texts provides only prompts, which the student completes with its newest weights. So the teacher corrects
states that the student really reaches (generalized knowledge distillation, Agarwal et al. 2024, arXiv:2306.13649,
algorithm 1). The paper's lambda is the probability of a whole on-policy batch; here it is the share in every batch.
Sampling has no gradient. on_policy_fraction = 0 on the teacher's completions is sequence-level distillation.

The teacher is either a live model or its cached top-k log-probabilities (`teacher.py`). The divergence is an argument.

Sampling is in lockstep: every `sync_every` steps the engine gets the current weights and completes the prompts of all
these steps. Checkpoints are taken only at these points, so a resumed run needs no stored completions and ends with
the same bits. The first step after new weights compares the engine's log-probabilities with the trainer's, as in RL:
the metrics `logprob_diff_max` and `logprob_diff_mean`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from whorl.align.config import DistilConfig
from whorl.align.distillation.cached_teacher import CachedTeacher
from whorl.align.distillation.teacher import Teacher, tokenizer_fingerprint
from whorl.align.model.batch import micro_batches, pack, pad, sort_by_length
from whorl.align.model.logprob_diff import LogProbDiff
from whorl.align.model.policy_model import PolicyModel
from whorl.align.stage.task import (
    DatasetTask,
    Log,
    StepCallback,
    dataset_fingerprint,
    micro_batch_rows,
    run_stage,
)
from whorl.data.epoch_order import EpochOrder, StepOrder
from whorl.errors import ConfigError, DataError
from whorl.evals.model.sampling import open_engine, policy_sampling, sample_completions
from whorl.objectives import Loss, token_log_probs
from whorl.tokens.token_encoder import TokenEncoder, TokenizedExample, concat
from whorl.tracking.seeds import derive
from whorl.train.learner.loop import Stopwatch
from whorl.train.learner.update import MicroBatch


def train_student(
    network: PolicyModel,
    teacher: Teacher,
    examples: Sequence[TokenizedExample],
    config: DistilConfig,
    *,
    encoder: TokenEncoder,
    pad_id: int,
    callback: StepCallback = lambda step, metrics: None,
    checkpoint_dir: Path | None = None,
    log: Log = lambda text: None,
    heartbeat_dir: Path | None = None,
) -> PolicyModel:
    """Train `network` on the teacher's distributions and return it; resumes from the newest checkpoint.

    Args:
        examples: texts to learn from, or to take prompts of (all ids before the first one in the loss). For a
            `CachedTeacher` its own examples. None longer than `config.data.seq_len` + 1.
        encoder: of the student.
        callback: called after each step with kl (the divergence, nats per target), loss_tokens, grad_norm, positions
            (including padding) and time/*. With on-policy texts also on_policy_tokens, completion_length/on_policy,
            truncated_fraction, logprob_diff_max and logprob_diff_mean.
        checkpoint_dir, heartbeat_dir: folders of checkpoints and of the heartbeat; None for neither.

    Raises:
        ConfigError: another vocabulary, or a `CachedTeacher` with on-policy texts or another temperature.
        DataError: no examples, or one that is too long. DivergedError: a value is not finite.
    """
    check_teacher(network, teacher, config, encoder)
    batches = _DistillationBatches(network, teacher, examples, config, encoder, pad_id)
    task = DistillationTask(network, teacher, batches, dataset_fingerprint(examples))
    run_stage(task, callback, checkpoint_dir, log, heartbeat_dir)
    return network


class DistillationTask(DatasetTask):
    """Divergence from the teacher, and the comparison of log-probabilities where the student sampled."""

    name = "distil"
    config: DistilConfig
    unsupported: ClassVar[Mapping[str, str]] = {
        "replicas": "the teacher and the student's engine belong to one process"
    }

    def __init__(
        self, network: PolicyModel, teacher: Teacher, data: _DistillationBatches, fingerprint: str
    ) -> None:
        self.teacher, self.data, self.fingerprint = teacher, data, fingerprint
        self.logprob_diff = LogProbDiff()
        config = data.config
        row_length = -(-config.data.seq_len // 8) * 8  # rows are rounded up to 8 (`pad`)
        super().__init__(
            network,
            config,
            steps=data.steps,
            positions=max(config.data.batch_size, data.batch_size) * row_length,
            rows=data.batch_size,
            row_length=row_length,
        )

    @property
    def identity(self) -> dict[str, Any]:
        return {
            "stage": self.name,
            "config": self.settings(),
            "texts": self.fingerprint,
            "teacher": self.teacher.identity(),
        }

    def may_save(self, steps_done: int) -> bool:
        return steps_done % self.config.sync_every == 0 or not self.data.n_on_policy

    def batches_from(self, first: int) -> Iterator[list[MicroBatch]]:
        for record in self.data.batches_from(first):
            self.latest = record
            micro: list[MicroBatch] = list(
                micro_batches(record.batch, micro_batch_rows(self.config, record.batch))
            )
            record.metrics["positions"] = float(sum(piece["tokens"].numel() for piece in micro))
            yield micro

    def report(self, steps_done: int, metrics: dict[str, float], clock: Stopwatch) -> dict[str, float] | None:
        more = {**self.latest.metrics, **self.logprob_diff.pop_metrics()}
        return super().report(steps_done, {**metrics, **more}, clock)

    def objective(self, batch: MicroBatch) -> Loss:
        model = self.network.model
        hidden = self.network.hidden(batch)[batch["loss_mask"]]
        if self.latest.fresh:
            self._compare_log_probs(batch, hidden.detach())
        return self.teacher.loss(batch, hidden, model.head_weight, model.logit_softcap, self.config)

    @torch.no_grad()
    def _compare_log_probs(self, batch: MicroBatch, hidden: Tensor) -> None:
        mask = batch["loss_mask"]
        sampled = batch["sampled"][mask] > 0
        if not sampled.any():
            return
        log_prob, _ = token_log_probs(
            hidden[sampled], self.network.model.head_weight, batch["targets"][mask][sampled],
            temperature=self.network.temperature, softcap=self.network.model.logit_softcap,
            banned_mask=self.data.banned_mask,
        )  # fmt: skip
        self.logprob_diff.update(log_prob - batch["behaviour_log_prob"][mask][sampled])


def check_teacher(
    network: PolicyModel, teacher: Teacher, config: DistilConfig, encoder: TokenEncoder
) -> None:
    """Check that both have the same vocabulary and that the teacher can score the requested texts.

    Raises:
        ConfigError: they do not match.
    """
    vocab_size, fingerprint = (
        network.model.config.vocab_size,
        tokenizer_fingerprint(encoder.tokenizer),
    )
    if teacher.vocab_size != vocab_size or (
        teacher.vocab_fingerprint and teacher.vocab_fingerprint != fingerprint
    ):
        raise ConfigError(
            f"the teacher's vocabulary ({teacher.vocab_size:,} ids, {teacher.vocab_fingerprint or 'unknown'}) "
            f"differs from the student's ({vocab_size:,} ids, {fingerprint})",
            expected="one vocabulary",
            do="distil from a teacher with the same tokenizer, or fine-tune on its texts",
        )
    if not isinstance(teacher, CachedTeacher):
        return
    if config.on_policy_fraction:
        raise ConfigError(
            f"on_policy_fraction is {config.on_policy_fraction:g}, and a cached teacher scores only its own examples",
            expected="a live teacher", do="set on_policy_fraction to 0, or load the teacher",
        )  # fmt: skip
    if teacher.temperature != config.temperature:
        raise ConfigError(
            f"temperature is {config.temperature:g}, and the teacher was cached at {teacher.temperature:g}",
            expected="the same", do="set temperature to that value, or cache the teacher again",
        )  # fmt: skip


@dataclass
class _StepBatch:
    """Data of one step. fresh: its completions were sampled with the weights that are about to be trained."""

    batch: dict[str, Tensor]
    fresh: bool
    metrics: dict[str, float] = field(default_factory=dict)


class _DistillationBatches:
    """Data of each step, by step number; every epoch has its own order. The first texts of a step are on-policy."""

    def __init__(
        self,
        network: PolicyModel,
        teacher: Teacher,
        texts: Sequence[TokenizedExample],
        config: DistilConfig,
        encoder: TokenEncoder,
        pad_id: int,
    ) -> None:
        self.network, self.teacher, self.texts, self.config = network, teacher, texts, config
        self.encoder, self.pad_id = encoder, pad_id
        if not texts:
            raise DataError("there are no examples", expected="at least one")
        for n, text in enumerate(texts):
            if len(text) > config.data.seq_len + 1:
                raise DataError(
                    f"example {n} has {len(text):,} ids, and a row holds {config.data.seq_len + 1:,}",
                    expected="shorter examples", do="filter it (`LengthFilter`), or increase seq_len",
                )  # fmt: skip
        if isinstance(teacher, CachedTeacher) and dataset_fingerprint(
            teacher.examples
        ) != dataset_fingerprint(texts):
            raise DataError(
                "the cached teacher has other examples", expected="the examples of its folder, in order"
            )
        self.order = StepOrder(
            EpochOrder(config.seed, "distil", "order", n=len(texts)), epochs=config.data.epochs,
            batch_size=min(config.data.batch_size, len(texts)), batch_tokens=config.data.batch_tokens,
            sizes=np.array([max(1, len(text) - 1) for text in texts]),
        )  # fmt: skip
        self.steps, self.batch_size = self.order.steps, self.order.largest
        self.n_on_policy = round(config.on_policy_fraction * self.batch_size)
        vocab = int(network.model.config.vocab_size)
        banned = encoder.banned_ids(vocab)
        banned_mask = torch.zeros(vocab, dtype=torch.bool)
        banned_mask[banned] = True
        self.banned_mask = banned_mask.to(network.device)
        if self.n_on_policy:
            self.engine = open_engine(
                network.eval_copy(),
                (64, config.data.seq_len + 1),
                encoder,
                with_text=False,
            )

    def batches_from(self, first: int) -> Iterator[_StepBatch]:
        """Yield the data of step `first` and of all later steps.

        With on-policy texts `first` is a multiple of `sync_every`.
        """
        config = self.config
        waiting: list[tuple[TokenizedExample, np.ndarray[Any, Any], bool]] = []
        for step in range(first, self.steps):
            numbers = self.order[step]
            fresh = bool(self.n_on_policy) and step % config.sync_every == 0
            if fresh:
                steps = range(step, min(step + config.sync_every, self.steps))
                waiting = self._sample_on_policy(
                    [n for s in steps for n in self.order[s][: self.n_on_policy]], step
                )
            on_policy, waiting = waiting[: self.n_on_policy], waiting[self.n_on_policy :]
            off_policy = [self.texts[n] for n in numbers[self.n_on_policy :]]
            texts = [text for text, _, _ in on_policy] + off_policy
            zeros = [np.zeros(len(text), np.float32) for text in off_policy]
            streams = {}
            if on_policy:
                streams["behaviour_log_prob"] = [p for _, p, _ in on_policy] + zeros
                streams["sampled"] = [text.loss_mask.astype(np.float32) for text, _, _ in on_policy] + zeros
            batch = (
                pack(texts, config.data.seq_len, self.pad_id, streams)
                if config.data.packing
                else sort_by_length(pad(texts, self.pad_id, streams))
            )
            if isinstance(self.teacher, CachedTeacher):
                batch["teacher_row"] = self.teacher.target_rows(batch, torch.tensor(numbers))
            step_batch = _StepBatch(batch, fresh)
            if on_policy:
                lengths = [int(text.loss_mask.sum()) for text, _, _ in on_policy]
                step_batch.metrics |= {
                    "on_policy_tokens": float(sum(lengths)),
                    "completion_length/on_policy": sum(lengths) / len(on_policy),
                    "truncated_fraction": sum(not ended for _, _, ended in on_policy) / len(on_policy),
                }
            yield step_batch

    def _sample_on_policy(
        self, numbers: Sequence[int], step: int
    ) -> list[tuple[TokenizedExample, np.ndarray[Any, Any], bool]]:
        """Return (example, log-probability of each id as sampled, finished) for the prompts of some texts."""
        self.engine.update_weights(self.network.merged_weights(), step + 1)
        prompts = [self.texts[n].ids[: self.texts[n].prompt_length].tolist() for n in numbers]
        completions = sample_completions(
            self.engine, prompts, policy_sampling(self.network.temperature), max_tokens=self.config.max_completion_tokens,
            stop_ids=self.encoder.stop_ids, seed=derive(self.config.seed, "distil", "own", step),
        )  # fmt: skip
        samples = []
        for prompt, completion in zip(prompts, completions, strict=True):
            log_probs = np.array([0.0] * len(prompt) + completion.log_probs, np.float32)
            samples.append((concat(prompt, completion.ids), log_probs, completion.finished))
        return samples
