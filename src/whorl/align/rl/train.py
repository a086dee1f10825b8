"""Reinforcement learning from verifiable rewards: the loop of `train/learner/loop.py` over rollout batches.

    rollouts (verified completions)  ->  experience (rows, advantages)  ->  update  ->  weights on the board  ->  ...

Algorithms differ only in a table (`objectives/llm_policy.py`). This file has the shared part: sampling, scoring under a
reference and under the proximal policy, and publishing weights.

In lockstep a rollout batch is sampled on demand with the weights just published. Asynchronous workers run the same
code in other processes. Each id records the version of its weights, rollouts that are too old are sampled again, and
the rest is corrected by `objectives/advantages/importance.py`. A killed worker is restarted with the board's newest
weights and the learner's curriculum, and repeats its rollout batch under the same number. In lockstep the bits are
those of an undisturbed run.

Three log-probabilities have three names. `behaviour_log_prob` comes from the weights that sampled. `proximal_log_prob`
comes from the learner's weights before the first step of the rollout batch; a clipped ratio is measured from it.
`log_prob` comes from the weights in training. In lockstep the first two agree up to rounding. The metrics
`logprob_diff_max` and `logprob_diff_mean` report the difference: if it grows, engine or trainer is wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whorl.align.config import RLConfig
from whorl.align.model.batch import micro_batches, sort_by_group
from whorl.align.model.policy_model import PolicyModel
from whorl.align.rl.advantages import RLState, check_method, compute_advantages, policy_objective
from whorl.align.rl.experience import Experience, read_rollouts, rollout_metrics
from whorl.align.rl.replicas import ReplicaGroup, choose_rl_replicas
from whorl.align.rl.rollout import (
    Rollouts,
    RolloutWorker,
    assign_devices,
    rollout_spec,
    shared_rollout_buffers,
)
from whorl.align.stage.trainer import make_learner, make_shared_state, micro_batch_rows
from whorl.parallel.process_group import ProcessGroup, spawn_replicas
from whorl.slots import Board, FIFOReader, ProducerProcess, SerialProducer, Slot, SlotRing
from whorl.tracking.seeds import generator
from whorl.train.checkpoint.format import restore
from whorl.train.checkpoint.manager import CheckpointManager
from whorl.train.learner.learner import SharedState
from whorl.train.learner.loop import StopTraining, Stopwatch, train_loop
from whorl.train.learner.update import MicroBatch
from whorl.train.optim.lr_schedule import lr_scale

RolloutCallback = Callable[[int, dict[str, float], Experience], None]


def train_policy(
    network: PolicyModel,
    worker: RolloutWorker,
    config: RLConfig,
    *,
    reference: PolicyModel | None = None,
    callback: RolloutCallback = lambda step, metrics, experience: None,
    checkpoint_dir: Path | None = None,
    log: Callable[[str], None] = lambda text: None,
) -> PolicyModel:
    """Train `network` on rollouts of `worker` and return it; resumes from the newest checkpoint.

    Args:
        worker: of the same shape as the network's model.
        reference: of the KL; needed if `config.kl.coef` is above 0.
        callback: called after each rollout batch with metrics and experience; may raise `StopTraining`. Replicas wait
            for it for at most ten minutes.
        checkpoint_dir: folder of checkpoints; None keeps none.

    Raises:
        ConfigError: a KL without a reference, or PPO without a critic.
        ProducerError: a worker failed. ReplicaError: another replica failed.
        DivergedError: a value is not finite. CheckpointError: the checkpoint has other settings.

    A long stage on several cores starts replicas (`rl/replicas.py`), so a calling script needs `if __name__ ==
    "__main__":`.
    """
    check_method(config, network, reference)
    identity = {
        "stage": "rl",
        "config": config.model_dump(
            mode="json",
            exclude={"checkpoint_seconds", "max_train_seconds", "max_worker_restarts", "replicas"},
        ),
        "tasks": len(worker.tasks),
    }
    checkpoints = (
        CheckpointManager(checkpoint_dir, identity, seconds=config.checkpoint_seconds, log=log)
        if checkpoint_dir is not None
        else None
    )
    checkpoint = checkpoints.resume() if checkpoints is not None else None
    first, updates, seconds = 0, 0, 0.0
    state = RLState(config)
    if checkpoint is not None:
        first, updates, seconds = (
            checkpoint.step,
            checkpoint.metadata["rounds"],
            checkpoint.metadata["seconds"],
        )
        worker.curriculum.load_state_dict(checkpoint.metadata["curriculum"])
        state.load_state_dict(checkpoint.metadata["signals"])
        log(f"continues at step {first:,} of {config.steps:,}")
    positions, threads = (
        config.prompts_per_step * config.group_size * worker.max_seq_len,
        torch.get_num_threads(),
    )
    replicas = choose_rl_replicas(
        config, network, worker.max_seq_len, uses_reward_model=worker.reward_model is not None
    )
    shared = make_shared_state(network, config, positions=positions, replicas=replicas)
    if checkpoint is not None:
        restore(shared.tensors(), checkpoint.tensors)
    start = ResumePoint(first, updates, seconds, state)
    replica_group = ReplicaGroup()
    if replicas > 1:
        replica_group = ReplicaGroup(
            buffers=shared_rollout_buffers(config.prompts_per_step * config.group_size, worker.max_seq_len)
        )
        threads_each = max(1, threads // replicas)
        log(
            f"{replicas} replicas sample and train, {threads_each} {'thread' if threads_each == 1 else 'threads'} each"
        )
        replica_args = (
            replica_group.buffers,
            threads_each,
            network,
            worker,
            config,
            reference,
            shared,
            start,
        )
        replica_group.process_group = spawn_replicas(replicas, _replica_main, *replica_args)
        torch.set_num_threads(threads_each)
    try:
        _train_replica(
            replica_group, network, worker, config, reference, shared, start, callback, checkpoints, log
        )
    finally:
        worker.close()
        worker.join_group(ReplicaGroup())
        replica_group.process_group.close()
        torch.set_num_threads(threads)
    return network.eval()


@dataclass
class ResumePoint:
    """Where a run starts or resumes: steps and updates done, seconds used, and further state."""

    step: int
    updates: int
    seconds: float
    state: RLState


def _replica_main(
    process_group: ProcessGroup, buffers: dict[str, Tensor], threads: int, *replica_args: Any
) -> None:
    """Run the replicas other than the first."""
    torch.set_num_threads(threads)
    worker: RolloutWorker = replica_args[1]
    try:
        _train_replica(ReplicaGroup(process_group, buffers), *replica_args)
    finally:
        worker.close()


def _train_replica(
    replicas: ReplicaGroup,
    network: PolicyModel,
    worker: RolloutWorker,
    config: RLConfig,
    reference: PolicyModel | None,
    shared: SharedState,
    start: ResumePoint,
    callback: RolloutCallback = lambda step, metrics, experience: None,
    checkpoints: CheckpointManager | None = None,
    log: Callable[[str], None] = lambda text: None,
) -> None:
    """Run one replica's part of `train_policy`; a single replica runs all of it."""
    worker.join_group(replicas)
    first, state, rows = start.step, start.state, config.prompts_per_step * config.group_size
    learner = make_learner(
        network,
        policy_objective(config, network, state),
        config,
        positions=rows * worker.max_seq_len,
        steps_done=start.updates,
        shared=shared,
        world=replicas.process_group,
    )
    # In lockstep the worker updates this curriculum. Asynchronous workers have copies, and this one covers the rollouts that
    # were read. A checkpoint keeps it, and a restarted worker starts from it. Compared with the lost copy it lacks
    # the replaced groups and the rollouts in flight.
    curriculum = worker.curriculum
    board = Board.from_tensors(network.merged_weights())
    board.publish(network.merged_weights(), first)
    reader = _rollout_reader(config, worker, network, board, first, log)
    started, latest = time.monotonic() - start.seconds, list[Experience]()

    def minibatches(slot: Slot[Rollouts]) -> Iterator[list[MicroBatch]]:
        experience = read_rollouts(slot)
        latest[:] = [experience]
        if config.async_rollout.workers:
            tried = experience.task.view(-1, config.group_size)[:, 0].tolist()
            for task, passed in zip(
                tried, experience.reward.view(-1, config.group_size).mean(1).clamp(0, 1).tolist(), strict=True
            ):
                curriculum.update(task, passed, config.group_size)
        return rollout_minibatches(
            config, network, reference, state, experience, slot.sequence, board.version, replicas
        )

    def on_step_end(step: int, metrics: dict[str, float], clock: Stopwatch) -> None:
        seconds = {f"time/{name}": s for name, s in clock.pop_seconds().items()}
        state_metrics = state.pop_metrics(replicas.process_group)  # each replica compared its own rows
        step_metrics = {
            **rollout_metrics(latest[0], config.group_size),
            **metrics,
            **state_metrics,
            **seconds,
        }
        reader_metrics = reader.pop_stats().metrics()
        step_metrics |= reader_metrics if config.async_rollout.workers else {}
        step_metrics["time/total"] = time.monotonic() - started
        if checkpoints is not None and step < config.steps and checkpoints.due():
            metadata = {
                "rounds": learner.rounds,
                "seconds": step_metrics["time/total"],
                "curriculum": curriculum.state_dict(),
                "signals": state.state_dict(),
            }
            checkpoints.save(step, learner.shared.tensors(), metadata)
        callback(step, step_metrics, latest[0])
        if replicas.process_group.rank or config.max_train_seconds is None:
            return  # rank 0 decides on time; the other ranks end when their pipes close
        if step_metrics["time/total"] > config.max_train_seconds:
            log(f"ends after {step:,} of {config.steps:,} steps: max_train_seconds is reached")
            raise StopTraining

    network.train()
    with checkpoints or nullcontext(), reader as records, suppress(StopTraining):
        train_loop(
            learner,
            records,
            minibatches,
            first=first,
            last=config.steps,
            lr_scale=lambda step: lr_scale(step, config.steps, config.schedule),
            sync_weights=lambda step: board.publish(network.merged_weights(), step),
            on_step_end=on_step_end,
        )


