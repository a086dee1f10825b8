"""Distillation: a student learns what a teacher says, of given texts or of what it has just written itself.

    given texts       teacher --says of every id-->  D(p_t, q_t)            off-policy
    own answers       student --samples--> ids --teacher says of every id-->  D(p_t, q_t)        on-policy

It is told as the difference from fine-tuning (`sft.py`): there a target is one id, here it is a distribution; and of each
step's texts a share `own` lend their prompts alone, which the student answers with its newest weights, so that the teacher
corrects it where it really goes and not where somebody else would have gone (generalised knowledge distillation, Agarwal et
al. 2024, arXiv:2306.13649, algorithm 1; own is its lambda, there the chance of a whole batch, here the share of every one).
No gradient goes through the sampling. `own` = 0 on the teacher's own answers is distillation by sequences (`teacher_texts`).

Who teaches is one of two (`teacher.py`): a model beside, or what one said before. Which divergence is an argument.

Sampling is in lock-step: every `refresh` steps the engine is given the weights as they are and answers the prompts of all
these steps at once. Checkpoints are taken only there, so what a run goes on with after a kill needs none of the answers, and
the weights come out the same to the bit. As in reinforcement learning the engine's word for each id is held against the
trainer's in the first step after new weights: the metric `parity`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whorl.align.config import DistilConfig
from whorl.align.distillation.teacher import CachedTeacher, Teacher, tokenizer_fingerprint
from whorl.align.model.batch import micro_batches, pack, pad, sort_by_length
from whorl.align.model.example import ExampleTokenizer, TokenizedExample, concat
from whorl.align.model.logprob_diff import LogProbDiff
from whorl.align.model.policy_model import PolicyModel
from whorl.align.model.sampling import banned_ids, policy_sampling, rollout_engine, sample_completions
from whorl.align.stage.trainer import (
    Precomputed,
    StepCallback,
    dataset_fingerprint,
    micro_batch_rows,
    run_stage,
)
from whorl.errors import ConfigError, DataError
from whorl.objectives.log_probs import token_log_probs
from whorl.objectives.next_token import Loss
from whorl.parallel.process_group import ProcessGroup
from whorl.tracking.seeds import derive, numpy_rng
from whorl.train.config import RoutingConfig
from whorl.train.learner.update import MicroBatch
from whorl.train.metrics.moe_balance import MoEBalancer


def train_student(
    network: PolicyModel,
    teacher: Teacher,
    examples: Sequence[TokenizedExample],
    config: DistilConfig,
    *,
    example_tokenizer: ExampleTokenizer,
    pad_id: int,
    callback: StepCallback = lambda step, metrics: None,
    checkpoint_dir: Path | None = None,
    log: Callable[[str], None] = lambda text: None,
) -> PolicyModel:
    """Trains `network` on what `teacher` says, from the newest checkpoint if there is one.

    Args:
        texts: to learn from, or to take prompts of (all before the first id that is learnt); of a `Told`, its own. None
            longer than `config.length` + 1.
        scribe: of the student's tokenizer.
        observe: told after each step: kl (the divergence, nats a target), count, gradient_norm, positions (with padding, of
            the forward), seconds_*; with own answers sampled (ids), own_length, cut_off (share without an end), parity.
        scratch: folder for checkpoints; None keeps none.

    Raises:
        ConfigError: another vocabulary, a `Told` that is to judge what it has not seen, or of another temperature.
        DataError: nothing to learn from; a text that is too long. DivergedError: what is not finite.
    """
    check_teacher(network, teacher, config, example_tokenizer)
    batches = _DistillationBatches(network, teacher, examples, config, example_tokenizer, pad_id)
    mixtures = MoEBalancer(network.model, RoutingConfig(), ProcessGroup())
    objective = _DistillationObjective(network, teacher, config, mixtures, batches.banned_mask)
    identity = {
        "stage": "distil",
        "config": config.model_dump(mode="json", exclude={"checkpoint_seconds"}),
        "texts": dataset_fingerprint(examples),
        "teacher": teacher.identity(),
    }

    def parts(first: int, _: Precomputed) -> Iterator[list[MicroBatch]]:
        for record in batches.batches_from(first):
            objective.fresh, batches.latest = record.fresh, record
            pieces: list[MicroBatch] = list(
                micro_batches(record.batch, micro_batch_rows(config, record.batch))
            )
            record.metrics["positions"] = float(sum(piece["tokens"].numel() for piece in pieces))
            yield pieces

    def told(step: int, metrics: dict[str, float]) -> None:
        mixtures.on_step_end()
        callback(step, {**metrics, **batches.latest.metrics, **objective.logprob_diff.pop_metrics()})

    run_stage(
        network, config, objective, parts, identity=identity, steps=batches.steps,
        positions=config.batch_size * -(-config.seq_len // 8) * 8,  # rows are rounded up so (`rows.lay`)
        callback=told, may_save=lambda step: step % config.sync_every == 0 or not batches.n_on_policy, checkpoint_dir=checkpoint_dir, log=log,
    )  # fmt: skip
    return network.eval()


def check_teacher(
    network: PolicyModel, teacher: Teacher, config: DistilConfig, example_tokenizer: ExampleTokenizer
) -> None:
    """That they speak of the same ids, and that this teacher can say what is asked.

    Raises:
        ConfigError: it is not so.
    """
    own, mine = network.model.config.vocab_size, tokenizer_fingerprint(example_tokenizer.tokenizer)
    if teacher.vocab_size != own or (teacher.vocab_fingerprint and teacher.vocab_fingerprint != mine):
        raise ConfigError(
            f"the teacher's vocabulary ({teacher.vocab_size:,} ids, {teacher.vocab_fingerprint or 'unknown'}) is not the student's "
            f"({own:,} ids, {mine})",
            expected="one vocabulary",
            do="distil from a teacher of the same tokenizer, or fine-tune on its texts",
        )
    if not isinstance(teacher, CachedTeacher):
        return
    if config.on_policy_fraction:
        raise ConfigError(
            f"on_policy_fraction is {config.on_policy_fraction:g}, and the teacher is not there: what it said is of given texts alone",
            expected="a model beside, for what the student writes", do="set on_policy_fraction to 0, or load the teacher",
        )  # fmt: skip
    if teacher.temperature != config.temperature:
        raise ConfigError(
            f"temperature is {config.temperature:g}, and the teacher was asked at {teacher.temperature:g}",
            expected="the same", do="set temperature to it, or let the teacher say it again",
        )  # fmt: skip


@dataclass
class _StepBatch:
    """What a step learns from. fresh: its own answers are of the very weights that are about to learn."""

    batch: dict[str, Tensor]
    fresh: bool
    metrics: dict[str, float] = field(default_factory=dict)


class _DistillationObjective:
    """The divergence of a micro-batch, and parity beside it."""

    def __init__(
        self,
        network: PolicyModel,
        teacher: Teacher,
        config: DistilConfig,
        mixtures: MoEBalancer,
        forbidden: Tensor,
    ) -> None:
        self.network, self.teacher, self.config = network, teacher, config
        self.moe_balancer, self.banned_mask = mixtures, forbidden
        self.fresh, self.logprob_diff = False, LogProbDiff()

    def __call__(self, part: MicroBatch) -> Loss:
        model, mask = self.network.model, part["loss_mask"]
        segments = part.get("segment_ids")
        records: list[Any] | None = [] if self.moe_balancer else None
        positions = None if segments is None else part["positions"]
        hidden = model(part["tokens"], positions, segments, routings=records)[mask]
        if self.fresh:
            self._compare_log_probs(part, hidden.detach())
        loss = self.teacher.loss(part, hidden, model.head_weight, model.logit_softcap, self.config)
        return loss if records is None else self.moe_balancer.add_aux_losses(loss, records, mask)

    @torch.no_grad()
    def _compare_log_probs(self, part: MicroBatch, hidden: Tensor) -> None:
        mask = part["loss_mask"]
        sampled = part["sampled"][mask] > 0
        if not sampled.any():
            return
        log_prob, _ = token_log_probs(
            hidden[sampled], self.network.model.head_weight, part["targets"][mask][sampled],
            temperature=self.network.temperature, softcap=self.network.model.logit_softcap,
            banned_mask=self.banned_mask,
        )  # fmt: skip
        self.logprob_diff.update(log_prob - part["behaviour_log_prob"][mask][sampled])


class _DistillationBatches:
    """The record of each step, by its number: every epoch in an order of its own, the first of a step to be answered."""

    def __init__(
        self,
        network: PolicyModel,
        teacher: Teacher,
        texts: Sequence[TokenizedExample],
        config: DistilConfig,
        scribe: ExampleTokenizer,
        pad_id: int,
    ) -> None:
        self.network, self.teacher, self.texts, self.config = network, teacher, texts, config
        self.scribe, self.pad_id = scribe, pad_id
        if not texts:
            raise DataError("there is no text to learn from", expected="one at least")
        for n, text in enumerate(texts):
            if len(text) > config.seq_len + 1:
                raise DataError(
                    f"text {n} has {len(text):,} ids, and a row has room for {config.seq_len + 1:,}",
                    expected="shorter texts", do="leave it out (`Room`), or make length larger",
                )  # fmt: skip
        if isinstance(teacher, CachedTeacher) and dataset_fingerprint(
            teacher.examples
        ) != dataset_fingerprint(texts):
            raise DataError(
                "the teacher said nothing of these texts", expected="the texts of its folder, in their order"
            )
        self.batch_size = min(config.batch_size, len(texts))
        self.n_on_policy = round(config.on_policy_fraction * self.batch_size)
        self.steps = max(1, math.ceil(config.epochs * len(texts) / self.batch_size))
        vocab = int(network.model.config.vocab_size)
        forbidden = banned_ids(scribe, vocab, len(scribe.tokenizer.token_bytes))
        out = torch.zeros(vocab, dtype=torch.bool)
        out[forbidden] = True
        self.banned_mask = out.to(network.device)
        self.latest = _StepBatch({}, False)
        if self.n_on_policy:
            self.engine = rollout_engine(
                network.eval_copy(), scribe, sequences=64, max_length=config.seq_len + 1
            )

    def batches_from(self, first: int) -> Iterator[_StepBatch]:
        """Records from number `first` on, which with answers of its own is a multiple of `refresh`."""
        config = self.config
        waiting: list[tuple[TokenizedExample, np.ndarray[Any, Any], bool]] = []
        for step in range(first, self.steps):
            numbers = self._step_indices(step)
            fresh = bool(self.n_on_policy) and step % config.sync_every == 0
            if fresh:
                upto = range(step, min(step + config.sync_every, self.steps))
                waiting = self._sample_on_policy(
                    [n for s in upto for n in self._step_indices(s)[: self.n_on_policy]], step
                )
            mine, waiting = waiting[: self.n_on_policy], waiting[self.n_on_policy :]
            given = [self.texts[n] for n in numbers[self.n_on_policy :]]
            texts = [text for text, _, _ in mine] + given
            nothing = [np.zeros(len(text), np.float32) for text in given]
            streams = {}
            if mine:
                streams["behaviour_log_prob"] = [p for _, p, _ in mine] + nothing
                streams["sampled"] = [text.loss_mask.astype(np.float32) for text, _, _ in mine] + nothing
            laid = (
                pack(texts, config.seq_len, self.pad_id, streams)
                if config.packing
                else sort_by_length(pad(texts, self.pad_id, streams))
            )
            if isinstance(self.teacher, CachedTeacher):
                laid["teacher_row"] = self.teacher.target_rows(laid, torch.tensor(numbers))
            record = _StepBatch(laid, fresh)
            if mine:
                lengths = [int(text.loss_mask.sum()) for text, _, _ in mine]
                record.metrics |= {
                    "on_policy_tokens": float(sum(lengths)),
                    "completion_length/on_policy": sum(lengths) / len(mine),
                    "truncated_fraction": sum(not ended for _, _, ended in mine) / len(mine),
                }
            yield record

    def _sample_on_policy(
        self, numbers: Sequence[int], step: int
    ) -> list[tuple[TokenizedExample, np.ndarray[Any, Any], bool]]:
        """Texts of the student's own after the prompts of these, with the log-probability of each id as drawn."""
        self.engine.update_weights(self.network.merged_weights(), step + 1)
        prompts = [self.texts[n].ids[: self.texts[n].prompt_length].tolist() for n in numbers]
        found = sample_completions(
            self.engine, prompts, policy_sampling(self.network.temperature), max_tokens=self.config.max_completion_tokens,
            stop_ids=self.scribe.stop_ids, seed=derive(self.config.seed, "distil", "own", step),
        )  # fmt: skip
        made = []
        for prompt, one in zip(prompts, found, strict=True):
            log_probs = np.array([0.0] * len(prompt) + one.log_probs, np.float32)
            made.append((concat(prompt, one.ids), log_probs, one.finished))
        return made

    def _step_indices(self, step: int) -> list[int]:
        places = range(step * self.batch_size, (step + 1) * self.batch_size)
        return [int(self._epoch_order(place // len(self.texts))[place % len(self.texts)]) for place in places]

    def _epoch_order(self, epoch: int) -> Any:
        if getattr(self, "_epoch", None) != epoch:
            self._epoch = epoch
            rng = numpy_rng(self.config.seed, "distil", "order", epoch)
            self._permutation = rng.permutation(len(self.texts))
        return self._permutation
