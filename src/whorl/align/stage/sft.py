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
from whorl.align.model.batch import by_length, cut, lay, pack
from whorl.align.model.example import Text
from whorl.align.model.policy_model import Network
from whorl.align.stage.trainer import (
    Observer,
    Once,
    fingerprint,
    micro_rows,
    replicas_for,
    run_stage,
    take_part,
)
from whorl.errors import ConfigError, DataError
from whorl.parallel.process_group import World
from whorl.tokens.loader import open_batches
from whorl.tracking.seeds import numpy_rng
from whorl.train.config import RoutingConfig
from whorl.train.learner.learner import Shared
from whorl.train.learner.update import Part
from whorl.train.lm.objective import LossOf
from whorl.train.metrics.moe_balance import Mixtures


def fine_tune(
    network: Network,
    texts: Sequence[Text],
    config: SFTConfig,
    *,
    pad_id: int,
    replay: Path | None = None,
    observe: Observer = lambda step, metrics: None,
    scratch: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Network:
    """Trains `network` on `texts`, from the newest checkpoint if there is one.

    Args:
        texts: none longer than `config.length` + 1 (`Room` sees to that).
        replay: a token set of pretraining, if `config.replay` asks for rows of it.
        observe: told after each step: nll (of what is learnt, nats a token), count, gradient_norm, tokens, seconds_*.
        scratch: folder for checkpoints; None keeps none.

    Raises:
        DataError: nothing to learn from; replay is asked for, and there is no token set.
    """
    if not texts:
        raise DataError(
            "there is no text to learn from", expected="one at least", do="see what was left out, and why"
        )
    if config.replay and replay is None:
        raise DataError(
            f"replay is {config.replay:g}, and there are no tokens of pretraining",
            expected="the token set as a parent", do="name it, or set replay to 0",
        )  # fmt: skip
    batches = _Batches(texts, config, pad_id, replay)
    settings = config.model_dump(mode="json", exclude={"checkpoint_seconds", "replicas"})
    identity = {"stage": "sft", "config": settings, "texts": fingerprint(texts)}
    world = World()
    mixtures, objective = _objective(network, world)

    def told(step: int, metrics: dict[str, float]) -> None:
        mixtures.end_step()
        observe(step, {**metrics, "epoch": step / batches.steps * config.epochs})

    replicas = replicas_for(
        network, config.replicas, positions=batches.steps * batches.positions, length=config.length, most=batches.own
    )  # fmt: skip
    run_stage(
        network, config, objective, lambda first, _: batches.parts(first, world),
        identity=identity, steps=batches.steps, positions=batches.positions, observe=told, scratch=scratch, say=say,
        replicas=replicas, replica=partial(_replica, network, batches), world=world,
    )  # fmt: skip
    return network.eval()


def _objective(network: Network, world: World) -> tuple[Mixtures, LossOf]:
    """What is learnt, and the books of experts beside it."""
    mixtures = Mixtures(network.model, RoutingConfig(), world)
    return mixtures, LossOf(network.model, mixtures, z_loss=0.0, compile=False)


def _replica(network: Network, batches: _Batches, world: World, first: int, shared: Shared, _: Once) -> None:
    """What the replicas beside the first do: the same, and nobody watches."""
    mixtures, objective = _objective(network, world)
    take_part(
        world, network, batches.config, objective, batches.parts(first, world), shared,
        positions=batches.positions, first=first, steps=batches.steps, after=lambda *_: mixtures.end_step(),
    )  # fmt: skip


class _Batches:
    """The rows of each step, by its number: every epoch in an order of its own."""

    def __init__(self, texts: Sequence[Text], config: SFTConfig, pad_id: int, replay: Path | None) -> None:
        self.config, self.replay = config, replay
        self.part: dict[str, Tensor] = (
            pack(texts, config.length, pad_id) if config.packing else lay(texts, pad_id)
        )
        self.rows = len(self.part["tokens"])
        self.replayed = 0
        if config.replay:
            if config.batch_rows < 2:
                raise ConfigError(
                    f"replay is {config.replay:g} and batch_rows {config.batch_rows}",
                    expected="2 rows a step at least: one of each kind",
                )
            self.replayed = min(max(1, round(config.batch_rows * config.replay)), config.batch_rows - 1)
        self.own = min(config.batch_rows - self.replayed, self.rows)
        self.steps = max(1, math.ceil(config.epochs * self.rows / self.own))
        width = self.part["tokens"].shape[1]
        self.positions = self.own * width + self.replayed * config.length  # of a step, at most

    def parts(self, first: int, world: World) -> Iterator[list[Part]]:
        """The micro-batches of the steps from number `first` on: of each batch every `world.size`-th row."""
        for rows in self.after(first):
            mine = [
                {name: t[world.rank :: world.size] for name, t in part.items()} if world.size > 1 else part
                for part in rows
            ]
            yield [
                p for part in mine if len(part["tokens"]) for p in cut(part, micro_rows(self.config, part))
            ]

    def after(self, first: int) -> Iterator[list[dict[str, Tensor]]]:
        """The batches from number `first` on: each is one part, or two with that of pretraining."""
        replay: Any = None
        if self.replayed and self.replay is not None:
            replay = iter(
                open_batches(
                    self.replay, "train", length=self.config.length, batch_rows=self.replayed,
                    seed=self.config.seed, start=first, serial=True, rank=0, world=1,
                )
            )  # fmt: skip
        for step in range(first, self.steps):
            places = np.arange(step * self.own, (step + 1) * self.own)
            numbers = [
                self._order(epoch)[place] for epoch, place in zip(*divmod(places, self.rows), strict=True)
            ]
            rows = {name: t[torch.tensor(numbers)] for name, t in self.part.items()}
            found = [rows if self.config.packing else by_length(rows)]
            if replay is not None:
                found.append(_tokens(next(replay).tensors()))
            yield found

    def _order(self, epoch: Any) -> Any:
        if getattr(self, "_epoch", None) != epoch:
            self._epoch = epoch
            self._places = numpy_rng(self.config.seed, "sft", "order", int(epoch)).permutation(self.rows)
        return self._places


def _tokens(views: dict[str, Tensor]) -> dict[str, Tensor]:
    """A batch of pretraining as a part of this room's: with the names that `cut` looks at."""
    names = ("tokens", "targets", "loss_mask", "segment_ids", "positions")
    part = {name: views[name].clone() for name in names}
    return {**part, "sequence": part["segment_ids"].long() - 1}
