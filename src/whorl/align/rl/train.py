"""Reinforcement learning from verifiable rewards: the loop of `train/learner/loop.py` over records of rollouts.

    rollouts (answers to tasks, judged)  ->  experience (rows, advantages)  ->  an update  ->  weights on the board  ->  ...

Everything specific to an algorithm is a line of a table (`objectives/llm_policy.py`); what is here is the same for all:
who samples, who is compared with whom, which weights are asked again (a reference, the proximal policy), what is published.

In lock-step a record is sampled when the learner asks, with the weights that it has just published. With workers it is
sampled ahead, in processes of their own, by the same code: each id carries the version of the weights that drew it, what is
too old is made anew, and what is a little old is weighed by `objectives/advantages/importance.py`. A worker that is killed is started
again, with the board's newest weights and the learner's curriculum, and makes what it was at under the same number: a record
of rollouts follows from these, so in lock-step its bits are those of an undisturbed run.

Three log-probabilities have three names: `behaviour_log_prob`, of whoever sampled; `proximal_log_prob`, of the learner's
weights before the record's first step, from which a clipped ratio is measured; `log_prob`, of the weights that are learning.
In lock-step the first two are the same numbers up to rounding, and on every batch the metric `parity` says how far the
engine's word and the trainer's lie apart: if it grows, one of them is wrong, and nothing else needs to be suspected first.
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
    """Trains `network` on what `worker` samples, from the newest checkpoint if there is one.

    Args:
        worker: of the same shape as the network's model.
        reference: that the policy is kept near; needed where `config.kl.weight` is above 0.
        observe: called after each record with the metrics and what was learnt from; may raise `Stop`. Replicas wait for it,
            ten minutes at most.
        scratch: folder for checkpoints; None keeps none.

    Raises:
        ConfigError: a KL without a reference, PPO without a critic. ProducerError: a worker failed.
        ReplicaError: another replica failed. DivergedError: what is not finite. CheckpointError: the checkpoint is of other
        settings.

    A long stage on several cores starts replicas (`peers.py`): a script that calls this wants `if __name__ == "__main__":`.
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
    keeper = (
        CheckpointManager(checkpoint_dir, identity, seconds=config.checkpoint_seconds, log=log)
        if checkpoint_dir is not None
        else None
    )
    found = keeper.resume() if keeper is not None else None
    first, rounds, seconds = 0, 0, 0.0
    signals = RLState(config)
    if found is not None:
        first, rounds, seconds = found.step, found.metadata["rounds"], found.metadata["seconds"]
        worker.curriculum.load_state_dict(found.metadata["curriculum"])
        signals.load_state_dict(found.metadata["signals"])
        log(f"continues at step {first:,} of {config.steps:,}")
    positions, threads = (
        config.prompts_per_step * config.group_size * worker.max_seq_len,
        torch.get_num_threads(),
    )
    replicas = choose_rl_replicas(
        config, network, worker.max_seq_len, uses_reward_model=worker.reward_model is not None
    )
    shared = make_shared_state(network, config, positions=positions, replicas=replicas)
    if found is not None:
        restore(shared.tensors(), found.tensors)
    start = ResumePoint(first, rounds, seconds, signals)
    peers = ReplicaGroup()
    if replicas > 1:
        peers = ReplicaGroup(
            buffers=shared_rollout_buffers(config.prompts_per_step * config.group_size, worker.max_seq_len)
        )
        each = max(1, threads // replicas)
        log(f"{replicas} replicas sample and learn, {each} {'thread' if each == 1 else 'threads'} each")
        given = (peers.buffers, each, network, worker, config, reference, shared, start)
        peers.process_group = spawn_replicas(replicas, _replica_main, *given)
        torch.set_num_threads(each)
    try:
        _train_replica(peers, network, worker, config, reference, shared, start, callback, keeper, log)
    finally:
        worker.close()
        worker.join_group(ReplicaGroup())
        peers.process_group.close()
        torch.set_num_threads(threads)
    return network.eval()


@dataclass
class ResumePoint:
    """Where a run begins, or goes on: records and updates that were, seconds that they took, what goes on beside weights."""

    step: int
    updates: int
    seconds: float
    state: RLState


def _replica_main(world: ProcessGroup, columns: dict[str, Tensor], threads: int, *given: Any) -> None:
    """What the replicas beside the first do: the same, and nobody watches."""
    torch.set_num_threads(threads)
    worker: RolloutWorker = given[1]
    try:
        _train_replica(ReplicaGroup(world, columns), *given)
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
    observe: RolloutCallback = lambda step, metrics, experience: None,
    keeper: CheckpointManager | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """One replica's part of `train_policy`; alone, all of it."""
    worker.join_group(replicas)
    first, signals, rows = start.step, start.state, config.prompts_per_step * config.group_size
    learner = make_learner(
        network,
        policy_objective(config, network, signals),
        config,
        positions=rows * worker.max_seq_len,
        steps_done=start.updates,
        shared=shared,
        world=replicas.process_group,
    )
    # In lock-step the worker records into it. Workers ahead have copies of their own, and this one is of the records that
    # were read: what a checkpoint keeps, and what a worker that is started again begins with. It knows less than the copy
    # that died: nothing of the groups that others took the place of, nor of the records that were on their way.
    curriculum = worker.curriculum
    board = Board.from_tensors(network.merged_weights())
    board.publish(network.merged_weights(), first)
    ahead = config.async_rollout
    n = max(1, ahead.workers)
    # Where no record may be older than the weights there is nothing to be asked for ahead: one slot keeps them in order.
    each = 1 + ahead.prefetch if ahead.workers and ahead.max_policy_lag else 1
    spec = rollout_spec(config.prompts_per_step, config.group_size, worker.max_seq_len)
    ring: SlotRing[Rollouts] = SlotRing(spec, n * each)
    kind = _producer_class(config, say)
    workers = enumerate(assign_devices(worker, ahead, network.device))
    producers = [kind(ring, one, seed=config.seed, number=number, board=board) for number, one in workers]
    draining = FIFOReader(
        ring, producers, start=first, order="ready" if ahead.workers else "sequence",
        board=board, max_lag=ahead.max_policy_lag if ahead.workers else None,
    )  # fmt: skip
    began, newest = time.monotonic() - start.seconds, list[Experience]()

    def passes(slot: Slot[Rollouts]) -> Iterator[list[MicroBatch]]:
        experience = read_rollouts(slot)
        newest[:] = [experience]
        if config.async_rollout.workers:
            tried = experience.task.view(-1, config.group_size)[:, 0].tolist()
            for task, passed in zip(
                tried, experience.reward.view(-1, config.group_size).mean(1).clamp(0, 1).tolist(), strict=True
            ):
                curriculum.update(task, passed, config.group_size)
        return rollout_minibatches(
            config, network, reference, signals, experience, slot.sequence, board.version, replicas
        )

    def after(step: int, metrics: dict[str, float], clock: Stopwatch) -> None:
        spent = {f"time/{name}": s for name, s in clock.pop_seconds().items()}
        seen = signals.pop_metrics(replicas.process_group)  # each replica compared its own rows
        told = {**rollout_metrics(newest[0], config.group_size), **metrics, **seen, **spent}
        told |= {name: value for name, value in draining.pop_stats().metrics().items() if ahead.workers}
        told["time/total"] = time.monotonic() - began
        if keeper is not None and step < config.steps and keeper.due():
            record = {
                "rounds": learner.rounds,
                "seconds": told["time/total"],
                "curriculum": curriculum.state_dict(),
                "signals": signals.state_dict(),
            }
            keeper.save(step, learner.shared.tensors(), record)
        observe(step, told, newest[0])
        if replicas.process_group.rank or config.max_train_seconds is None:
            return  # one clock decides; the others hear of it when their links close
        if told["time/total"] > config.max_train_seconds:
            say(f"ends after {step:,} of {config.steps:,} steps: the time is up")
            raise StopTraining

    network.train()
    with keeper or nullcontext(), draining as records, suppress(StopTraining):
        train_loop(
            learner,
            records,
            passes,
            first=first,
            last=config.steps,
            lr_scale=lambda step: lr_scale(step, config.steps, config.schedule),
            sync_weights=lambda step: board.publish(network.merged_weights(), step),
            on_step_end=after,
        )


def _producer_class(config: RLConfig, say: Callable[[str], None]) -> Any:
    """What runs the workers."""
    if not config.async_rollout.workers:
        return SerialProducer
    if config.async_rollout.backend == "process":
        return partial(ProducerProcess, restarts=config.max_worker_restarts, log=say)
    from whorl.slots.ray import RayProducer, init_ray

    init_ray()
    options = {"num_gpus": 1} if config.async_rollout.device == "cuda" else None
    return partial(RayProducer, restarts=config.max_worker_restarts, log=say, options=options)


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
    """From a record to minibatches, each a list of micro-batches whose gradients are summed before a step.

    Args:
        number: of the record: what is random follows from it.
        version: of the weights that are about to learn.
        peers: with whom the rows of each minibatch are shared.
    """
    part = experience.batch
    groups = torch.arange(experience.rows) // config.group_size
    part["group"] = groups[:, None].expand_as(part["tokens"])
    stale = bool((part["version"][part["loss_mask"]] != version).any())
    if network.value is not None or stale or config.update_epochs * config.minibatches > 1:
        scored = _score_sharded(network, part, replicas, "")
        part["proximal_log_prob"] = scored["log_prob"]
        state.compare_log_probs(part, scored["log_prob"], version)
        if "value" in scored:
            part["old_value"] = scored["value"]
    else:  # one step: the log-probability that learns is the one before it
        state.expect_version(version)
    if reference is not None:
        part["reference_log_prob"] = _score_sharded(reference, part, replicas, "reference_")["log_prob"]
    part |= compute_advantages(config, experience, state)
    rng = generator(config.seed, "minibatches", record_index)
    for _ in range(config.update_epochs):
        order = torch.randperm(experience.rows, generator=rng)
        for chosen in order.tensor_split(config.minibatches):
            rows = replicas.shard_rows(sort_by_group({name: t[chosen] for name, t in part.items()}))
            yield list(micro_batches(rows, micro_batch_rows(config, rows)))


def _score_sharded(
    network: PolicyModel, part: MicroBatch, replicas: ReplicaGroup, prefix: str
) -> dict[str, Tensor]:
    """`network.score`, each replica of its rows."""
    if replicas.is_single:
        return network.score(part)
    n = len(part["tokens"])
    mine = (part["group"][:, 0] % replicas.process_group.size == replicas.process_group.rank).nonzero()[:, 0]
    own = network.score({name: t[mine] for name, t in part.items()})
    found = {name: torch.zeros(n, *t.shape[1:]) for name, t in own.items()}
    for name, t in own.items():
        found[name][mine] = t
    replicas.all_gather_rows({prefix + name: t for name, t in found.items()}, mine)
    return found
