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
from whorl.align.model.batch import by_group, cut
from whorl.align.model.policy_model import Network
from whorl.align.rl.advantages import Signals, advantages, objective_of, preset_of
from whorl.align.rl.experience import Experience, figures, read
from whorl.align.rl.replicas import Peers, replicas_of
from whorl.align.rl.rollout import Rollouts, RolloutWorker, placed, rollout_spec, shared_columns
from whorl.align.stage.trainer import learner_of, memory_of, micro_rows
from whorl.parallel.process_group import World, start_replicas
from whorl.slots import Board, Drain, ProducerProcess, SerialProducer, Slot, SlotRing
from whorl.tracking.seeds import generator
from whorl.train.checkpoint.format import restore
from whorl.train.checkpoint.manager import Keeper
from whorl.train.learner.learner import Shared
from whorl.train.learner.loop import Clock, learn
from whorl.train.learner.update import Part
from whorl.train.optim.lr_schedule import factor

Observer = Callable[[int, dict[str, float], Experience], None]


class Stop(Exception):
    """Raised by an observer to end training early, with what there is."""


def train_policy(
    network: Network,
    worker: RolloutWorker,
    config: RLConfig,
    *,
    reference: Network | None = None,
    observe: Observer = lambda step, metrics, experience: None,
    scratch: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Network:
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
    preset_of(config, network, reference)
    identity = {
        "stage": "rl",
        "config": config.model_dump(
            mode="json", exclude={"checkpoint_seconds", "max_steps_seconds", "restarts", "replicas"}
        ),
        "tasks": len(worker.tasks),
    }
    keeper = (
        Keeper(scratch, identity, seconds=config.checkpoint_seconds, say=say) if scratch is not None else None
    )
    found = keeper.resume() if keeper is not None else None
    first, rounds, seconds = 0, 0, 0.0
    signals = Signals(config)
    if found is not None:
        first, rounds, seconds = found.step, found.record["rounds"], found.record["seconds"]
        worker.curriculum.load_state_dict(found.record["curriculum"])
        signals.load_state_dict(found.record["signals"])
        say(f"continues at step {first:,} of {config.steps:,}")
    positions, threads = config.prompts * config.answers * worker.length, torch.get_num_threads()
    replicas = replicas_of(config, network, worker.length, judged=worker.judge is not None)
    shared = memory_of(network, config, positions=positions, replicas=replicas)
    if found is not None:
        restore(shared.tensors(), found.tensors)
    start = Start(first, rounds, seconds, signals)
    peers = Peers()
    if replicas > 1:
        peers = Peers(columns=shared_columns(config.prompts * config.answers, worker.length))
        each = max(1, threads // replicas)
        say(f"{replicas} replicas sample and learn, {each} {'thread' if each == 1 else 'threads'} each")
        given = (peers.columns, each, network, worker, config, reference, shared, start)
        peers.world = start_replicas(replicas, _replica, *given)
        torch.set_num_threads(each)
    try:
        _train(peers, network, worker, config, reference, shared, start, observe, keeper, say)
    finally:
        worker.close()
        worker.join(Peers())
        peers.world.close()
        torch.set_num_threads(threads)
    return network.eval()


@dataclass
class Start:
    """Where a run begins, or goes on: records and updates that were, seconds that they took, what goes on beside weights."""

    step: int
    rounds: int
    seconds: float
    signals: Signals


def _replica(world: World, columns: dict[str, Tensor], threads: int, *given: Any) -> None:
    """What the replicas beside the first do: the same, and nobody watches."""
    torch.set_num_threads(threads)
    worker: RolloutWorker = given[1]
    try:
        _train(Peers(world, columns), *given)
    finally:
        worker.close()


def _train(
    peers: Peers,
    network: Network,
    worker: RolloutWorker,
    config: RLConfig,
    reference: Network | None,
    shared: Shared,
    start: Start,
    observe: Observer = lambda step, metrics, experience: None,
    keeper: Keeper | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """One replica's part of `train_policy`; alone, all of it."""
    worker.join(peers)
    first, signals, rows = start.step, start.signals, config.prompts * config.answers
    learner = learner_of(
        network,
        objective_of(config, network, signals),
        config,
        positions=rows * worker.length,
        steps_done=start.rounds,
        shared=shared,
        world=peers.world,
    )
    # In lock-step the worker records into it. Workers ahead have copies of their own, and this one is of the records that
    # were read: what a checkpoint keeps, and what a worker that is started again begins with. It knows less than the copy
    # that died: nothing of the groups that others took the place of, nor of the records that were on their way.
    curriculum = worker.curriculum
    board = Board.of(network.policy())
    board.publish(network.policy(), first)
    ahead = config.ahead
    n = max(1, ahead.workers)
    # Where no record may be older than the weights there is nothing to be asked for ahead: one slot keeps them in order.
    each = 1 + ahead.records if ahead.workers and ahead.max_lag else 1
    spec = rollout_spec(config.prompts, config.answers, worker.length)
    ring: SlotRing[Rollouts] = SlotRing(spec, n * each)
    kind = _kind(config, say)
    workers = enumerate(placed(worker, ahead, network.device))
    producers = [kind(ring, one, seed=config.seed, number=number, board=board) for number, one in workers]
    draining = Drain(
        ring, producers, start=first, order="ready" if ahead.workers else "sequence",
        board=board, max_lag=ahead.max_lag if ahead.workers else None,
    )  # fmt: skip
    began, newest = time.monotonic() - start.seconds, list[Experience]()

    def passes(slot: Slot[Rollouts]) -> Iterator[list[Part]]:
        experience = read(slot)
        newest[:] = [experience]
        if config.ahead.workers:
            tried = experience.task.view(-1, config.answers)[:, 0].tolist()
            for task, passed in zip(
                tried, experience.reward.view(-1, config.answers).mean(1).clamp(0, 1).tolist(), strict=True
            ):
                curriculum.record(task, passed, config.answers)
        return passes_over(
            config, network, reference, signals, experience, slot.sequence, board.version, peers
        )

    def after(step: int, metrics: dict[str, float], clock: Clock) -> None:
        spent = {f"seconds_{name}": s for name, s in clock.take().items()}
        seen = signals.take()
        if not peers.alone:  # each has seen its own rows
            largest = max(peers.told([seen.get("parity", -1.0)]))
            seen |= {"parity": largest} if largest >= 0 else {}
        told = {**figures(newest[0], config.answers), **metrics, **seen, **spent}
        told |= {name: value for name, value in draining.take().words().items() if ahead.workers}
        told["seconds"] = time.monotonic() - began
        if keeper is not None and step < config.steps and keeper.due():
            record = {
                "rounds": learner.rounds,
                "seconds": told["seconds"],
                "curriculum": curriculum.state_dict(),
                "signals": signals.state_dict(),
            }
            keeper.save(step, learner.shared.tensors(), record)
        observe(step, told, newest[0])
        if peers.world.rank or config.max_steps_seconds is None:
            return  # one clock decides; the others hear of it when their links close
        if told["seconds"] > config.max_steps_seconds:
            say(f"ends after {step:,} of {config.steps:,} steps: the time is up")
            raise Stop

    network.train()
    with keeper or nullcontext(), draining as records, suppress(Stop):
        learn(
            learner,
            records,
            passes,
            first=first,
            last=config.steps,
            factor=lambda step: factor(step, config.steps, config.schedule),
            publish=lambda step: board.publish(network.policy(), step),
            after=after,
        )


def _kind(config: RLConfig, say: Callable[[str], None]) -> Any:
    """What runs the workers."""
    if not config.ahead.workers:
        return SerialProducer
    if config.ahead.place == "process":
        return partial(ProducerProcess, restarts=config.restarts, say=say)
    from whorl.slots.ray import RayProducer, start

    start()
    options = {"num_gpus": 1} if config.ahead.device == "cuda" else None
    return partial(RayProducer, restarts=config.restarts, say=say, options=options)


def passes_over(
    config: RLConfig,
    network: Network,
    reference: Network | None,
    signals: Signals,
    experience: Experience,
    number: int,
    version: int,
    peers: Peers,
) -> Iterator[list[Part]]:
    """From a record to minibatches, each a list of micro-batches whose gradients are summed before a step.

    Args:
        number: of the record: what is random follows from it.
        version: of the weights that are about to learn.
        peers: with whom the rows of each minibatch are shared.
    """
    part = experience.part
    groups = torch.arange(experience.rows) // config.answers
    part["group"] = groups[:, None].expand_as(part["tokens"])
    stale = bool((part["version"][part["loss_mask"]] != version).any())
    if network.value is not None or stale or config.epochs * config.minibatches > 1:
        scored = _scored(network, part, peers, "")
        part["proximal_log_prob"] = scored["log_prob"]
        signals.compare(part, scored["log_prob"], version)
        if "value" in scored:
            part["old_value"] = scored["value"]
    else:  # one step: the log-probability that learns is the one before it
        signals.expect(version)
    if reference is not None:
        part["reference_log_prob"] = _scored(reference, part, peers, "reference_")["log_prob"]
    part |= advantages(config, experience, signals)
    rng = generator(config.seed, "minibatches", number)
    for _ in range(config.epochs):
        order = torch.randperm(experience.rows, generator=rng)
        for chosen in order.tensor_split(config.minibatches):
            rows = peers.every(by_group({name: t[chosen] for name, t in part.items()}))
            yield list(cut(rows, micro_rows(config, rows)))


def _scored(network: Network, part: Part, peers: Peers, called: str) -> dict[str, Tensor]:
    """`network.score`, each replica of its rows."""
    if peers.alone:
        return network.score(part)
    n = len(part["tokens"])
    mine = (part["group"][:, 0] % peers.world.size == peers.world.rank).nonzero()[:, 0]
    own = network.score({name: t[mine] for name, t in part.items()})
    found = {name: torch.zeros(n, *t.shape[1:]) for name, t in own.items()}
    for name, t in own.items():
        found[name][mine] = t
    peers.gather({called + name: t for name, t in found.items()}, mine)
    return found
