"""The loop of stages over a data set, shared by fine-tuning, preferences, reward models and distillation.

    batches      micro-batches of each step, by step number alone
    precompute   computed once before the first step, such as reference log-probabilities
    resume       from the newest checkpoint, with the bits of an undisturbed run

Replicas train on shards of every step's batch: the operations of a small model are too short to be split over cores
(`parallel/process_group.py`). A batch follows from the step number, so each replica builds it and no rows are sent.

The subtle point is `precompute`. The reference is the network before its first step, which is gone after a restart. A
resumed run must train against the same values, bit for bit. So they are part of every checkpoint and are computed only
where there is no checkpoint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whorl.align.config import StageConfig
from whorl.align.model.example import TokenizedExample
from whorl.align.model.policy_model import PolicyModel
from whorl.objectives.next_token import Loss
from whorl.parallel.process_group import ProcessGroup, spawn_replicas
from whorl.train.checkpoint.format import restore
from whorl.train.checkpoint.manager import CheckpointManager
from whorl.train.config import RoutingConfig
from whorl.train.learner.learner import Learner, SharedState
from whorl.train.learner.loop import Stopwatch, train_loop
from whorl.train.learner.loss_scaler import LossScaler
from whorl.train.learner.update import MicroBatch, Update
from whorl.train.lm.precision import muon_dtype
from whorl.train.metrics.moe_balance import MoEBalancer
from whorl.train.optim.lr_schedule import lr_scale

StepCallback = Callable[[int, dict[str, float]], None]
PRECOMPUTED_PREFIX = "once/"
Precomputed = Mapping[str, Tensor]
MIN_REPLICA_FLOPS = 1e13  # FLOPs of a stage, about half a minute; starting processes for less does not pay
MAX_REPLICA_PARAMS = (
    5e7  # parameters; above, operations are long enough to be split, and extra engines cost memory
)


def choose_replicas(
    network: PolicyModel, requested: int | None, *, positions: float, length: int, max_replicas: int
) -> int:
    """Return the number of replicas: `requested`, or by default one per thread where that pays; at most `max_replicas`.

    positions: of the whole stage, in rows of `length`. The result is 1 where the model is not on the CPU.
    """
    if network.device.type != "cpu":
        return 1
    if requested is not None:
        return min(requested, max_replicas)
    small = sum(p.numel() for p in network.model.parameters()) <= MAX_REPLICA_PARAMS
    if not small or network.model.flops_per_token(length) * positions < MIN_REPLICA_FLOPS:
        return 1
    return max(1, min(torch.get_num_threads(), max_replicas))


def make_moe_balancer(network: PolicyModel, world: ProcessGroup | None = None) -> MoEBalancer:
    """Return the load balancer of the network's experts over all replicas; empty without experts."""
    return MoEBalancer(network.model, RoutingConfig(), world or ProcessGroup())


