"""Train an agent: the loop of `train/learner/loop.py` over rollouts.

The code specific to actor-critics is `rollout_minibatches`. It evaluates a rollout's states with the newest values,
estimates advantages (GAE, or V-trace if the rollout may be stale), and yields minibatches. `rollout.Actor` acts, and
`objectives.actor_critic` has the losses.

With `actors=0` one actor runs in this process and fills a slot on demand, with the weights just published. With more,
actors run ahead in separate processes, with the same code.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

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
from whorl.train.config import CheckpointConfig
from whorl.train.learner.learner import Learner, SharedState
from whorl.train.learner.loop import Stopwatch
from whorl.train.learner.update import MicroBatch, Update, all_adamw
from whorl.train.metrics.layer_stats import LayerStats
from whorl.train.trainer import RunOptions, StepFunction, Task, Trainer

MIN_CLIP_FRACTION = 0.05  # of the initial clip
MAX_EVALUATION_STEPS = 10_000  # per episode
RETURN_WINDOW = 100  # number of episodes in the training return


@dataclass
class TrainingProgress:
    """Progress of a run.

    returns: of the last episodes that ended; metrics: of the last rollout, with seconds per phase.
    """

    steps: int = 0
    seconds: float = 0.0
    returns: deque[float] = field(default_factory=lambda: deque(maxlen=RETURN_WINDOW))
    metrics: dict[str, float] = field(default_factory=dict)

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> TrainingProgress:
        """Restore progress from a checkpoint."""
        returns = deque[float](state["returns"], RETURN_WINDOW)
        return cls(state["steps"], state["seconds"], returns)

    def state_dict(self) -> dict[str, Any]:
        """Return a JSON-serializable dictionary for a checkpoint."""
        return {"steps": self.steps, "seconds": self.seconds, "returns": list(self.returns)}

    @property
    def mean_return(self) -> float:
        return float(np.mean(self.returns)) if self.returns else float("nan")


def build_networks(config: AgentConfig) -> ActorCritic:
    """Return untrained networks. The same seed gives the same bits."""
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
    heartbeat_dir: Path | None = None,
    checkpoint_config: CheckpointConfig | None = None,
) -> ActorCritic:
    """Train an agent to its last step, from the newest checkpoint if there is one, and return its networks.

    A resumed run is exact if an actor in this process acts in built-in environments. Other environments, and
    environments in other processes, start new episodes.

    Args:
        observe: called after every rollout; may raise `StopTraining`.
        scratch: folder for checkpoints; None writes none.
        checkpoint_seconds: time between checkpoints.
        checkpoint_config: retention and remote storage.
        heartbeat_dir: where the heartbeat and stack traces of a stall are written; None for neither.

    Raises:
        ConfigError: the environment does not exist or is unsupported.
        ProducerError: an actor failed.
        CheckpointError: the checkpoint in `scratch` has other settings.
    """
    task = AgentTask(config)
    options = RunOptions(
        scratch=scratch,
        checkpoint_seconds=checkpoint_seconds,
        checkpoint_config=checkpoint_config,
        threads=1,  # networks this small are slower on more threads
        heartbeat_dir=heartbeat_dir,
    )

    def on_step(_: int, metrics: dict[str, float]) -> None:
        task.progress.metrics = metrics
        observe(task.progress, task.networks)

    Trainer(task, options, StepFunction(on_step, observe), log=log).fit()
    return task.networks


class AgentTask(Task[Slot[Any]]):
    """Actor-critic training: a record is a rollout."""

    interruptible = ()  # acting changes the environments, and a step is short
    unsupported: ClassVar[Mapping[str, str]] = {
        "replicas": "networks this small gain nothing from replicas; set actors",
        "ema": "actors act with the trained weights",
    }
    networks: ActorCritic

    def __init__(self, config: AgentConfig) -> None:
        self.config, self.steps, self.networks = config, config.n_rollouts, build_networks(config)
        self.n_actors = max(1, config.actors)
        self.returns, self.progress = EpisodeReturns(self.n_actors, config.n_envs), TrainingProgress()
        self.actor_state: dict[str, Tensor] = {}
        self.local_actors: list[Actor] = []  # actors in this process: their state can be saved

    @property
    def identity(self) -> dict[str, Any]:
        return self.config.model_dump(mode="json")

    def allocate(self, replicas: int) -> SharedState:
        param_optims = make_update(self.config, self.networks).param_optims
        return SharedState.allocate(self.networks, param_optims, contiguous=True)

    def make_learner(self, trainer: Trainer[Slot[Any]]) -> Learner:
        config, first = self.config, trainer.steps_done
        update = replace(make_update(config, self.networks), accept_step=trainer.accept_step)
        learner = Learner(self.networks, [update], trainer.shared, steps_done=trainer.rounds_done)
        self.actors = [
            Actor(config.environment, config.n_envs, config.hidden, derive(config.seed, "environment", number, first))
            for number in range(self.n_actors)
        ]  # fmt: skip
        self.local_actors = self.actors if not config.actors else []
        for actor in self.local_actors:
            actor.setup()
            if self.actor_state:
                actor.load_state_dict(self.actor_state)
        self.learner, self.board = learner, Board.from_tensors(learner.weights)
        self.sync_weights(first)
        self.started = time.perf_counter() - self.progress.seconds
        return learner

    def make_layer_stats(self, learner: Learner, steps_done: int) -> LayerStats:
        rows = self.config.n_steps * self.config.n_envs
        return LayerStats(learner, steps=self.steps, batch_rows=rows, steps_done=steps_done)

    @contextmanager
    def batches(self, first: int) -> Iterator[Iterator[Slot[Any]]]:
        with _make_reader(self.config, self.actors, self.board, first) as self.rollouts:
            yield self._counted()

    def _counted(self) -> Iterator[Slot[Any]]:
        for slot in self.rollouts:
            self.progress.returns.extend(self.returns.add(slot))
            self.progress.steps += slot.length
            yield slot

    def minibatches(self, record: Slot[Any]) -> Iterator[list[MicroBatch]]:
        return rollout_minibatches(self.config, self.networks, record)

    def lr_scale(self, step: int) -> float:
        return remaining_fraction(self.config, step)

    def sync_weights(self, steps_done: int) -> None:
        self.board.publish(self.learner.weights, steps_done)

    def report(self, steps_done: int, metrics: dict[str, float], clock: Stopwatch) -> dict[str, float] | None:
        self.progress.seconds = time.perf_counter() - self.started
        found = super().report(steps_done, metrics, clock) or {}
        return {**found, **self.rollouts.pop_stats().metrics()}

    def tensors(self) -> dict[str, Tensor]:
        actors = {f"actor/{n}": t for actor in self.local_actors for n, t in actor.state_dict().items()}
        return {"returns": self.returns.partial_returns, **actors}

    def state_dict(self) -> dict[str, Any]:
        return self.progress.state_dict()

    def load_state_dict(self, state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.progress = TrainingProgress.from_state(state)
        self.returns.partial_returns.copy_(tensors.pop("returns"))
        self.actor_state = {name.removeprefix("actor/"): t for name, t in tensors.items()}


def make_update(config: AgentConfig, networks: ActorCritic) -> Update:
    """Return the only update of an agent's learner: AdamW, with a separate rate for the value network."""
    param_optims = {
        **all_adamw(networks, config.learning_rate),
        **all_adamw(networks, config.value_learning_rate or config.learning_rate, "value."),
    }
    return Update(
        partial(actor_critic_loss, config, networks), param_optims, clip_norm=config.clip_norm, eps=1e-5
    )


