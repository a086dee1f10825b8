"""Training an agent: the loop of `train/learner/loop.py` over records of experience.

Everything specific to actor-critics is `passes_over`: from a record to what is learnt from it. It judges the
record's states with the newest values, estimates advantages (GAE, or V-trace where the record may be older than the
weights), and hands out minibatches. Acting is `rollout.Actor`, what is learnt `objectives.policy`.

With `actors=0` an actor fills a slot when the learner asks (and with the weights that it has just published); with more they
run ahead in processes of their own, by the same code.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from whorl.agents.config import AgentConfig
from whorl.agents.networks import ActorCritic
from whorl.agents.registration import make_env
from whorl.agents.rollout import Actor, rollout_spec
from whorl.objectives.actor_critic import a2c, ppo
from whorl.objectives.advantages.estimators import Trajectory, gae, v_trace
from whorl.objectives.next_token import Loss
from whorl.slots import Board, FIFOReader, ProducerProcess, SerialProducer, Slot, SlotRing
from whorl.tracking.seeds import derive, generator
from whorl.train.checkpoint.format import restore
from whorl.train.checkpoint.manager import CheckpointManager
from whorl.train.learner.learner import Learner
from whorl.train.learner.loop import StopTraining, Stopwatch, train_loop
from whorl.train.learner.update import MicroBatch, Update, all_adamw

MIN_CLIP_FRACTION = 0.05  # of what the clip begins with
RETURN_WINDOW = 100  # what the return while training is averaged over


@dataclass
class TrainingProgress:
    """How far training is. returns: of the last episodes that ended; metrics: of the last record, and where time went."""

    steps: int = 0
    seconds: float = 0.0
    returns: deque[float] = field(default_factory=lambda: deque(maxlen=RETURN_WINDOW))
    metrics: dict[str, float] = field(default_factory=dict)

    @classmethod
    def from_state(cls, record: dict[str, Any]) -> TrainingProgress:
        """As it was when `record` was made."""
        returns = deque[float](record["returns"], RETURN_WINDOW)
        return cls(record["steps"], record["seconds"], returns)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"steps": self.steps, "seconds": self.seconds, "returns": list(self.returns)}

    @property
    def mean_return(self) -> float:
        return float(np.mean(self.returns)) if self.returns else float("nan")


def build_networks(config: AgentConfig) -> ActorCritic:
    """The untrained networks, the same bits for the same seed."""
    environment = make_env(config.environment, 1)
    try:
        return ActorCritic(environment, config.hidden, generator(config.seed, "weights"))
    finally:
        environment.close()


def train(
    config: AgentConfig,
    observe: Callable[[TrainingProgress, ActorCritic], None] = lambda progress, networks: None,
    *,
    scratch: Path | None = None,
    checkpoint_seconds: float = 30.0,
    log: Callable[[str], None] = lambda text: None,
) -> ActorCritic:
    """Trains an agent to its last step, from the newest checkpoint if there is one, and returns its networks.

    What goes on is exact where an actor acts in line in environments of our own: as if it had never stopped. Other
    environments, and those in other processes, begin new episodes.

    Args:
        observe: called after every record; may raise `Stop`.
        scratch: folder for checkpoints; None keeps none.

    Raises:
        ConfigError: no such environment, or one of an unsupported kind. ProducerError: an actor failed.
        CheckpointError: the checkpoint in `scratch` is of other settings.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # networks this small are slower on more
    try:
        return _train(config, observe, scratch, checkpoint_seconds, log)
    finally:
        torch.set_num_threads(threads)