def make_learner(
    network: PolicyModel,
    objective: Callable[[MicroBatch], Loss],
    config: StageConfig,
    *,
    positions: int,
    steps_done: int = 0,
    shared: SharedState | None = None,
    world: ProcessGroup | None = None,
) -> Learner:
    """Return a learner with one update of all trained parameters, with pretraining's optimizers at scaled rates.

    objective: of a micro-batch on the network's device; it is moved there (`PolicyModel.to_device`).
    positions: of a step, at most; bounds the rows of embedding tables that a step can touch. shared, world: of
    replicas.
    """
    optim = config.optim()
    param_optims = network.param_optims(optim)
    update = Update(
        lambda part: objective(network.to_device(part)),
        param_optims,
        clip_norm=optim.clip_norm,
        momentum=optim.momentum,
        muon_every=optim.muon_every,
        betas=(0.8, 0.95),
        eps=1e-10,
        loss_scaler=LossScaler() if network.model.dtype == torch.float16 else None,
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
    return max(1, config.micro_batch_tokens // batch["tokens"].shape[1])


def dataset_fingerprint(examples: Sequence[TokenizedExample]) -> str:
    """Return a hash of all ids and loss masks, in order."""
    digest = hashlib.blake2b(digest_size=16)
    for example in examples:
        digest.update(example.ids.tobytes() + example.loss_mask.tobytes() + b"|")
    return digest.hexdigest()


def run_stage(
    network: PolicyModel,
    config: StageConfig,
    objective: Callable[[MicroBatch], Loss],
    batches: Callable[[int, Precomputed], Iterator[Sequence[MicroBatch]]],
    *,
    identity: Mapping[str, Any],
    steps: int,
    positions: int,
    precompute: Callable[[], dict[str, Tensor]] = dict,
    callback: StepCallback = lambda step, metrics: None,
    may_save: Callable[[int], bool] = lambda step: True,
    checkpoint_dir: Path | None = None,
    log: Callable[[str], None] = lambda text: None,
    replicas: int = 1,
    replica: Callable[..., None] | None = None,
    world: ProcessGroup | None = None,
) -> None:
    """Train `network` for `steps` steps, resuming from the newest checkpoint.

    Args:
        batches: (first step, precomputed tensors) -> iterator over the micro-batches of each step.
        identity: JSON that must match the checkpoint's.
        positions: of a step, at most.
        precompute: called before the first step, with the initial weights.
        callback: called after each step with the means of all metrics and with seconds by activity.
        may_save: whether a run may resume after that many steps.
        checkpoint_dir: folder of checkpoints; None keeps none.
        replicas: number of processes, including this one; each builds its part of a step.
        replica: entry point of the others, called as `replica(world, first, shared, precomputed)`. It must call
            `train_replica`. Pickled.
        world: process group, completed here.

    Raises:
        CheckpointError: the checkpoint belongs to another job. ReplicaError: another replica failed.
    """
    seconds = config.checkpoint_seconds
    checkpoints = (
        CheckpointManager(checkpoint_dir, dict(identity), seconds=seconds, log=log)
        if checkpoint_dir is not None
        else None
    )
    checkpoint = checkpoints.resume() if checkpoints is not None else None
    first = checkpoint.step if checkpoint is not None else 0
    if checkpoint is None:
        network.eval()
        precomputed = precompute()
    else:
        precomputed = {
            n[len(PRECOMPUTED_PREFIX) :]: t.clone()
            for n, t in checkpoint.tensors.items()
            if n.startswith(PRECOMPUTED_PREFIX)
        }
    shared = make_shared_state(network, config, positions=positions, replicas=replicas)
    if checkpoint is not None:
        restore(
            shared.tensors(),
            {n: t for n, t in checkpoint.tensors.items() if not n.startswith(PRECOMPUTED_PREFIX)},
        )
        log(f"continues at step {first:,} of {steps:,}")

    def on_step_end(done: int, metrics: dict[str, float], clock: Stopwatch) -> None:
        time_metrics = {f"time/{name}": s for name, s in clock.pop_seconds().items()}
        callback(done, {**metrics, **time_metrics})
        if checkpoints is not None and done < steps and may_save(done) and checkpoints.due():
            checkpoints.save(
                done, {**shared.tensors(), **{PRECOMPUTED_PREFIX + n: t for n, t in precomputed.items()}}
            )

    threads, world = torch.get_num_threads(), world or ProcessGroup()
    if replicas > 1 and replica is not None:
        threads_each = max(1, threads // replicas)
        log(f"{replicas} replicas train, {threads_each} {'thread' if threads_each == 1 else 'threads'} each")
        started = spawn_replicas(replicas, _replica_main, replica, threads_each, first, shared, precomputed)
        world.size, world.pipes, world.children = started.size, started.pipes, started.children
        torch.set_num_threads(threads_each)
    try:
        with checkpoints or nullcontext():
            train_replica(
                world, network, config, objective, batches(first, precomputed), shared,
                positions=positions, first=first, steps=steps, on_step_end=on_step_end,
            )  # fmt: skip
    finally:
        world.close()
        torch.set_num_threads(threads)
    network.eval()


def _replica_main(
    world: ProcessGroup, replica: Callable[..., None], threads: int, *replica_args: Any
) -> None:
    torch.set_num_threads(threads)
    replica(world, *replica_args)


def train_replica(
    world: ProcessGroup,
    network: PolicyModel,
    config: StageConfig,
    objective: Callable[[MicroBatch], Loss],
    batches: Iterator[Sequence[MicroBatch]],
    shared: SharedState,
    *,
    positions: int,
    first: int,
    steps: int,
    on_step_end: Callable[[int, dict[str, float], Stopwatch], None] = lambda step, metrics, clock: None,
) -> None:
    """Run the steps from `first` on for this replica. Arguments as in `run_stage`."""
    learner = make_learner(
        network, objective, config, positions=positions, steps_done=first, shared=shared, world=world
    )
    network.train()
    train_loop(
        learner,
        batches,
        lambda parts: [parts],
        first=first,
        last=steps,
        lr_scale=lambda step: lr_scale(step, steps, config.schedule),
        on_step_end=on_step_end,
    )
