"""A stage that goes through a data set: what fine-tuning, preferences and reward models share beside their objectives.

    batches   the micro-batches of each step, by its number alone
    once      what is computed before the first step and kept: a reference's word on every text
    resume    from the newest checkpoint, to the bits of a run that was not killed

Replicas, where a stage can start them, take every step's batch together, each its rows of it: a small model's operations are
too short to be split over cores (`parallel/process_group.py`). What is in a batch follows from the step's number, so all make the same
one, and nobody sends rows.

`once` is the subtle part. A reference is the network as it was before its first step, so after a kill nobody could ask it
again without loading it anew; and what a checkpoint was trained against must be what goes on to be used, bit for bit. So
what `once` made is part of every checkpoint, and is made only where there is none.
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
from whorl.train.learner.learner import Learner, SharedState
from whorl.train.learner.loop import Stopwatch, train_loop
from whorl.train.learner.loss_scaler import LossScaler
from whorl.train.learner.update import MicroBatch, Update
from whorl.train.lm.precision import muon_dtype
from whorl.train.optim.lr_schedule import lr_scale

StepCallback = Callable[[int, dict[str, float]], None]
PRECOMPUTED_PREFIX = "once/"
Precomputed = Mapping[str, Tensor]
MIN_REPLICA_FLOPS = (
    1e13  # operations of a whole stage, about half a minute: below, starting processes does not pay
)
MAX_REPLICA_PARAMS = (
    5e7  # parameters: above, operations are long enough to be split, and engines of their own cost memory
)


def choose_replicas(
    network: PolicyModel, requested: int | None, *, positions: float, length: int, max_replicas: int
) -> int:
    """How many replicas a stage takes: what is asked for, or by default one a thread where that pays; `most` at most.

    positions: that the whole stage learns from, in rows of `length`. Always one where the model is not on the CPU.
    """
    if network.device.type != "cpu":
        return 1
    if requested is not None:
        return min(requested, max_replicas)
    small = sum(p.numel() for p in network.model.parameters()) <= MAX_REPLICA_PARAMS
    if not small or network.model.flops_per_token(length) * positions < MIN_REPLICA_FLOPS:
        return 1
    return max(1, min(torch.get_num_threads(), max_replicas))


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
    """One update of all that `network` trains, by pretraining's optimisers at a share of their rates.

    objective: of a micro-batch that lies where the network does; here it is brought there (`Network.here`).
    positions: of a step, at most: how often a table may be looked into; shared, world: of replicas.
    """
    optim = config.optim()
    treatments = network.param_optims(optim)
    update = Update(
        lambda part: objective(network.to_device(part)),
        treatments,
        clip_norm=optim.clip_norm,
        momentum=optim.momentum,
        muon_every=optim.muon_every,
        betas=(0.8, 0.95),
        eps=1e-10,
        loss_scaler=LossScaler() if network.model.dtype == torch.float16 else None,
    )
    kind = muon_dtype(network.model.dtype)
    shared = shared or make_shared_state(network, config, positions=positions)
    return Learner(network, [update], shared, world, dtype=kind, steps_done=steps_done)


def make_shared_state(
    network: PolicyModel, config: StageConfig, *, positions: int, replicas: int = 1
) -> SharedState:
    """Weights, gradients and moments of a stage's learner, of any number of replicas."""
    treatments = network.param_optims(config.optim())
    return SharedState.allocate(network, treatments, replicas, max_rows=positions, contiguous=replicas == 1)


def micro_batch_rows(config: StageConfig, batch: MicroBatch) -> int:
    """Rows of a forward with gradients."""
    return max(1, config.micro_batch_tokens // batch["tokens"].shape[1])


def dataset_fingerprint(examples: Sequence[TokenizedExample]) -> str:
    """Of ids and masks, in their order."""
    digest = hashlib.blake2b(digest_size=16)
    for text in examples:
        digest.update(text.ids.tobytes() + text.loss_mask.tobytes() + b"|")
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
    """Trains `network` for `steps` steps, from the newest checkpoint if there is one.

    Args:
        batches: from a step's number and what `once` made to the micro-batches of that step and all after it.
        identity: JSON of what must be the same for a checkpoint to fit.
        positions: of a step, at most.
        once: called before the first step, with the weights as they were given.
        observe: told after each step the means of all metrics, and seconds by what they were spent on.
        may_save: whether a run may go on from behind that many steps.
        scratch: folder for checkpoints; None keeps none.
        replicas: processes that learn, this one among them; each asks its own `batches` for its part of a step.
        replica: what the others do, called as `replica(world, first, shared, kept)`: it ends in `take_part`. Pickled.
        world: this process's place among them, which is filled in here.

    Raises:
        CheckpointError: the checkpoint is of another job. ReplicaError: another replica failed.
    """
    seconds = config.checkpoint_seconds
    keeper = (
        CheckpointManager(checkpoint_dir, dict(identity), seconds=seconds, log=log)
        if checkpoint_dir is not None
        else None
    )
    found = keeper.resume() if keeper is not None else None
    first = found.step if found is not None else 0
    if found is None:
        network.eval()
        kept = precompute()
    else:
        kept = {
            n[len(PRECOMPUTED_PREFIX) :]: t.clone()
            for n, t in found.tensors.items()
            if n.startswith(PRECOMPUTED_PREFIX)
        }
    shared = make_shared_state(network, config, positions=positions, replicas=replicas)
    if found is not None:
        restore(
            shared.tensors(), {n: t for n, t in found.tensors.items() if not n.startswith(PRECOMPUTED_PREFIX)}
        )
        log(f"continues at step {first:,} of {steps:,}")

    def after(done: int, metrics: dict[str, float], clock: Stopwatch) -> None:
        spent = {f"time/{name}": s for name, s in clock.pop_seconds().items()}
        callback(done, {**metrics, **spent})
        if keeper is not None and done < steps and may_save(done) and keeper.due():
            keeper.save(done, {**shared.tensors(), **{PRECOMPUTED_PREFIX + n: t for n, t in kept.items()}})

    threads, world = torch.get_num_threads(), world or ProcessGroup()
    if replicas > 1 and replica is not None:
        each = max(1, threads // replicas)
        log(f"{replicas} replicas learn, {each} {'thread' if each == 1 else 'threads'} each")
        started = spawn_replicas(replicas, _replica_main, replica, each, first, shared, kept)
        world.size, world.pipes, world.children = started.size, started.pipes, started.children
        torch.set_num_threads(each)
    try:
        with keeper or nullcontext():
            train_replica(
                world, network, config, objective, batches(first, kept), shared,
                positions=positions, first=first, steps=steps, on_step_end=after,
            )  # fmt: skip
    finally:
        world.close()
        torch.set_num_threads(threads)
    network.eval()


def _replica_main(world: ProcessGroup, replica: Callable[..., None], threads: int, *given: Any) -> None:
    torch.set_num_threads(threads)
    replica(world, *given)


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
    """The steps from `first` on, by this replica; alone, all of them. Arguments as in `run_stage`."""
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