def _train(
    config: AgentConfig,
    observe: Callable[[TrainingProgress, ActorCritic], None],
    scratch: Path | None,
    checkpoint_seconds: float,
    say: Callable[[str], None],
) -> ActorCritic:
    networks = build_networks(config)
    n_actors = max(1, config.actors)
    tally, progress, first, rounds = EpisodeReturns(n_actors, config.n_envs), TrainingProgress(), 0, 0
    identity = config.model_dump(mode="json")
    keeper = (
        CheckpointManager(scratch, identity, seconds=checkpoint_seconds, log=say)
        if scratch is not None
        else None
    )
    found = keeper.resume() if keeper is not None else None
    if found is not None:
        first, rounds = found.step, found.metadata["rounds"]
        progress = TrainingProgress.from_state(found.metadata)
        say(f"continues after {progress.steps:,} of {config.steps:,} steps")
    treatments = {
        **all_adamw(networks, config.learning_rate),
        **all_adamw(networks, config.value_learning_rate or config.learning_rate, "value."),
    }
    update = Update(
        partial(actor_critic_loss, config, networks), treatments, clip_norm=config.clip_norm, eps=1e-5
    )
    learner = Learner(networks, [update], steps_done=rounds)
    actors = [
        Actor(config.environment, config.n_envs, config.hidden, derive(config.seed, "environment", number, first))
        for number in range(n_actors)
    ]  # fmt: skip
    acting = actors if not config.actors else []  # those whose state is at hand, being in this process
    for actor in acting:
        actor.setup()
    if found is not None:
        mine = {n: t for n, t in found.tensors.items() if not n.startswith("actor/")}
        restore({**learner.shared.tensors(), "returns": tally.partial_returns}, mine)
        for actor in acting:
            inside = {
                n: t.clone() for n, t in found.tensors.items() if n.startswith("actor/")
            }  # actors keep them
            actor.load_state_dict({n.removeprefix("actor/"): t for n, t in inside.items()})
    board = Board.from_tensors(learner.weights)
    board.publish(learner.weights, first)
    environment = make_env(config.environment, config.n_envs)
    spec = rollout_spec(environment, config.n_steps)
    environment.close()
    ring: SlotRing[Any] = SlotRing(spec, n_actors * (1 + config.prefetch if config.actors else 1))
    # A killed actor ends the run: its environments go with it, and one that is started again would begin other episodes
    # without saying that the old ones were cut, whose returns would run on into theirs. (So no `restarts` here.)
    producers: Any = [
        (ProducerProcess if config.actors else SerialProducer)(
            ring, actor, seed=config.seed, number=number, board=board
        )
        for number, actor in enumerate(actors)
    ]
    began = time.perf_counter() - progress.seconds
    order: Literal["sequence", "ready"] = "ready" if config.actors else "sequence"
    draining = FIFOReader(
        ring, producers, start=first, order=order, board=board, max_lag=config.max_policy_lag
    )
    with keeper or nullcontext(), draining as records:

        def watched() -> Iterator[Slot[Any]]:
            for slot in records:
                progress.returns.extend(tally.add(slot))
                progress.steps += slot.length
                yield slot

        def after(step: int, metrics: dict[str, float], clock: Stopwatch) -> None:
            progress.seconds = time.perf_counter() - began
            spent = {f"time/{name}": seconds for name, seconds in clock.pop_seconds().items()}
            progress.metrics = {**metrics, **spent, **records.pop_stats().metrics()}
            if keeper is not None and step < config.n_rollouts and keeper.due():
                inside = {f"actor/{n}": t for actor in acting for n, t in actor.state_dict().items()}
                tensors = {**learner.shared.tensors(), "returns": tally.partial_returns, **inside}
                keeper.save(step, tensors, {"rounds": learner.rounds, **progress.state_dict()})
            observe(progress, networks)

        with suppress(StopTraining):
            train_loop(
                learner,
                watched(),
                partial(rollout_minibatches, config, networks),
                first=first,
                last=config.n_rollouts,
                lr_scale=partial(remaining_fraction, config),
                sync_weights=lambda step: board.publish(learner.weights, step),
                on_step_end=after,
            )
    return networks


def remaining_fraction(config: AgentConfig, record: int) -> float:
    """What decays, from 1 to 0: the share of the run that is to come. 1 where nothing decays."""
    return max(0.0, 1 - record / config.n_rollouts) if config.anneal else 1.0