def _make_reader(config: AgentConfig, actors: list[Actor], board: Board, first: int) -> FIFOReader[Any]:
    """Return a reader of the actors' rollouts, from number `first`."""
    environment = make_env(config.environment, config.n_envs)
    spec = rollout_spec(environment, config.n_steps)
    environment.close()
    ring: SlotRing[Any] = SlotRing(spec, len(actors) * (1 + config.prefetch if config.actors else 1))
    # No `restarts`: a restarted actor would begin new episodes without marking the old ones as truncated. Their returns
    # would be added to those of the new episodes. A killed actor therefore ends the run.
    producers: Any = [
        (ProducerProcess if config.actors else SerialProducer)(
            ring, actor, seed=config.seed, number=number, board=board
        )
        for number, actor in enumerate(actors)
    ]
    order: Literal["sequence", "ready"] = "ready" if config.actors else "sequence"
    return FIFOReader(ring, producers, start=first, order=order, board=board, max_lag=config.max_policy_lag)


def remaining_fraction(config: AgentConfig, rollout_index: int) -> float:
    """Return the fraction of the run that remains, from 1 to 0; 1 without annealing."""
    return max(0.0, 1 - rollout_index / config.n_rollouts) if config.anneal else 1.0


def rollout_minibatches(
    config: AgentConfig, networks: ActorCritic, slot: Slot[Any]
) -> Iterator[list[MicroBatch]]:
    """Yield minibatches of observation, action, behaviour_log_prob, advantage and target, each [N, ...].

    During the run the clip narrows and the number of epochs falls together with the learning rate. A good policy then
    changes less, and late rollouts cost less time.
    """
    rollout = {name: view.clone() for name, view in slot.tensors().items()}
    estimates = estimate_advantages(config, networks, rollout)
    remaining = remaining_fraction(config, slot.sequence)
    flat = {
        "observation": rollout["observation"][:-1].flatten(0, 1),
        "action": rollout["action"].flatten(0, 1),
        "behaviour_log_prob": rollout["behaviour_log_prob"].flatten(),
        **{name: t.flatten() for name, t in estimates.items()},
    }
    clip = {"clip": torch.tensor(config.clip * max(remaining, MIN_CLIP_FRACTION))}
    n, rng = len(flat["action"]), generator(config.seed, "order", slot.sequence)
    for _ in range(max(1, round(config.n_epochs * remaining))):
        if config.minibatches == 1:  # the full batch: order has no effect
            yield [{**flat, **clip}]
            continue
        order = torch.randperm(n, generator=rng)
        parts = [t[order].tensor_split(config.minibatches) for t in flat.values()]
        for values in zip(*parts, strict=True):
            yield [{**dict(zip(flat, values, strict=True)), **clip}]


