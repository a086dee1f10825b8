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
`logprob_diff_max` and `logprob_diff_mean` report the difference: if it grows, engine or trainer is wrong. While the mean
is within `rollout.max_logprob_diff`, `behaviour_log_prob` of fresh rollouts serves as the proximal one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whorl.align.model.batch import micro_batches, sort_by_group
from whorl.align.model.policy_model import MIN_TIMED_FLOPS, PolicyModel
from whorl.align.rl.advantages import (
    RLState,
    check_method,
    compute_advantages,
    policy_loss_of,
    trained_rows,
)
from whorl.align.rl.config import RLConfig
from whorl.align.rl.experience import Experience, read_rollouts, rollout_metrics
from whorl.align.rl.replicas import ReplicaGroup, choose_rl_replicas, flops_within
from whorl.align.rl.rollout import (
    Rollouts,
    RolloutWorker,
    assign_devices,
    rollout_spec,
    shared_rollout_buffers,
)
from whorl.align.stage.task import Log, StageTask, micro_batch_rows, run_options
from whorl.objectives.next_token import Loss
from whorl.slots import Board, FIFOReader, ProducerProcess, SerialProducer, Slot, SlotRing
from whorl.tracking.seeds import generator
from whorl.train.learner.learner import Learner
from whorl.train.learner.loop import StopTraining, Stopwatch
from whorl.train.learner.update import MicroBatch
from whorl.train.trainer import StepFunction, Trainer

RolloutCallback = Callable[[int, dict[str, float], Experience], None]


def train_policy(
    network: PolicyModel,
    worker: RolloutWorker,
    config: RLConfig,
    *,
    reference: PolicyModel | None = None,
    callback: RolloutCallback = lambda step, metrics, experience: None,
    checkpoint_dir: Path | None = None,
    log: Log = lambda text: None,
    heartbeat_dir: Path | None = None,
) -> PolicyModel:
    """Train `network` on rollouts of `worker` and return it; resumes from the newest checkpoint.

    Args:
        worker: of the same shape as the network's model.
        reference: of the KL; needed if `config.kl.coef` is above 0.
        callback: called after each rollout batch with metrics and experience; may raise `StopTraining`. Replicas wait
            for it for at most ten minutes.
        checkpoint_dir, heartbeat_dir: folders of checkpoints and of the heartbeat; None for neither.

    Raises:
        ConfigError: a KL without a reference, or PPO without a critic.
        ProducerError: a worker failed. ReplicaError: another replica failed.
        DivergedError: a value is not finite. CheckpointError: the checkpoint has other settings.

    A long stage on several cores starts replicas (`rl/replicas.py`), so a calling script needs `if __name__ ==
    "__main__":`.
    """
    task = PolicyTask(network, worker, config, reference)
    replicas = choose_rl_replicas(
        config, network, worker.max_seq_len, uses_reward_model=worker.reward_model is not None
    )
    task.share_buffers(replicas)
    task.apply_activation_budget(replicas)
    options = run_options(config, checkpoint_dir, replicas, heartbeat_dir)
    if replicas > 1:
        threads = f"{options.threads} {'thread' if options.threads == 1 else 'threads'} each"
        log(f"{replicas} replicas sample and train, {threads}")

    def on_step(step: int, metrics: dict[str, float]) -> None:
        callback(step, metrics, task.experience)
        if config.run.max_train_seconds is not None and metrics["time/total"] > config.run.max_train_seconds:
            log(f"ends after {step:,} of {config.steps:,} steps: max_train_seconds is reached")
            raise StopTraining  # the other ranks end when their pipes close

    Trainer(task, options, StepFunction(on_step, callback), log=log).fit()
    return network