def rollout_minibatches(
    config: AgentConfig, networks: ActorCritic, slot: Slot[Any]
) -> Iterator[list[MicroBatch]]:
    """From a record to minibatches of observation, action, behaviour_log_prob, advantage and target, each [N, ...].

    As the run goes on, the clip narrows and the passes become fewer, along with the learning rate: a policy that is good is
    left in peace, and time is spent where there is something to learn.
    """
    record = {name: view.clone() for name, view in slot.tensors().items()}
    estimated = estimate_advantages(config, networks, record)
    to_come = remaining_fraction(config, slot.sequence)
    flat = {
        "observation": record["observation"][:-1].flatten(0, 1),
        "action": record["action"].flatten(0, 1),
        "behaviour_log_prob": record["behaviour_log_prob"].flatten(),
        **{name: t.flatten() for name, t in estimated.items()},
    }
    clip = {"clip": torch.tensor(config.clip * max(to_come, MIN_CLIP_FRACTION))}
    n, rng = len(flat["action"]), generator(config.seed, "order", slot.sequence)
    for _ in range(max(1, round(config.n_epochs * to_come))):
        if config.minibatches == 1:  # all of it: the order means nothing
            yield [{**flat, **clip}]
            continue
        order = torch.randperm(n, generator=rng)
        parts = [t[order].tensor_split(config.minibatches) for t in flat.values()]
        for values in zip(*parts, strict=True):
            yield [{**dict(zip(flat, values, strict=True)), **clip}]


@torch.no_grad()
def estimate_advantages(
    config: AgentConfig, networks: ActorCritic, record: dict[str, Tensor]
) -> dict[str, Tensor]:
    """advantage and target [T, B] of a record, by the newest values (and, with V-trace, the newest policy)."""
    value = networks.values(record["observation"])  # [T + 1, B]
    ended = record["terminated"] | record["truncated"]
    next_value = value[1:].clone()
    if ended.any():
        next_value[ended] = networks.values(record["final_observation"][ended])
    steps = Trajectory(record["reward"], value[:-1], next_value, record["terminated"], record["truncated"])
    if not config.v_trace:
        advantage = gae(steps, config.discount, config.gae_lambda)
        return {"advantage": advantage, "target": advantage + steps.value}
    log_prob = networks.log_prob(networks.policy(record["observation"][:-1]), record["action"])
    found = v_trace(
        steps, log_prob - record["behaviour_log_prob"], config.discount, lambda_=config.gae_lambda
    )
    return {"advantage": found.advantage, "target": found.target}


def actor_critic_loss(config: AgentConfig, networks: ActorCritic, part: MicroBatch) -> Loss:
    """The loss of a minibatch."""
    judged = networks.evaluate_actions(part["observation"], part["action"])
    advantage = part["advantage"]
    if config.normalize_advantage and len(advantage) > 1:
        deviation, mean = torch.std_mean(advantage)
        advantage = (advantage - mean) / (deviation + 1e-8)
    coefficients = {"value_coef": config.value_coef, "entropy_coef": config.entropy_coef}
    if config.algorithm == "ppo":
        return ppo(
            judged, part["behaviour_log_prob"], advantage, part["target"], clip=part["clip"], **coefficients
        )
    return a2c(judged, advantage, part["target"], **coefficients)


class EpisodeReturns:
    """Returns of whole episodes, from records that cut them anywhere. One running sum for each copy of each actor."""

    def __init__(self, actors: int, num_envs: int) -> None:
        self.partial_returns = torch.zeros(actors, num_envs, dtype=torch.float64)

    def add(self, slot: Slot[Any]) -> list[float]:
        """Undiscounted returns of the episodes that ended in this record."""
        data, running, found = slot.data, self.partial_returns[slot.producer].numpy(), []
        ended = data.terminated | data.truncated
        for t in range(len(ended)):
            running += data.reward[t]
            if ended[t].any():
                found.extend(running[ended[t]].tolist())
                running[ended[t]] = 0.0
        return found


@torch.no_grad()
def evaluate(networks: ActorCritic, environment: str, episodes: int, seed: int) -> list[float]:
    """Undiscounted returns of `episodes` episodes under the likeliest actions, one in each of as many copies."""
    copies = make_env(environment, episodes)
    seen = copies.reset(seed).flatten(1)
    total, going = torch.zeros(episodes), torch.ones(episodes, dtype=torch.bool)
    while going.any():
        found = copies.step(networks.greedy_action(seen))
        total += found.reward * going
        going &= ~(found.terminated | found.truncated)
        seen = found.observation.flatten(1)
    copies.close()
    return total.tolist()
