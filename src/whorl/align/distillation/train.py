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
from whorl.align.distillation.teacher import Teacher, Told, fingerprint_of
from whorl.align.model.batch import by_length, cut, lay, pack
from whorl.align.model.example import Scribe, Text, joined
from whorl.align.model.policy_model import Network
from whorl.align.model.sampling import answer, never, policy_sampling, rollout_engine
from whorl.align.stage.trainer import Observer, Once, fingerprint, micro_rows, run_stage
from whorl.errors import ConfigError, DataError
from whorl.objectives import Loss
from whorl.objectives.log_probs import token_log_probs
from whorl.parallel.process_group import World
from whorl.tracking.seeds import derive, numpy_rng
from whorl.train.config import RoutingConfig
from whorl.train.learner.update import Part
from whorl.train.metrics.moe_balance import Mixtures


def learn_from(
    network: Network,
    teacher: Teacher,
    texts: Sequence[Text],
    config: DistilConfig,
    *,
    scribe: Scribe,
    pad_id: int,
    observe: Observer = lambda step, metrics: None,
    scratch: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Network:
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
    check_teacher(network, teacher, config, scribe)
    batches = _Batches(network, teacher, texts, config, scribe, pad_id)
    mixtures = Mixtures(network.model, RoutingConfig(), World())
    objective = _Objective(network, teacher, config, mixtures, batches.forbidden)
    identity = {
        "stage": "distil",
        "config": config.model_dump(mode="json", exclude={"checkpoint_seconds"}),
        "texts": fingerprint(texts),
        "teacher": teacher.identity(),
    }

    def parts(first: int, _: Once) -> Iterator[list[Part]]:
        for record in batches.after(first):
            objective.fresh, batches.newest = record.fresh, record
            pieces: list[Part] = list(cut(record.part, micro_rows(config, record.part)))
            record.figures["positions"] = float(sum(piece["tokens"].numel() for piece in pieces))
            yield pieces

    def told(step: int, metrics: dict[str, float]) -> None:
        mixtures.end_step()
        observe(step, {**metrics, **batches.newest.figures, **objective.take()})

    run_stage(
        network, config, objective, parts, identity=identity, steps=batches.steps,
        positions=config.batch_texts * -(-config.length // 8) * 8,  # rows are rounded up so (`rows.lay`)
        observe=told, may_save=lambda step: step % config.refresh == 0 or not batches.own, scratch=scratch, say=say,
    )  # fmt: skip
    return network.eval()


def check_teacher(network: Network, teacher: Teacher, config: DistilConfig, scribe: Scribe) -> None:
    """That they speak of the same ids, and that this teacher can say what is asked.

    Raises:
        ConfigError: it is not so.
    """
    own, mine = network.model.config.vocab_size, fingerprint_of(scribe.tokenizer)
    if teacher.vocab_size != own or (teacher.words and teacher.words != mine):
        raise ConfigError(
            f"the teacher's vocabulary ({teacher.vocab_size:,} ids, {teacher.words or 'unknown'}) is not the student's "
            f"({own:,} ids, {mine})",
            expected="one vocabulary",
            do="distil from a teacher of the same tokenizer, or fine-tune on its texts",
        )
    if not isinstance(teacher, Told):
        return
    if config.own:
        raise ConfigError(
            f"own is {config.own:g}, and the teacher is not there: what it said is of given texts alone",
            expected="a model beside, for what the student writes", do="set own to 0, or load the teacher",
        )  # fmt: skip
    if teacher.temperature != config.temperature:
        raise ConfigError(
            f"temperature is {config.temperature:g}, and the teacher was asked at {teacher.temperature:g}",
            expected="the same", do="set temperature to it, or let the teacher say it again",
        )  # fmt: skip


@dataclass
class _Record:
    """What a step learns from. fresh: its own answers are of the very weights that are about to learn."""

    part: dict[str, Tensor]
    fresh: bool
    figures: dict[str, float] = field(default_factory=dict)


class _Objective:
    """The divergence of a micro-batch, and parity beside it."""

    def __init__(
        self, network: Network, teacher: Teacher, config: DistilConfig, mixtures: Mixtures, forbidden: Tensor
    ) -> None:
        self.network, self.teacher, self.config = network, teacher, config
        self.mixtures, self.forbidden = mixtures, forbidden
        self.fresh, self.parity = False, 0.0

    def __call__(self, part: Part) -> Loss:
        model, mask = self.network.model, part["loss_mask"]
        segments = part.get("segment_ids")
        records: list[Any] | None = [] if self.mixtures else None
        positions = None if segments is None else part["positions"]
        hidden = model(part["tokens"], positions, segments, records=records)[mask]
        if self.fresh:
            self._look(part, hidden.detach())
        loss = self.teacher.loss(part, hidden, model.head_weight, model.logit_softcap, self.config)
        return loss if records is None else self.mixtures.loss(loss, records, mask)

    @torch.no_grad()
    def _look(self, part: Part, hidden: Tensor) -> None:
        mask = part["loss_mask"]
        sampled = part["sampled"][mask] > 0
        if not sampled.any():
            return
        log_prob, _ = token_log_probs(
            hidden[sampled], self.network.model.head_weight, part["targets"][mask][sampled],
            temperature=self.network.temperature, softcap=self.network.model.logit_softcap,
            forbidden=self.forbidden,
        )  # fmt: skip
        apart = (log_prob - part["behaviour_log_prob"][mask][sampled]).abs().max()
        self.parity = max(self.parity, float(apart) if apart.isfinite() else float("inf"))

    def take(self) -> dict[str, float]:
        """What was seen since the last call."""
        parity, self.parity = self.parity, 0.0
        return {"parity": parity} if self.fresh else {}


class _Batches:
    """The record of each step, by its number: every epoch in an order of its own, the first of a step to be answered."""

    def __init__(
        self,
        network: Network,
        teacher: Teacher,
        texts: Sequence[Text],
        config: DistilConfig,
        scribe: Scribe,
        pad_id: int,
    ) -> None:
        self.network, self.teacher, self.texts, self.config = network, teacher, texts, config
        self.scribe, self.pad_id = scribe, pad_id
        if not texts:
            raise DataError("there is no text to learn from", expected="one at least")
        for n, text in enumerate(texts):
            if len(text) > config.length + 1:
                raise DataError(
                    f"text {n} has {len(text):,} ids, and a row has room for {config.length + 1:,}",
                    expected="shorter texts", do="leave it out (`Room`), or make length larger",
                )  # fmt: skip
        if isinstance(teacher, Told) and fingerprint(teacher.texts) != fingerprint(texts):
            raise DataError(
                "the teacher said nothing of these texts", expected="the texts of its folder, in their order"
            )
        self.size = min(config.batch_texts, len(texts))
        self.own = round(config.own * self.size)
        self.steps = max(1, math.ceil(config.epochs * len(texts) / self.size))
        vocab = int(network.model.config.vocab_size)
        forbidden = never(scribe, vocab, len(scribe.tokenizer.token_bytes))
        out = torch.zeros(vocab, dtype=torch.bool)
        out[forbidden] = True
        self.forbidden = out.to(network.device)
        self.newest = _Record({}, False)
        if self.own:
            self.engine = rollout_engine(network.copied(), scribe, sequences=64, max_length=config.length + 1)

    def after(self, first: int) -> Iterator[_Record]:
        """Records from number `first` on, which with answers of its own is a multiple of `refresh`."""
        config = self.config
        waiting: list[tuple[Text, np.ndarray[Any, Any], bool]] = []
        for step in range(first, self.steps):
            numbers = self._numbers(step)
            fresh = bool(self.own) and step % config.refresh == 0
            if fresh:
                upto = range(step, min(step + config.refresh, self.steps))
                waiting = self._answers([n for s in upto for n in self._numbers(s)[: self.own]], step)
            mine, waiting = waiting[: self.own], waiting[self.own :]
            given = [self.texts[n] for n in numbers[self.own :]]
            texts = [text for text, _, _ in mine] + given
            nothing = [np.zeros(len(text), np.float32) for text in given]
            streams = {}
            if mine:
                streams["behaviour_log_prob"] = [p for _, p, _ in mine] + nothing
                streams["sampled"] = [text.mask.astype(np.float32) for text, _, _ in mine] + nothing
            laid = (
                pack(texts, config.length, self.pad_id, streams)
                if config.packing
                else by_length(lay(texts, self.pad_id, streams))
            )
            if isinstance(self.teacher, Told):
                laid["told"] = self.teacher.rows_of(laid, torch.tensor(numbers))
            record = _Record(laid, fresh)
            if mine:
                lengths = [int(text.mask.sum()) for text, _, _ in mine]
                record.figures |= {
                    "sampled": float(sum(lengths)),
                    "own_length": sum(lengths) / len(mine),
                    "cut_off": sum(not ended for _, _, ended in mine) / len(mine),
                }
            yield record

    def _answers(self, numbers: Sequence[int], step: int) -> list[tuple[Text, np.ndarray[Any, Any], bool]]:
        """Texts of the student's own after the prompts of these, with the log-probability of each id as drawn."""
        self.engine.update_weights(self.network.policy(), step + 1)
        prompts = [self.texts[n].ids[: self.texts[n].prompt_length].tolist() for n in numbers]
        found = answer(
            self.engine, prompts, policy_sampling(self.network.temperature), max_tokens=self.config.max_tokens,
            ends=self.scribe.ends, seed=derive(self.config.seed, "distil", "own", step),
        )  # fmt: skip
        made = []
        for prompt, one in zip(prompts, found, strict=True):
            log_probs = np.array([0.0] * len(prompt) + one.log_probs, np.float32)
            made.append((joined(prompt, one.ids), log_probs, one.finished))
        return made

    def _numbers(self, step: int) -> list[int]:
        places = range(step * self.size, (step + 1) * self.size)
        return [int(self._order(place // len(self.texts))[place % len(self.texts)]) for place in places]

    def _order(self, epoch: int) -> Any:
        if getattr(self, "_epoch", None) != epoch:
            self._epoch = epoch
            rng = numpy_rng(self.config.seed, "distil", "order", epoch)
            self._places = rng.permutation(len(self.texts))
        return self._places