def _rollout_reader(
    config: RLConfig,
    worker: RolloutWorker,
    network: PolicyModel,
    board: Board,
    first: int,
    log: Callable[[str], None],
) -> FIFOReader[Rollouts]:
    """Return the reader of rollout batches `first` and later, with its slots and workers."""
    async_config = config.async_rollout
    # If no rollout may be older than the weights, nothing can be sampled ahead: one slot keeps the order.
    ahead = async_config.workers and async_config.max_policy_lag
    n_slots = max(1, async_config.workers) * (1 + async_config.prefetch if ahead else 1)
    spec = rollout_spec(config.prompts_per_step, config.group_size, worker.max_seq_len)
    ring: SlotRing[Rollouts] = SlotRing(spec, n_slots)
    producer_class = _producer_class(config, log)
    producers = [
        producer_class(ring, one, seed=config.seed, number=number, board=board)
        for number, one in enumerate(assign_devices(worker, async_config, network.device))
    ]
    return FIFOReader(
        ring,
        producers,
        start=first,
        order="ready" if async_config.workers else "sequence",
        board=board,
        max_lag=async_config.max_policy_lag if async_config.workers else None,
    )


def _producer_class(config: RLConfig, log: Callable[[str], None]) -> Any:
    """Return the class that runs the workers."""
    if not config.async_rollout.workers:
        return SerialProducer
    if config.async_rollout.backend == "process":
        return partial(ProducerProcess, restarts=config.max_worker_restarts, log=log)
    from whorl.slots.ray import RayProducer, init_ray

    init_ray()
    options = {"num_gpus": 1} if config.async_rollout.device == "cuda" else None
    return partial(RayProducer, restarts=config.max_worker_restarts, log=log, options=options)