class PolicyTask(StageTask[Slot[Rollouts]]):
    """Policy optimization: a record is a rollout batch, sampled with the weights on the board."""

    name = "rl"
    config: RLConfig

    def __init__(
        self,
        network: PolicyModel,
        worker: RolloutWorker,
        config: RLConfig,
        reference: PolicyModel | None = None,
    ) -> None:
        check_method(config, network, reference)
        rows = config.prompts_per_step * config.group_size
        super().__init__(
            network,
            config,
            steps=config.steps,
            positions=rows * worker.max_seq_len,
            rows=rows,
            row_length=worker.max_seq_len,
        )
        self.worker, self.reference, self.state = worker, reference, RLState(config)
        worker.rollout, worker.deterministic = config.rollout, config.train.deterministic
        if config.rollout.dtype == "auto" and (self.flops < MIN_TIMED_FLOPS or config.train.deterministic):
            worker.rollout = config.rollout.model_copy(update={"dtype": "model"})
        self.rollout_dtype = worker.dtype  # of the last rollout batch
        self.updates_per_step = config.update.epochs * config.update.minibatches
        self.buffers: dict[str, Tensor] = {}
        self.seconds = 0.0  # of training before this start
        if self.updates_per_step > 1:  # after the first update a backward cannot be repeated
            self.interruptible = ("data",)

    @property
    def identity(self) -> dict[str, Any]:
        return {"stage": self.name, "config": self.settings(), "tasks": len(self.worker.tasks)}

    @property
    def flops(self) -> float:
        """As of every stage; of a stage with `max_train_seconds` at most what this machine computes in that time."""
        limit = self.config.run.max_train_seconds
        return super().flops if limit is None else min(super().flops, flops_within(limit))

    def share_buffers(self, replicas: int) -> None:
        """Allocate the memory in which replicas gather their rows."""
        if replicas > 1:
            self.buffers = shared_rollout_buffers(self.rows, self.worker.max_seq_len)

    def make_learner(self, trainer: Trainer[Slot[Rollouts]]) -> Learner:
        self.replicas = ReplicaGroup(trainer.group, self.buffers)
        self.worker.join_group(self.replicas)
        learner = super().make_learner(trainer)
        self.board = Board.from_tensors(self.network.merged_weights())
        self.sync_weights(trainer.steps_done)
        return learner

    def close(self) -> None:
        self.worker.close()
        self.worker.join_group(ReplicaGroup())

    def objective(self, batch: MicroBatch) -> Loss:
        return policy_loss_of(self.config, self.network, self.state, batch)

    def batches(self, first: int) -> AbstractContextManager[Iterator[Slot[Rollouts]]]:
        self.reader = _rollout_reader(
            self.config, self.worker, self.network, self.board, first, self.trainer.log
        )
        self.started = time.monotonic() - self.seconds
        return self.reader

    def minibatches(self, record: Slot[Rollouts]) -> Iterator[list[MicroBatch]]:
        config, experience = self.config, read_rollouts(record)
        self.experience = experience
        self._log_dtype(experience)
        # In lockstep the worker updates this curriculum. Asynchronous workers have copies, and this one covers the
        # rollouts that were read. A checkpoint keeps it, and a restarted worker starts from it. Compared with the lost
        # copy it lacks the replaced groups and the rollouts in flight.
        if config.async_rollout.workers:
            tried = experience.task.view(-1, config.group_size)[:, 0].tolist()
            for task, passed in zip(
                tried, experience.reward.view(-1, config.group_size).mean(1).clamp(0, 1).tolist(), strict=True
            ):
                self.worker.curriculum.update(task, passed, config.group_size)
        return rollout_minibatches(
            config,
            self.network,
            self.reference,
            self.state,
            experience,
            record.sequence,
            self.board.version,
            self.replicas,
        )

    def _log_dtype(self, experience: Experience) -> None:
        """Log a change of the sampler's type."""
        bound = self.config.rollout.bound(self.worker.dtype)
        if experience.dtype != self.rollout_dtype:
            self.trainer.log(f"rollouts are sampled with {experience.dtype} weights")
        if experience.dtype_difference > bound:
            self.trainer.log(
                f"rollouts are sampled with {self.worker.dtype} weights from now on: log-probabilities with "
                f"{experience.dtype} differ from the learner's by {experience.dtype_difference:.2g} nats on average, more "
                f"than rollout.max_logprob_diff ({bound:g})"
            )
        self.rollout_dtype = experience.dtype if experience.dtype_difference <= bound else self.worker.dtype

    def sync_weights(self, steps_done: int) -> None:
        self.board.publish(self.network.merged_weights(), steps_done)

    def report(self, steps_done: int, metrics: dict[str, float], clock: Stopwatch) -> dict[str, float] | None:
        rollouts = rollout_metrics(
            self.experience, self.config.group_size, multi_turn=self.config.environment is not None
        )
        state = self.state.pop_metrics(self.replicas.process_group)  # each replica compared its own rows
        found = super().report(steps_done, {**rollouts, **metrics, **state}, clock) or {}
        stats = self.reader.pop_stats().metrics()
        found |= stats if self.config.async_rollout.workers else {}
        self.seconds = time.monotonic() - self.started
        return {**found, "time/total": self.seconds}

    def state_dict(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "curriculum": self.worker.curriculum.state_dict(),
            "signals": self.state.state_dict(),
            "rollout_dtype": self.worker.rollout_dtype,
        }

    def load_state_dict(self, state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.seconds = state["seconds"]
        self.worker.curriculum.load_state_dict(state["curriculum"])
        self.state.load_state_dict(state["signals"])
        self.worker.rollout_dtype = state.get("rollout_dtype")
        self.rollout_dtype = self.worker.rollout_dtype or self.worker.dtype


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
        return partial(ProducerProcess, restarts=config.run.max_worker_restarts, log=log)
    from whorl.slots.ray import RayProducer, init_ray

    init_ray()
    options = {"num_gpus": 1} if config.async_rollout.device == "cuda" else None
    return partial(RayProducer, restarts=config.run.max_worker_restarts, log=log, options=options)


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
    several = config.update.epochs * config.update.minibatches > 1
    bound = config.rollout.bound(str(network.model.dtype).removeprefix("torch."))
    agrees = state.sampler_difference is not None and state.sampler_difference <= bound
    if network.value is not None or stale or (several and not agrees):
        scored = _score_sharded(network, batch, replicas, "")
        batch["proximal_log_prob"] = scored["log_prob"]
        state.compare_log_probs(batch, scored["log_prob"], version)
        if "value" in scored:
            batch["old_value"] = scored["value"]
    else:  # the sampler's log-probabilities are the proximal ones; the first minibatch compares them
        state.expect_version(version)
    if reference is not None:
        batch["reference_log_prob"] = _score_sharded(reference, batch, replicas, "reference_")["log_prob"]
    batch |= compute_advantages(config, experience, state)
    trained = trained_rows(config, experience, record_index)
    rng = generator(config.seed, "minibatches", record_index)
    for _ in range(config.update.epochs):
        order = trained[torch.randperm(len(trained), generator=rng)]
        for chosen in order.tensor_split(config.update.minibatches):
            if len(chosen) < replicas.process_group.size:
                continue
            rows = replicas.shard_rows(sort_by_group({name: t[chosen] for name, t in batch.items()}))
            yield list(micro_batches(rows, micro_batch_rows(config, rows)))
            state.expect_version(None)


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
