"""Training an agent: the loop of `train/loop.py` over records of experience.

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
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whorl.agents.catalogue import make
from whorl.agents.config import AgentConfig
from whorl.agents.networks import ActorCritic
from whorl.agents.rollout import Actor, rollout_spec
from whorl.objectives import Loss
from whorl.objectives.estimators import Steps, gae, v_trace
from whorl.objectives.policy import a2c, ppo
from whorl.runs.seeds import derive, generator
from whorl.slots import Board, Drain, ProducerProcess, SerialProducer, Slot, SlotRing
from whorl.train.learner import Learner
from whorl.train.loop import Clock, learn
from whorl.train.update import Part, Update, all_adamw

LAST_EPISODES = 100  # what the return while training is averaged over


@dataclass
class Progress:
    """How far training is. returns: of the last episodes that ended; metrics: of the last record, and where time went."""

    steps: int = 0
    seconds: float = 0.0
    returns: deque[float] = field(default_factory=lambda: deque(maxlen=LAST_EPISODES))
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def mean_return(self) -> float:
        return float(np.mean(self.returns)) if self.returns else float("nan")


class Stop(Exception):
    """Raised by an observer to end training early, with what there is."""


def build(config: AgentConfig) -> ActorCritic:
    """The untrained networks, the same bits for the same seed."""
    environment = make(config.environment, 1)
    try:
        return ActorCritic(environment, config.hidden, generator(config.seed, "weights"))
    finally:
        environment.close()


def train(
    config: AgentConfig, observe: Callable[[Progress, ActorCritic], None] = lambda progress, networks: None
) -> ActorCritic:
    """Trains an agent to its last step and returns its networks.

    Args:
        observe: called after every record; may raise `Stop`.

    Raises:
        ConfigError: no such environment, or one of an unsupported kind. ProducerError: an actor failed.
    """
    networks = build(config)
    objective = partial(objective_of, config, networks)
    learner = Learner(
        networks, [Update(objective, all_adamw(networks, config.rate), clip_norm=config.clip_norm, eps=1e-5)]
    )
    board = Board.of(learner.weights)
    environment = make(config.environment, config.n_envs)
    spec = rollout_spec(environment, config.length)
    environment.close()
    n_actors = max(1, config.actors)
    ring: SlotRing[Any] = SlotRing(spec, n_actors * (1 + config.ahead if config.actors else 1))
    actors = [
        Actor(config.environment, config.n_envs, config.hidden, derive(config.seed, "environment", number))
        for number in range(n_actors)
    ]
    producers: Any = [
        (ProducerProcess if config.actors else SerialProducer)(
            ring, actor, seed=config.seed, number=number, board=board
        )
        for number, actor in enumerate(actors)
    ]
    progress, tally, began = Progress(), Tally(n_actors, config.n_envs), time.perf_counter()
    order = "ready" if config.actors else "sequence"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # networks this small are slower on more
    with Drain(ring, producers, order=order, board=board, max_lag=config.max_lag) as records:  # type: ignore[arg-type]

        def watched() -> Iterator[Slot[Any]]:
            for slot in records:
                progress.returns.extend(tally.add(slot))
                progress.steps += slot.length
                yield slot

        def after(step: int, metrics: dict[str, float], clock: Clock) -> None:
            progress.seconds = time.perf_counter() - began
            progress.metrics = {**metrics, **clock.take(), **records.take().words()}
            observe(progress, networks)

        order_of_steps = generator(config.seed, "order")
        try:
            learn(
                learner,
                watched(),
                partial(passes_over, config, networks, order_of_steps),
                last=config.records,
                factor=lambda step: 1 - step / config.records if config.decay else 1.0,
                publish=lambda step: board.publish(learner.weights, step),
                after=after,
            )
        except Stop:
            pass
        finally:
            torch.set_num_threads(threads)
    return networks


def passes_over(
    config: AgentConfig, networks: ActorCritic, rng: torch.Generator, slot: Slot[Any]
) -> Iterator[list[Part]]:
    """From a record to minibatches of observation, action, behaviour_log_prob, advantage and target, each [N, ...]."""
    record = {name: view.clone() for name, view in slot.tensors().items()}
    estimated = estimate(config, networks, record)
    flat = {
        "observation": record["observation"][:-1].flatten(0, 1),
        "action": record["action"].flatten(0, 1),
        "behaviour_log_prob": record["behaviour_log_prob"].flatten(),
        **{name: t.flatten() for name, t in estimated.items()},
    }
    if config.minibatches == 1:  # all of it each time: the order means nothing
        for _ in range(config.passes):
            yield [flat]
        return
    n = len(flat["action"])
    for _ in range(config.passes):
        for chosen in torch.randperm(n, generator=rng).tensor_split(config.minibatches):
            yield [{name: t[chosen] for name, t in flat.items()}]


@torch.no_grad()
def estimate(config: AgentConfig, networks: ActorCritic, record: dict[str, Tensor]) -> dict[str, Tensor]:
    """advantage and target [T, B] of a record, by the newest values (and, with V-trace, the newest policy)."""
    value = networks.values(record["observation"])  # [T + 1, B]
    ended = record["terminated"] | record["truncated"]
    next_value = value[1:].clone()
    if ended.any():
        next_value[ended] = networks.values(record["final_observation"][ended])
    steps = Steps(record["reward"], value[:-1], next_value, record["terminated"], record["truncated"])
    if not config.correct:
        advantage = gae(steps, config.discount, config.lambda_)
        return {"advantage": advantage, "target": advantage + steps.value}
    log_prob = networks.log_prob(networks.policy(record["observation"][:-1]), record["action"])
    found = v_trace(steps, log_prob - record["behaviour_log_prob"], config.discount, lambda_=config.lambda_)
    return {"advantage": found.advantage, "target": found.target}


def objective_of(config: AgentConfig, networks: ActorCritic, part: Part) -> Loss:
    """The loss of a minibatch."""
    judged = networks.judge(part["observation"], part["action"])
    advantage = part["advantage"]
    if config.normalise and len(advantage) > 1:
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    weights = {"value_weight": config.value_weight, "entropy_weight": config.entropy_weight}
    if config.algorithm == "ppo":
        return ppo(judged, part["behaviour_log_prob"], advantage, part["target"], clip=config.clip, **weights)
    return a2c(judged, advantage, part["target"], **weights)


class Tally:
    """Returns of whole episodes, from records that cut them anywhere. One running sum for each copy of each actor."""

    def __init__(self, actors: int, copies: int) -> None:
        self.running = np.zeros((actors, copies))

    def add(self, slot: Slot[Any]) -> list[float]:
        """Undiscounted returns of the episodes that ended in this record."""
        data, running, found = slot.data, self.running[slot.producer], []
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
    copies = make(environment, episodes)
    seen = copies.reset(seed).flatten(1)
    total, going = torch.zeros(episodes), torch.ones(episodes, dtype=torch.bool)
    while going.any():
        found = copies.step(networks.best(seen))
        total += found.reward * going
        going &= ~(found.terminated | found.truncated)
        seen = found.observation.flatten(1)
    copies.close()
    return total.tolist()
