"""Stages over a data set as tasks of the trainer: fine-tuning, preferences, reward models, distillation.

    batches_from   micro-batches of each step, by step number alone
    precompute     computed once before the first step, such as reference log-probabilities

Replicas train on shards of every step's batch: the operations of a small model are too short to be split over cores
(`parallel/process_group.py`). A batch follows from the step number, so each replica builds it and no rows are sent.

The subtle point is `precompute`. The reference is the network before its first step, which is gone after a restart. A
resumed run must train against the same values, bit for bit. So they are part of every checkpoint and are computed only
where there is no checkpoint.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whorl.align.config import StageConfig
from whorl.align.model.policy_model import PolicyModel
from whorl.align.stage.experts import check_expert_settings, stage_param_optims
from whorl.objectives.next_token import Loss
from whorl.parallel.process_group import (
    ProcessGroup,
    cores_for_replicas,
    launched_ranks,
    threads_per_replica,
)
from whorl.tokens.token_encoder import TokenizedExample
from whorl.train.learner.learner import Learner, SharedState
from whorl.train.learner.loss_scaler import LossScaler
from whorl.train.learner.update import AcceptStep, MicroBatch, Update, accept_if_finite
from whorl.train.lm.precision import muon_dtype
from whorl.train.metrics.layer_stats import LayerStats
from whorl.train.optim.lr_schedule import lr_scale
from whorl.train.resilience.memory_budget import apply_activation_checkpointing
from whorl.train.resilience.oom_advice import OutOfMemoryError, describe
from whorl.train.trainer import R, RunOptions, StepFunction, Task, Trainer

StepCallback = Callable[[int, dict[str, float]], None]
Log = Callable[[str], None]
PRECOMPUTED_PREFIX = "once/"
NON_IDENTITY_FIELDS = ("run",)
MIN_REPLICA_FLOPS = 1e13  # FLOPs of a stage, about half a minute; starting processes for less does not pay
MAX_REPLICA_PARAMS = (
    5e7  # parameters; above, operations are long enough to be split, and extra engines cost memory
)


def choose_replicas(
    network: PolicyModel, config: StageConfig, *, positions: float, length: int, max_replicas: int
) -> int:
    """Return the requested number of replicas, or by default one per thread where that pays; at most `max_replicas`.

    A deterministic stage counts usable cores, since the number of threads is measured.
    positions: of the whole stage, in rows of `length`. The result is 1 where the model is not on the CPU.
    """
    if network.device.type != "cpu":
        return 1
    if config.run.replicas is not None:
        return min(config.run.replicas, max_replicas)
    if launched_ranks():
        return min(launched_ranks(), max_replicas)
    small = sum(p.numel() for p in network.model.parameters()) <= MAX_REPLICA_PARAMS
    if not small or network.model.flops_per_token(length) * positions < MIN_REPLICA_FLOPS:
        return 1
    return max(1, min(cores_for_replicas(config.train.deterministic), max_replicas))


def make_learner(
    network: PolicyModel,
    objective: Callable[[MicroBatch], Loss],
    config: StageConfig,
    *,
    positions: int,
    steps_done: int = 0,
    shared: SharedState | None = None,
    world: ProcessGroup | None = None,
    accept_step: AcceptStep = accept_if_finite,
    loss_scaler: LossScaler | None = None,
    updates_per_step: int = 1,
) -> Learner:
    """Return a learner with one update of all trained parameters, with pretraining's optimizers at scaled rates.

    objective: of a micro-batch on the network's device; it is moved there (`PolicyModel.to_device`).
    positions: of a step, at most; bounds the rows of embedding tables that a step can touch. shared, world: of
    replicas. updates_per_step: optimizer steps per step of the stage, which counts `train.routing.freeze_router_step`.
    """
    optim = config.optim()
    update = Update(
        lambda part: objective(network.to_device(part)),
        stage_param_optims(network, config, updates_per_step),
        clip_norm=optim.clip_norm,
        momentum=optim.momentum,
        muon_every=optim.muon_every,
        betas=(0.8, 0.95),
        eps=1e-10,
        accept_step=accept_step,
        loss_scaler=loss_scaler or (LossScaler() if network.model.dtype == torch.float16 else None),
        fused=network.kernels.fused_adamw,
        native=network.kernels.native_update,
    )
    muon_type = muon_dtype(network.model.dtype)
    shared = shared or make_shared_state(network, config, positions=positions)
    return Learner(network, [update], shared, world, dtype=muon_type, steps_done=steps_done)


def make_shared_state(
    network: PolicyModel, config: StageConfig, *, positions: int, replicas: int = 1
) -> SharedState:
    """Allocate weights, gradients and optimizer state of a stage's learner for any number of replicas."""
    param_optims = network.param_optims(config.optim())
    return SharedState.allocate(network, param_optims, replicas, max_rows=positions, contiguous=replicas == 1)


