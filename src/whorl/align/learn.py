"""Reinforcement learning from verifiable rewards: the loop of `train/loop.py` over records of rollouts.

    rollouts (answers to tasks, judged)  ->  experience (rows, advantages)  ->  an update  ->  weights on the board  ->  ...

Everything specific to an algorithm is a line of a table (`objectives/text_policy.py`); what is here is the same for all:
who samples, who is compared with whom, which weights are asked again (a reference, the proximal policy), what is published.

In lock-step a record is sampled when the learner asks, with the weights that it has just published. With workers it is
sampled ahead, in processes of their own, by the same code: each id carries the version of the weights that drew it, what is
too old is made anew, and what is a little old is weighed by `objectives/importance.py`. A worker that is killed is started
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
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whorl.align.config import RLConfig
from whorl.align.experience import Experience, figures, read
from whorl.align.network import Network
from whorl.align.policy import Signals, advantages, objective_of, preset_of
from whorl.align.rollout import Rollouts, RolloutWorker, placed, rollout_spec
from whorl.align.rows import by_length, cut
from whorl.align.training import learner_of, micro_rows
from whorl.runs.seeds import generator
from whorl.slots import Board, Drain, ProducerProcess, SerialProducer, Slot, SlotRing
from whorl.train.checkpoint import restore
from whorl.train.keeper import Keeper
from whorl.train.loop import Clock, learn
from whorl.train.schedule import factor
from whorl.train.update import Part

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
        observe: called after each record with the metrics and what was learnt from; may raise `Stop`.
        scratch: folder for checkpoints; None keeps none.

    Raises:
        ConfigError: a KL without a reference, PPO without a critic. ProducerError: a worker failed.
        DivergedError: what is not finite. CheckpointError: the checkpoint is of other settings.
    """
    preset_of(config, network, reference)
    identity = {
        "stage": "rl",
        "config": config.model_dump(
            mode="json", exclude={"checkpoint_seconds", "max_steps_seconds", "restarts"}
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
    rows = config.prompts * config.answers
    objective = objective_of(config, network, signals)
    learner = learner_of(network, objective, config, positions=rows * worker.length, steps_done=rounds)
    if found is not None:
        restore(learner.shared.tensors(), found.tensors)
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
    began, newest = time.monotonic() - seconds, list[Experience]()

    def passes(slot: Slot[Rollouts]) -> Iterator[list[Part]]:
        experience = read(slot)
        newest[:] = [experience]
        if config.ahead.workers:
            tried = experience.task.view(-1, config.answers)[:, 0].tolist()
            for task, passed in zip(
                tried, experience.reward.view(-1, config.answers).mean(1).clamp(0, 1).tolist(), strict=True
            ):
                curriculum.record(task, passed, config.answers)
        return passes_over(config, network, reference, signals, experience, slot.sequence, board.version)

    def after(step: int, metrics: dict[str, float], clock: Clock) -> None:
        spent = {f"seconds_{name}": s for name, s in clock.take().items()}
        told = {**figures(newest[0], config.answers), **metrics, **signals.take(), **spent}
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
        if config.max_steps_seconds is not None and told["seconds"] > config.max_steps_seconds:
            say(f"ends after {step:,} of {config.steps:,} steps: the time is up")
            raise Stop

    network.train()
    try:
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
    finally:
        worker.close()
    return network.eval()


def _kind(config: RLConfig, say: Callable[[str], None]) -> Any:
    """What runs the workers."""
    if not config.ahead.workers:
        return SerialProducer
    if config.ahead.place == "process":
        return partial(ProducerProcess, restarts=config.restarts, say=say)
    from whorl.slots.ray import RayProducer, start

    start()
    options = {"options": {"num_gpus": 1}} if config.ahead.device == "cuda" else {}
    return partial(RayProducer, restarts=config.restarts, say=say, **options)


def passes_over(
    config: RLConfig,
    network: Network,
    reference: Network | None,
    signals: Signals,
    experience: Experience,
    number: int,
    version: int,
) -> Iterator[list[Part]]:
    """From a record to minibatches, each a list of micro-batches whose gradients are summed before a step.

    Args:
        number: of the record: what is random follows from it.
        version: of the weights that are about to learn.
    """
    part = experience.part
    stale = bool((part["version"][part["loss_mask"]] != version).any())
    if network.value is not None or stale or config.epochs * config.minibatches > 1:
        scored = network.score(part)
        part["proximal_log_prob"] = scored["log_prob"]
        signals.compare(part, scored["log_prob"], version)
        if "value" in scored:
            part["old_value"] = scored["value"]
    else:  # one step: the log-probability that learns is the one before it
        signals.expect(version)
    if reference is not None:
        part["reference_log_prob"] = reference.score(part)["log_prob"]
    part |= advantages(config, experience, signals)
    rng = generator(config.seed, "minibatches", number)
    for _ in range(config.epochs):
        order = torch.randperm(experience.rows, generator=rng)
        for chosen in order.tensor_split(config.minibatches):
            rows: dict[str, Tensor] = by_length({name: t[chosen] for name, t in part.items()})
            yield list(cut(rows, micro_rows(config, rows)))