def rollout_minibatches(
    config: RLConfig,
    network: PolicyModel,
    reference: PolicyModel | None,
    state: RLState,
    experience: Experience,
    record_index: int,
    version: int,
    replicas: ReplicaGroup,
) -> Iterator[list[MicroBatch]]:
    """Yield the minibatches of a rollout batch, each a list of micro-batches whose gradients are summed before a step.

    Args:
        record_index: of the rollout batch; seeds the order of rows.
        version: of the weights before the first step.
        replicas: the rows of each minibatch are sharded over them.
    """
    batch = experience.batch
    groups = torch.arange(experience.rows) // config.group_size
    batch["group"] = groups[:, None].expand_as(batch["tokens"])
    stale = bool((batch["version"][batch["loss_mask"]] != version).any())
    if network.value is not None or stale or config.update_epochs * config.minibatches > 1:
        scored = _score_sharded(network, batch, replicas, "")
        batch["proximal_log_prob"] = scored["log_prob"]
        state.compare_log_probs(batch, scored["log_prob"], version)
        if "value" in scored:
            batch["old_value"] = scored["value"]
    else:  # one step: log_prob is the proximal one
        state.expect_version(version)
    if reference is not None:
        batch["reference_log_prob"] = _score_sharded(reference, batch, replicas, "reference_")["log_prob"]
    batch |= compute_advantages(config, experience, state)
    rng = generator(config.seed, "minibatches", record_index)
    for _ in range(config.update_epochs):
        order = torch.randperm(experience.rows, generator=rng)
        for chosen in order.tensor_split(config.minibatches):
            rows = replicas.shard_rows(sort_by_group({name: t[chosen] for name, t in batch.items()}))
            yield list(micro_batches(rows, micro_batch_rows(config, rows)))


def _score_sharded(
    network: PolicyModel, batch: MicroBatch, replicas: ReplicaGroup, prefix: str
) -> dict[str, Tensor]:
    """Return `network.score` of all rows; each replica computes its share."""
    if replicas.is_single:
        return network.score(batch)
    n = len(batch["tokens"])
    own_rows = (batch["group"][:, 0] % replicas.process_group.size == replicas.process_group.rank).nonzero()[
        :, 0
    ]
    own_scores = network.score({name: t[own_rows] for name, t in batch.items()})
    scores = {name: torch.zeros(n, *t.shape[1:]) for name, t in own_scores.items()}
    for name, t in own_scores.items():
        scores[name][own_rows] = t
    replicas.all_gather_rows({prefix + name: t for name, t in scores.items()}, own_rows)
    return scores
