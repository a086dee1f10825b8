"""Supervised fine-tuning: next-token prediction on the assistant's tokens.

    total = - sum over targets in the loss mask of log p(target | all ids before it in its text)
    count = their number, in the whole step

Differences from pretraining (`train/lm/pretrain.py`): the texts are conversations with their own loss masks, and the
divisor is the number of masked targets in the step, not in a row. So every token has the same weight in any split of
the batch. Rows are packed, with a document mask between texts. A step equals one with a row per text (tested).

With `replay_fraction`, a share of each step's rows comes from pretraining data. It reduces forgetting. A large share
mixes instructions into late pretraining.

With `held_out` texts the loss on them is measured EVALUATIONS times. From the second epoch on the weights of the lowest one
are kept, and training stops after PATIENCE evaluations without a new lowest (`train/metrics/validation.py`).

With `batch_tokens` a step takes as many texts as the budget holds, and packs or pads them alone. The divisor is still
the number of targets in the step.

A long stage on a CPU compiles the step for full micro-batches of packed rows, which keep their padding so that they have
one shape. On several cores it starts replicas, each with its rows of every step (`stage/task.py`). The steps agree
up to the rounding of sums. A script that calls this needs `if __name__ == "__main__":`.

Batches depend only on the configuration and the step number, so a resumed run ends with the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whorl.align.config import SFTConfig
from whorl.align.model.batch import micro_batches, pack, pad, round_up_8, sort_by_length
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
from whorl.objectives.next_token import Loss
from whorl.tokens.loader import open_batches
from whorl.tokens.token_encoder import TokenizedExample
from whorl.train.learner.learner import Learner
from whorl.train.learner.loop import Stopwatch
from whorl.train.learner.update import MicroBatch
from whorl.train.lm.objective import LMObjective
from whorl.train.metrics.validation import BestWeights
from whorl.train.trainer import Trainer

EVALUATIONS = 10  # of the loss on held-out texts, in a run
PATIENCE = 3


def fine_tune(
    network: PolicyModel,
    examples: Sequence[TokenizedExample],
    config: SFTConfig,
    *,
    pad_id: int,
    replay_data: Path | None = None,
    callback: StepCallback = lambda step, metrics: None,
    checkpoint_dir: Path | None = None,
    log: Log = lambda text: None,
    heartbeat_dir: Path | None = None,
    task_type: Callable[..., SFTTask] | None = None,
) -> PolicyModel:
    """Train `network` on `examples` and return it; resumes from the newest checkpoint.

    Args:
        examples: none longer than `config.data.seq_len` + 1 (`LengthFilter` ensures it).
        replay_data: token set of pretraining, needed if `config.data.replay_fraction` is above 0.
        callback: called after each step with nll (nats per trained token), loss_tokens, grad_norm, epoch and time/*.
        checkpoint_dir: folder of checkpoints; None keeps none.
        heartbeat_dir: where the heartbeat and stack traces of a stall are written; None for neither.
        task_type: a stage with another objective on the same rows, such as `MultiTokenTask`, or `SFTTask` with `held_out`
            texts; default: `SFTTask` without.

    Raises:
        DataError: there are no examples, or replay is requested without a token set.
    """
    if not examples:
        raise DataError(
            "there are no examples", expected="at least one", do="check the rejected ones and their reasons"
        )
    if config.data.replay_fraction and replay_data is None:
        raise DataError(
            f"replay_fraction is {config.data.replay_fraction:g}, and there is no pretraining token set",
            expected="the token set as a parent", do="add it, or set replay_fraction to 0",
        )  # fmt: skip
    task = (task_type or SFTTask)(network, examples, config, pad_id, replay_data)
    run_stage(
        task, callback, checkpoint_dir, log, heartbeat_dir,
        max_replicas=task.n_own,
    )  # fmt: skip
    return network


class SFTTask(DatasetTask):
    """Rows of each step, by step number; every epoch has its own order.

    held_out: texts whose loss decides which weights are kept.
    """

    name = "sft"
    config: SFTConfig

    def __init__(
        self,
        network: PolicyModel,
        texts: Sequence[TokenizedExample],
        config: SFTConfig,
        pad_id: int,
        replay: Path | None,
        held_out: Sequence[TokenizedExample] = (),
    ) -> None:
        self.held_out, self.replay_data, self.fingerprint = held_out, replay, dataset_fingerprint(texts)
        self.config, self.texts, self.pad_id, self.batch = config, texts, pad_id, dict[str, Tensor]()
        self.n_replay = n_replay = replay_rows(config)
        if config.data.batch_tokens is None:
            self.batch = self._rows(range(len(texts)))
            n_rows, width = self.batch["tokens"].shape
            n_own = min(config.data.batch_size - n_replay, n_rows)
            order = EpochOrder(config.seed, self.name, "order", n=n_rows)
            self.order = StepOrder(order, epochs=config.data.epochs, batch_size=n_own)
        else:
            sizes = np.array([max(1, len(text) - 1) for text in texts])
            budget = config.data.batch_tokens - n_replay * config.data.seq_len
            order = EpochOrder(config.seed, self.name, "order", n=len(texts))
            self.order = StepOrder(order, epochs=config.data.epochs, batch_tokens=budget, sizes=sizes)
            n_own, width = self.order.largest, round_up_8(int(sizes.max()))
            if config.data.packing:  # best fit leaves at most one row that is less than half full
                n_own, width = min(n_own, 2 * budget // config.data.seq_len + 1), config.data.seq_len
        self.n_own = n_own  # rows of a step, at most
        super().__init__(
            network, config, steps=self.order.steps, rows=n_own + n_replay, row_length=width,
            positions=n_own * width + n_replay * config.data.seq_len,
        )  # fmt: skip
        self.best, self.planned = BestWeights(), self.steps
        self.evaluate_every = max(1, math.ceil(self.steps / EVALUATIONS))
        if config.objective == "next_token":
            self.uniform_loss = math.log(network.model.config.vocab_size)

    @property
    def identity(self) -> dict[str, Any]:
        held_out = {"held_out": dataset_fingerprint(self.held_out)} if self.held_out else {}
        return {"stage": self.name, "config": self.settings(), "texts": self.fingerprint, **held_out}

    def make_learner(self, trainer: Trainer[Sequence[MicroBatch]]) -> Learner:
        learner = super().make_learner(trainer)
        data, network = self.config.data, self.network
        self.compiles = network.compiles and data.packing and data.batch_tokens is None and not trainer.moe
        self.compiles = self.compiles and self.config.objective == "next_token"
        trainer.log_objective(self.config.objective)
        self.lm_objective = LMObjective(
            network.model, trainer.moe, z_loss=0.0, compile=False, chunk_tokens=network.kernels.chunk_tokens,
            packed_shape=(self.micro_rows, self.row_length) if self.compiles else None,
            objective=self.config.objective,
        )  # fmt: skip
        return learner

    def objective(self, batch: MicroBatch) -> Loss:
        return self.lm_objective(batch)

    _balanced_objective = objective  # which balances the experts itself

    def report(self, steps_done: int, metrics: dict[str, float], clock: Stopwatch) -> dict[str, float] | None:
        epoch = steps_done / self.planned * self.config.data.epochs
        return super().report(steps_done, {**metrics, "epoch": epoch}, clock)

    def evaluate_at(self, steps_done: int) -> bool:
        return bool(self.held_out) and (steps_done % self.evaluate_every == 0 or steps_done == self.steps)

    def evaluate(self) -> dict[str, float]:
        group = self.group
        own = sum_nll(self.network, self.held_out[group.rank :: group.size], self.pad_id)
        total, count = group.all_reduce_scalars(*own)
        return {"held_out_nll": total / max(1.0, count)}

    def keep_best(self, steps_done: int, metrics: dict[str, float]) -> dict[str, float]:
        if steps_done * self.config.data.epochs < self.planned:
            return metrics
        loss, lowest = metrics["held_out_nll"], self.best.state.get("loss", math.inf)
        waited = steps_done - self.best.state.get("step", steps_done)
        if loss >= lowest and waited >= PATIENCE * self.evaluate_every and steps_done < self.steps:
            self.steps = steps_done
            message = f"the held-out loss has not fallen below {lowest:.3f} for {PATIENCE} evaluations"
            self.trainer.report_event(
                steps_done, {"kind": "early stop", "message": message, "action": "training ends here"}
            )
        if not self.best.follow(self.trainer, steps_done, loss):
            return metrics
        return {**self.evaluate(), "kept_step": float(self.best.state["step"])}

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best.state, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        super().load_state_dict(state, tensors)
        self.best, self.steps = BestWeights(state.get("best")), state.get("steps", self.steps)

    def batches_from(self, first: int) -> Iterator[list[MicroBatch]]:
        size, rank = self.group.size, self.group.rank
        for parts in self.rows_from(first):
            own = [{name: t[rank::size] for name, t in part.items()} if size > 1 else part for part in parts]
            yield [
                piece
                for part in own
                if len(part["tokens"])
                for piece in micro_batches(part, micro_batch_rows(self.config, part), trim=not self.compiles)
            ]

    def rows_from(self, first: int) -> Iterator[list[dict[str, Tensor]]]:
        """Yield the rows of step `first` and of all later steps: one part, or two with that of pretraining."""
        replay: Any = None
        if self.n_replay and self.replay_data is not None:
            replay = iter(
                open_batches(
                    self.replay_data, "train", seq_len=self.config.data.seq_len, batch_size=self.n_replay,
                    seed=self.config.seed, start=first, serial=True, rank=0, world_size=1,
                )
            )  # fmt: skip
        for step in range(first, self.steps):
            numbers = self.order[step]
            rows = {name: t[torch.tensor(numbers)] for name, t in self.batch.items()} or self._rows(numbers)
            found = [rows if self.config.data.packing else sort_by_length(rows)]
            if replay is not None:
                found.append(_pretraining_batch(next(replay).tensors()))
            yield found

    def _rows(self, numbers: Iterable[int]) -> dict[str, Tensor]:
        """Return some texts as rows: packed, or one text each."""
        texts = [self.texts[number] for number in numbers]
        return (
            pack(texts, self.config.data.seq_len, self.pad_id)
            if self.config.data.packing
            else pad(texts, self.pad_id)
        )


def sum_nll(network: PolicyModel, texts: Sequence[TokenizedExample], pad_id: int) -> tuple[float, float]:
    """Return the summed loss in nats of the targets of some texts, and their number."""
    if not texts:
        return 0.0, 0.0
    rows = pad(texts, pad_id)
    return network.sum_nll(rows), float(rows["loss_mask"].sum())


def replay_rows(config: SFTConfig) -> int:
    """Return the rows of pretraining data in a step.

    Raises:
        ConfigError: no place is left for a row of each kind.
    """
    data = config.data
    share = data.replay_fraction
    if not share:
        return 0
    if data.batch_tokens is not None:
        if data.batch_tokens < 2 * data.seq_len:
            raise ConfigError(
                f"replay_fraction is {share:g} and batch_tokens {data.batch_tokens:,}",
                expected=f"at least two rows of {data.seq_len:,} positions per step: one of each kind",
            )
        most = data.batch_tokens // data.seq_len - 1
        return min(max(1, round(data.batch_tokens * share / data.seq_len)), most)
    if data.batch_size < 2:
        raise ConfigError(
            f"replay_fraction is {share:g} and batch_size {data.batch_size}",
            expected="at least 2 rows per step: one of each kind",
        )
    return min(max(1, round(data.batch_size * share)), data.batch_size - 1)


def _pretraining_batch(views: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch of pretraining with the field names that `micro_batches` uses."""
    names = ("tokens", "targets", "loss_mask", "segment_ids", "positions")
    part = {name: views[name].clone() for name in names}
    return {**part, "sequence": part["segment_ids"].long() - 1}
