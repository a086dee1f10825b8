"""Training on rows: a batch is a set of rows of tensors, such as images or texts with their labels.

A batch follows from the seed and the step number alone: its rows come from an epoch order. So a resumed run ends with the
same bits. Image models (`vision/train.py`) and text classifiers (`embedding/classifier.py`) are tasks of this kind.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from whorl.data.epoch_order import EpochOrder
from whorl.objectives.next_token import Loss
from whorl.parallel.process_group import launched_ranks, threads_per_replica
from whorl.train.config import ROWS_NOT_HASHED, RowTrainConfig
from whorl.train.learner.learner import Learner, SharedState
from whorl.train.learner.update import MicroBatch, Update, all_adamw
from whorl.train.metrics.layer_stats import LayerStats
from whorl.train.optim.lr_schedule import lr_scale
from whorl.train.trainer import RunOptions, Task, TrainCallback, Trainer

# As for CLIP's ViT (arXiv:2103.00020, table 18). With 1e-8 a key's bias, whose true gradient is 0, follows rounding.
ADAM_EPS = 1e-6
StepCallback = Callable[[int, dict[str, float]], None]


class RowTask(Task[MicroBatch]):
    """Batches of rows of `targets`, with further inputs of these rows.

    Args:
        targets: name -> [N, ...], the rows to train on.
        device: of the network.
        fingerprint: of the data.
    """

    name: ClassVar[str]
    objective_name: ClassVar[str]  # in `objectives/catalog.py`
    unit: ClassVar[str] = "images"  # a row
    trained_prefix: ClassVar[str] = ""  # of the names of the trained parameters

    def __init__(
        self,
        networks: nn.Module,
        targets: Mapping[str, Tensor],
        config: RowTrainConfig,
        device: str,
        fingerprint: str,
    ) -> None:
        self.networks, self.config, self.steps, self.device = networks, config, config.steps, device
        self.targets, self.fingerprint = dict(targets), fingerprint
        self.n_rows = len(next(iter(self.targets.values())))
        self.order = EpochOrder(config.seed, self.name, "order", n=self.n_rows)
        self.rank, self.replicas = 0, 1

    @abstractmethod
    def objective(self, batch: MicroBatch) -> Loss:
        """Return the loss of a batch."""

    @property
    def identity(self) -> dict[str, Any]:
        settings = self.config.model_dump(mode="json", exclude=set(ROWS_NOT_HASHED))
        return {"task": self.name, **settings, "data": self.fingerprint}

    def updates(self) -> list[Update]:
        """Return the updates of a step, in order."""
        optims = all_adamw(self.networks, self.config.lr, self.trained_prefix)
        return [Update(self.objective, optims, weight_decay=self.config.weight_decay, eps=ADAM_EPS)]

    def allocate(self, replicas: int) -> SharedState:
        return SharedState.for_updates(self.networks, self.updates(), replicas)

    def make_learner(self, trainer: Trainer[MicroBatch]) -> Learner:
        self.rank, self.replicas = trainer.group.rank, trainer.group.size
        updates = [replace(update, accept_step=trainer.accept_step) for update in self.updates()]
        return Learner(self.networks, updates, trainer.shared, trainer.group, steps_done=trainer.rounds_done)

    def make_layer_stats(self, learner: Learner, steps_done: int) -> LayerStats | None:
        if len(learner.updates) > 1:  # measured for one update
            return None
        rows = self.config.batch_size
        return LayerStats(learner, steps=self.steps, batch_rows=rows, steps_done=steps_done)

    def batches(self, first: int) -> AbstractContextManager[Iterator[MicroBatch]]:
        return nullcontext(self.batch(step) for step in range(first, self.steps))

    def inputs(self, rows: Tensor, own: slice, step: int) -> dict[str, Tensor]:
        """Return inputs that are no targets, on the device. rows: of the whole batch; own: those of this rank."""
        return {}

    def batch(self, step: int) -> dict[str, Tensor]:
        """Return this rank's rows of the batch of a step."""
        size, own = self.config.batch_size, slice(self.rank, None, self.replicas)
        rows = torch.tensor([self.order[step * size + i] for i in range(size)])
        targets = {name: t[rows[own]].to(self.device) for name, t in self.targets.items()}
        return {**self.inputs(rows, own, step), **targets}

    def minibatches(self, record: MicroBatch) -> list[list[MicroBatch]]:
        return [[record]]

    def lr_scale(self, step: int) -> float:
        return lr_scale(step, self.steps, self.config.train.schedule)


class _Steps(TrainCallback):
    def __init__(self, callback: StepCallback) -> None:
        self._callback = callback

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        self._callback(step, metrics)


def train_rows(
    task: RowTask,
    *,
    callback: StepCallback = lambda step, metrics: None,
    checkpoint_dir: Path | None = None,
    heartbeat_dir: Path | None = None,
    log: Callable[[str], None] = lambda text: None,
) -> None:
    """Train `task.networks` to the last step, from the newest checkpoint if there is one.

    Args:
        callback: called after each step with loss, correct (classifier, CLIP), nll, grad_norm and time/*.
        checkpoint_dir: folder of checkpoints; None keeps none.

    Raises:
        ConfigError: replicas of CLIP, or of a network with batch norm.
        CheckpointError: the checkpoint is of another job.
    """
    c = task.config
    replicas = c.run.replicas or (1 if "replicas" in task.unsupported else launched_ranks() or 1)
    threads = c.threads or threads_per_replica(replicas)
    options = RunOptions(
        scratch=checkpoint_dir, checkpoint_seconds=c.run.checkpoint_seconds, checkpoint_config=c.run.checkpoints,
        replicas=replicas, threads=threads, spike_guard=c.train.spike_guard, ema=c.train.ema,
        deterministic=c.train.deterministic, heartbeat_dir=heartbeat_dir,
    )  # fmt: skip
    Trainer(task, options, _Steps(callback), log=log).fit()