def micro_batch_rows(config: StageConfig, batch: MicroBatch) -> int:
    """Return the rows of a forward pass with gradients."""
    return max(1, config.train.micro_batch_tokens // batch["tokens"].shape[1])


def dataset_fingerprint(examples: Sequence[TokenizedExample]) -> str:
    """Return a hash of all ids and loss masks, in order."""
    digest = hashlib.blake2b(digest_size=16)
    for example in examples:
        digest.update(example.ids.tobytes() + example.loss_mask.tobytes() + b"|")
    return digest.hexdigest()


class StageTask(Task[R]):
    """Base class of the stages. A subclass has an objective, and the minibatches of each record.

    name: of the stage. positions: of a step, at most. rows: of a step, for the noise scale. row_length: in positions.
    updates_per_step: optimizer steps of a step.

    Raises:
        ConfigError: a setting of experts has no effect (`check_expert_settings`).
    """

    name = ""
    networks: PolicyModel
    updates_per_step = 1

    def __init__(
        self,
        network: PolicyModel,
        config: StageConfig,
        *,
        steps: int,
        positions: int,
        rows: int,
        row_length: int,
    ) -> None:
        check_expert_settings(network.model, config, self.name)
        self.networks = self.network = network
        self.config, self.steps, self.positions = config, steps, positions
        self.rows, self.row_length = rows, row_length
        self.dtype = network.model.dtype

    def settings(self) -> dict[str, Any]:
        """Return the configuration, without the fields that decide no weight."""
        return self.config.model_dump(mode="json", exclude=set(NON_IDENTITY_FIELDS))

    @property
    def flops(self) -> float:
        """FLOPs of the whole stage, over all replicas."""
        return self.network.model.flops_per_token(self.row_length) * self.positions * self.steps

    @property
    def micro_rows(self) -> int:
        """Rows of a full forward pass with gradients, in each replica."""
        most = max(1, self.config.train.micro_batch_tokens // self.row_length)
        return min(-(-self.rows // self.group.size), most)

    @abstractmethod
    def objective(self, batch: MicroBatch) -> Loss:
        """Return the loss of a micro-batch on the network's device."""

    def apply_activation_budget(self, replicas: int) -> None:
        """Recompute as many blocks as the budget requires.

        Raises:
            BudgetError: the budget is too small.
        """
        length = self.row_length
        apply_activation_checkpointing(
            self.network.model, self.config.run.activation_budget, length=length,
            rows=max(1, self.config.train.micro_batch_tokens // length), replicas=replicas, step=self.name,
            rows_setting=("train.micro_batch_tokens", length),
        )  # fmt: skip

    def allocate(self, replicas: int) -> SharedState:
        return make_shared_state(self.network, self.config, positions=self.positions, replicas=replicas)

    def make_learner(self, trainer: Trainer[R]) -> Learner:
        self.trainer, self.group = trainer, trainer.group
        if not self.config.train.deterministic:
            self.network.choose_kernels(self.micro_rows, self.row_length, self.flops)
        learner = make_learner(
            self.network, self._balanced_objective, self.config, positions=self.positions,
            steps_done=trainer.rounds_done, shared=trainer.shared, world=trainer.group,
            accept_step=trainer.accept_step, loss_scaler=trainer.loss_scaler, updates_per_step=self.updates_per_step,
        )  # fmt: skip
        self.network.train()
        return learner

    def _balanced_objective(self, batch: MicroBatch) -> Loss:
        """Return the loss plus the auxiliary losses of the experts, as means over the targets."""
        moe = self.trainer.moe
        if not moe:
            return self.objective(batch)
        self.network.routings = []
        loss = self.objective(batch)
        routings, self.network.routings = self.network.routings, None
        mask = batch["loss_mask"]
        return moe.add_aux_losses(loss, routings, mask, scale=loss.count / mask.sum().clamp(min=1))

    def make_layer_stats(self, learner: Learner, steps_done: int) -> LayerStats:
        return LayerStats(
            learner, steps=self.steps, batch_rows=self.rows, model=self.network.model, steps_done=steps_done
        )

    def lr_scale(self, step: int) -> float:
        return lr_scale(step, self.steps, self.config.train.schedule)

    def out_of_memory(self, error: Exception) -> OutOfMemoryError:
        now = self.config.train.micro_batch_tokens
        what, remedies = describe(error, self.network.device.type)
        remedies += [
            f"--set {self.name}.train.micro_batch_tokens={max(1, now // 2)} (now {now}; the same steps up to rounding)",
            f"--set {self.name}.run.activation_budget=25%",
            f"--set {self.name}.model.lora.rank=16 (an adapter has few moments)",
        ]
        return OutOfMemoryError(
            what,
            expected=f"memory for {now:,} positions of a forward pass with gradients, in each replica",
            do="one of: " + "; ".join(remedies),
        )


class DatasetTask(StageTask[Sequence[MicroBatch]]):
    """A stage whose batches follow from the step number."""

    precomputed: Mapping[str, Tensor] = {}

    @abstractmethod
    def batches_from(self, first: int) -> Iterator[Sequence[MicroBatch]]:
        """Yield this rank's micro-batches of step `first` and of all later steps."""

    def precompute(self) -> dict[str, Tensor]:
        """Return what later steps need from the initial weights."""
        return {}

    def prepare(self) -> None:
        self.network.eval()
        self.precomputed = self.precompute()

    def batches(self, first: int) -> AbstractContextManager[Iterator[Sequence[MicroBatch]]]:
        return nullcontext(self.batches_from(first))

    def minibatches(self, record: Sequence[MicroBatch]) -> list[Sequence[MicroBatch]]:
        return [record]

    def tensors(self) -> dict[str, Tensor]:
        return {PRECOMPUTED_PREFIX + name: t for name, t in self.precomputed.items()}

    def load_state_dict(self, state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.precomputed = {name.removeprefix(PRECOMPUTED_PREFIX): t for name, t in tensors.items()}


def run_options(
    config: StageConfig, checkpoint_dir: Path | None, replicas: int = 1, heartbeat_dir: Path | None = None
) -> RunOptions:
    """Return the options of a stage. Replicas share torch's threads."""
    return RunOptions(
        scratch=checkpoint_dir,
        checkpoint_seconds=config.run.checkpoint_seconds,
        checkpoint_config=config.run.checkpoints,
        replicas=replicas,
        threads=threads_per_replica(replicas) if replicas > 1 else None,
        spike_guard=config.train.spike_guard,
        ema=config.train.ema,
        routing=config.train.routing,
        heartbeat_dir=heartbeat_dir,
        deterministic=config.train.deterministic,
    )


def run_stage(
    task: StageTask[Any],
    callback: StepCallback,
    checkpoint_dir: Path | None,
    log: Log,
    heartbeat_dir: Path | None,
    *,
    max_replicas: int = 1,
) -> None:
    """Train a stage, resuming from the newest checkpoint.

    Raises:
        CheckpointError: the checkpoint belongs to another job. ReplicaError: another replica failed.
    """
    replicas = choose_replicas(
        task.network,
        task.config,
        positions=task.steps * task.positions,
        length=task.row_length,
        max_replicas=max_replicas,
    )
    options = run_options(task.config, checkpoint_dir, replicas, heartbeat_dir)
    if replicas > 1:
        threads = f"{options.threads} {'thread' if options.threads == 1 else 'threads'} each"
        log(f"{replicas} replicas train, {threads}")
    task.apply_activation_budget(replicas)
    receiver = StepFunction(callback)
    receiver.on_start(task.steps)
    Trainer(task, options, receiver, log=log).fit()
