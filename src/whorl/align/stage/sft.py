"""Supervised fine-tuning: pretraining's objective, on what the assistant says alone.

    total = - sum over the targets that are to be learnt of log p(target | all before it in its text)
    count = how many there are, in the whole step

It is told as the difference from pretraining (`train/lm/pretrain.py`): the texts are conversations, the mask is theirs, and the
count that divides is that of the targets that count, over the step, not over a row: a short answer beside a long one weighs
by its tokens in every way of cutting the batch. Rows are packed, and a document mask keeps neighbours apart; a step is the
same as if every text had a row of its own (a test).

With `replay`, a share of each step's rows are pretraining's: against forgetting, and, with most of a step, the way in which
instructions are mixed into late pretraining.

A long stage on several cores starts replicas, each of which takes its rows of every step (`training.py`): the same steps up
to the rounding of sums. A script that calls this wants `if __name__ == "__main__":`.

Everything else that decides a weight is in the configuration and the step's number, so a run that was killed goes on to the
bits of one that was not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whorl.align.config import SFTConfig
from whorl.align.model.batch import micro_batches, pack, pad, sort_by_length
from whorl.align.model.example import TokenizedExample
from whorl.align.model.policy_model import PolicyModel
from whorl.align.stage.trainer import (
    Precomputed,
    StepCallback,
    choose_replicas,
    dataset_fingerprint,
    micro_batch_rows,
    run_stage,
    train_replica,
)
from whorl.errors import ConfigError, DataError
from whorl.parallel.process_group import ProcessGroup
from whorl.tokens.loader import open_batches
from whorl.tracking.seeds import numpy_rng
from whorl.train.config import RoutingConfig
from whorl.train.learner.learner import SharedState
from whorl.train.learner.update import MicroBatch
from whorl.train.lm.objective import LMObjective
from whorl.train.metrics.moe_balance import MoEBalancer


def fine_tune(
    network: PolicyModel,
    examples: Sequence[TokenizedExample],
    config: SFTConfig,
    *,
    pad_id: int,
    replay_data: Path | None = None,
    callback: StepCallback = lambda step, metrics: None,
    checkpoint_dir: Path | None = None,
    log: Callable[[str], None] = lambda text: None,
) -> PolicyModel:
    """Trains `network` on `texts`, from the newest checkpoint if there is one.

    Args:
        texts: none longer than `config.length` + 1 (`Room` sees to that).
        replay: a token set of pretraining, if `config.replay` asks for rows of it.
        observe: told after each step: nll (of what is learnt, nats a token), count, gradient_norm, tokens, seconds_*.
        scratch: folder for checkpoints; None keeps none.

    Raises:
        DataError: nothing to learn from; replay is asked for, and there is no token set.
    """
    if not examples:
        raise DataError(
            "there is no text to learn from", expected="one at least", do="see what was left out, and why"
        )
    if config.replay_fraction and replay_data is None:
        raise DataError(
            f"replay_fraction is {config.replay_fraction:g}, and there are no tokens of pretraining",
            expected="the token set as a parent", do="name it, or set replay_fraction to 0",
        )  # fmt: skip
    batches = _SFTBatches(examples, config, pad_id, replay_data)
    settings = config.model_dump(mode="json", exclude={"checkpoint_seconds", "replicas"})
    identity = {"stage": "sft", "config": settings, "texts": dataset_fingerprint(examples)}
    world = ProcessGroup()
    mixtures, objective = _sft_objective(network, world)

    def told(step: int, metrics: dict[str, float]) -> None:
        mixtures.on_step_end()
        callback(step, {**metrics, "epoch": step / batches.steps * config.epochs})

    replicas = choose_replicas(
        network, config.replicas, positions=batches.steps * batches.positions, length=config.seq_len, max_replicas=batches.n_own
    )  # fmt: skip
    run_stage(
        network, config, objective, lambda first, _: batches.micro_batches(first, world),
        identity=identity, steps=batches.steps, positions=batches.positions, callback=told, checkpoint_dir=checkpoint_dir, log=log,
        replicas=replicas, replica=partial(_replica_main, network, batches), world=world,
    )  # fmt: skip
    return network.eval()


def _sft_objective(network: PolicyModel, world: ProcessGroup) -> tuple[MoEBalancer, LMObjective]:
    """What is learnt, and the books of experts beside it."""
    mixtures = MoEBalancer(network.model, RoutingConfig(), world)
    return mixtures, LMObjective(network.model, mixtures, z_loss=0.0, compile=False)


def _replica_main(
    network: PolicyModel,
    batches: _SFTBatches,
    world: ProcessGroup,
    first: int,
    shared: SharedState,
    _: Precomputed,
) -> None:
    """What the replicas beside the first do: the same, and nobody watches."""
    mixtures, objective = _sft_objective(network, world)
    train_replica(
        world, network, batches.config, objective, batches.micro_batches(first, world), shared,
        positions=batches.positions, first=first, steps=batches.steps, on_step_end=lambda *_: mixtures.on_step_end(),
    )  # fmt: skip


class _SFTBatches:
    """The rows of each step, by its number: every epoch in an order of its own."""

    def __init__(
        self, texts: Sequence[TokenizedExample], config: SFTConfig, pad_id: int, replay: Path | None
    ) -> None:
        self.config, self.replay_data = config, replay
        self.batch: dict[str, Tensor] = (
            pack(texts, config.seq_len, pad_id) if config.packing else pad(texts, pad_id)
        )
        self.n_rows = len(self.batch["tokens"])
        self.n_replay = 0
        if config.replay_fraction:
            if config.batch_size < 2:
                raise ConfigError(
                    f"replay_fraction is {config.replay_fraction:g} and batch_size {config.batch_size}",
                    expected="2 rows a step at least: one of each kind",
                )
            self.n_replay = min(
                max(1, round(config.batch_size * config.replay_fraction)), config.batch_size - 1
            )
        self.n_own = min(config.batch_size - self.n_replay, self.n_rows)
        self.steps = max(1, math.ceil(config.epochs * self.n_rows / self.n_own))
        width = self.batch["tokens"].shape[1]
        self.positions = self.n_own * width + self.n_replay * config.seq_len  # of a step, at most

    def micro_batches(self, first: int, world: ProcessGroup) -> Iterator[list[MicroBatch]]:
        """The micro-batches of the steps from number `first` on: of each batch every `world.size`-th row."""
        for rows in self.batches_from(first):
            mine = [
                {name: t[world.rank :: world.size] for name, t in part.items()} if world.size > 1 else part
                for part in rows
            ]
            yield [
                p
                for part in mine
                if len(part["tokens"])
                for p in micro_batches(part, micro_batch_rows(self.config, part))
            ]

    def batches_from(self, first: int) -> Iterator[list[dict[str, Tensor]]]:
        """The batches from number `first` on: each is one part, or two with that of pretraining."""
        replay: Any = None
        if self.n_replay and self.replay_data is not None:
            replay = iter(
                open_batches(
                    self.replay_data, "train", seq_len=self.config.seq_len, batch_size=self.n_replay,
                    seed=self.config.seed, start=first, serial=True, rank=0, world_size=1,
                )
            )  # fmt: skip
        for step in range(first, self.steps):
            places = np.arange(step * self.n_own, (step + 1) * self.n_own)
            numbers = [
                self._epoch_order(epoch)[place]
                for epoch, place in zip(*divmod(places, self.n_rows), strict=True)
            ]
            rows = {name: t[torch.tensor(numbers)] for name, t in self.batch.items()}
            found = [rows if self.config.packing else sort_by_length(rows)]
            if replay is not None:
                found.append(_pretraining_batch(next(replay).tensors()))
            yield found

    def _epoch_order(self, epoch: Any) -> Any:
        if getattr(self, "_epoch", None) != epoch:
            self._epoch = epoch
            self._permutation = numpy_rng(self.config.seed, "sft", "order", int(epoch)).permutation(
                self.n_rows
            )
        return self._permutation


def _pretraining_batch(views: dict[str, Tensor]) -> dict[str, Tensor]:
    """A batch of pretraining as a part of this room's: with the names that `cut` looks at."""
    names = ("tokens", "targets", "loss_mask", "segment_ids", "positions")
    part = {name: views[name].clone() for name in names}
    return {**part, "sequence": part["segment_ids"].long() - 1}