@torch.no_grad()
def estimate_advantages(
    config: AgentConfig, networks: ActorCritic, rollout: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return advantage and target [T, B] of a rollout, from the newest values (and policy, with V-trace)."""
    value = networks.values(rollout["observation"])  # [T + 1, B]
    ended = rollout["terminated"] | rollout["truncated"]
    next_value = value[1:].clone()
    if ended.any():
        next_value[ended] = networks.values(rollout["final_observation"][ended])
    steps = Trajectory(rollout["reward"], value[:-1], next_value, rollout["terminated"], rollout["truncated"])
    if not config.v_trace:
        advantage = gae(steps, config.discount, config.gae_lambda)
        return {"advantage": advantage, "target": advantage + steps.value}
    log_prob = networks.log_prob(networks.policy(rollout["observation"][:-1]), rollout["action"])
    estimate = v_trace(
        steps, log_prob - rollout["behaviour_log_prob"], config.discount, lambda_=config.gae_lambda
    )
    return {"advantage": estimate.advantage, "target": estimate.target}


def actor_critic_loss(config: AgentConfig, networks: ActorCritic, part: MicroBatch) -> Loss:
    """Return the loss of a minibatch."""
    output = networks.evaluate_actions(part["observation"], part["action"])
    advantage = part["advantage"]
    if config.normalize_advantage and len(advantage) > 1:
        deviation, mean = torch.std_mean(advantage)
        advantage = (advantage - mean) / (deviation + 1e-8)
    coefficients = {"value_coef": config.value_coef, "entropy_coef": config.entropy_coef}
    if config.algorithm == "ppo":
        return ppo(
            output, part["behaviour_log_prob"], advantage, part["target"], clip=part["clip"], **coefficients
        )
    return a2c(output, advantage, part["target"], **coefficients)


class EpisodeReturns:
    """Returns of whole episodes, summed over rollouts that cut them. One partial sum per copy of each actor."""

    def __init__(self, actors: int, num_envs: int) -> None:
        self.partial_returns = torch.zeros(actors, num_envs, dtype=torch.float64)

    def add(self, slot: Slot[Any]) -> list[float]:
        """Return the undiscounted returns of the episodes that ended in this rollout."""
        data, running, finished = slot.data, self.partial_returns[slot.producer].numpy(), []
        ended = data.terminated | data.truncated
        for t in range(len(ended)):
            running += data.reward[t]
            if ended[t].any():
                finished.extend(running[ended[t]].tolist())
                running[ended[t]] = 0.0
        return finished


@torch.no_grad()
def evaluate(
    networks: ActorCritic,
    environment: str,
    episodes: int,
    seed: int,
    *,
    max_steps: int = MAX_EVALUATION_STEPS,
    observe: Callable[[int, int], None] = lambda step, running: None,
) -> list[float]:
    """Return undiscounted returns of `episodes` episodes with greedy actions. Each episode runs in a separate copy.

    Args:
        max_steps: steps after which an episode is cut off; a greedy policy may never end one of an environment without
            a time limit.
        observe: called after each step with its number and the number of episodes that have not ended. The last call
            has the number of episodes that were cut off.
    """
    envs = make_env(environment, episodes)
    observation = envs.reset(seed).flatten(1)
    total, running = torch.zeros(episodes), torch.ones(episodes, dtype=torch.bool)
    for step in range(1, max_steps + 1):
        transition = envs.step(networks.greedy_action(observation))
        total += transition.reward * running
        running &= ~(transition.terminated | transition.truncated)
        observation = transition.observation.flatten(1)
        observe(step, n_running := int(running.sum()))
        if not n_running:
            break
    envs.close()
    return total.tolist()
