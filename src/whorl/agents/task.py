"""Train an agent: the loop of `train/learner/loop.py` over rollouts.

`rollout.Actor` acts, and a method (`methods/method.py`) has everything that distinguishes one from another.

With `actors=0` one actor runs in this process and fills a slot on demand, with the weights just published. With more,
actors run ahead in separate processes, with the same code.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from whorl.agents.environments.environment import Environment, Transition
from whorl.agents.environments.registration import make_env
from whorl.agents.exploration import Exploration, VisitCounts
from whorl.agents.methods.method import Method, MethodConfig
from whorl.agents.methods.registration import make_method
from whorl.agents.rollout import Actor, rollout_spec
from whorl.errors import ConfigError
from whorl.slots import Board, FIFOReader, ProducerProcess, SerialProducer, Slot, SlotRing
from whorl.tracking.seeds import derive, generator
from whorl.train.config import CheckpointConfig
from whorl.train.learner.learner import Learner, SharedState
from whorl.train.learner.loop import Stopwatch
from whorl.train.learner.update import MicroBatch
from whorl.train.metrics.layer_stats import LayerStats
from whorl.train.trainer import RunOptions, StepFunction, Task, Trainer

MAX_EVALUATION_STEPS = 10_000  # per episode
RETURN_WINDOW = 100  # number of episodes in the training return


@dataclass
class TrainingProgress:
    """Progress of a run.

    episodes: number that ended; returns: of the last of them; metrics: of the last rollout, with seconds per phase.
    """

    steps: int = 0
    episodes: int = 0
    seconds: float = 0.0
    returns: deque[float] = field(default_factory=lambda: deque(maxlen=RETURN_WINDOW))
    metrics: dict[str, float] = field(default_factory=dict)

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> TrainingProgress:
        """Restore progress from a checkpoint."""
        return cls(
            state["steps"], state.get("episodes", 0), state["seconds"], deque(state["returns"], RETURN_WINDOW)
        )

    def state_dict(self) -> dict[str, Any]:
        """Return a JSON-serializable dictionary for a checkpoint."""
        own = {"steps": self.steps, "episodes": self.episodes, "seconds": self.seconds}
        return {**own, "returns": list(self.returns)}

    @property
    def mean_return(self) -> float:
        return float(np.mean(self.returns)) if self.returns else float("nan")


def open_method(config: MethodConfig) -> tuple[Method, Any]:
    """Return the method and its untrained networks. The same seed gives the same bits.

    Raises:
        ConfigError: the environment does not exist, or the method or its exploration does not suit it.
    """
    environment = make_env(config.environment, 1)
    environment.close()
    method = make_method(config, environment.spaces)
    Exploration(config.exploration, environment.spaces, 1, method.n_members)  # raises if it does not suit
    return method, method.make_networks(generator(config.seed, "weights"))


def train(
    config: MethodConfig, observe: Callable[[TrainingProgress, Any], None] = lambda progress, networks: None, *,
    scratch: Path | None = None, checkpoint_seconds: float = 30.0, log: Callable[[str], None] = lambda text: None,
    heartbeat_dir: Path | None = None, checkpoint_config: CheckpointConfig | None = None, demonstrations: Any = None,
    reward: Callable[[Tensor], Tensor] | None = None,
) -> Any:  # fmt: skip
    """Train an agent to its last step, from the newest checkpoint if there is one, and return its networks.

    A resumed run is exact if an actor in this process acts in built-in environments. Other environments, and
    environments in other processes, start new episodes.

    Args:
        observe: called after every rollout; may raise `StopTraining`.
        scratch: folder for checkpoints; None writes none.
        checkpoint_seconds: time between checkpoints.
        checkpoint_config: retention and remote storage.
        demonstrations: of an expert, for methods that need them.
        reward: of final observations [..., d], in place of the environment's; episodes keep their true returns.
        heartbeat_dir: where the heartbeat and stack traces of a stall are written; None for neither.

    Raises:
        ConfigError: the environment does not exist or is unsupported.
        ProducerError: an actor failed.
        CheckpointError: the checkpoint in `scratch` has other settings.
    """
    task = AgentTask(config, demonstrations, reward)
    options = RunOptions(  # on one thread: networks this small are slower on more
        scratch=scratch, checkpoint_seconds=checkpoint_seconds, checkpoint_config=checkpoint_config, threads=1,
        heartbeat_dir=heartbeat_dir,
    )  # fmt: skip

    def on_step(_: int, metrics: dict[str, float]) -> None:
        task.progress.metrics = metrics
        observe(task.progress, task.networks)

    Trainer(task, options, StepFunction(on_step, observe), log=log).fit()
    return task.networks


Rollouts = list[dict[str, Tensor]]  # of a training step, each with the fields of `Rollout`


class AgentTask(Task[Rollouts]):
    """Training by one method: a record is the rollouts of a training step."""

    interruptible = ()  # acting changes the environments, and a step is short
    unsupported: ClassVar[Mapping[str, str]] = {
        "replicas": "networks this small gain nothing from replicas; set actors",
        "ema": "actors act with the trained weights",
    }

    def __init__(
        self,
        config: MethodConfig,
        demonstrations: Any = None,
        reward: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.config, self.steps = config, config.n_rollouts
        self.method, self.networks = open_method(config)
        check_source(config, self.method, demonstrations is not None)
        if demonstrations is not None:
            demonstrations.check(config, self.method.spaces)
        self.method.demonstrations, self.reward = demonstrations, reward
        if reward is not None and (self.method.needs_demonstrations or self.method.actors_differentiate):
            what = (
                f"{config.method} does not learn from rewards of the learner's process, and --reward is given"
            )
            raise ConfigError(what, do="leave it out, or use ppo or dqn")
        self.n_actors = max(1, config.actors)
        self.method.make_store(self.n_actors * config.n_envs)
        bonus = config.exploration.bonus
        self.visits = VisitCounts(bonus) if bonus else None
        self.returns, self.progress = EpisodeReturns(self.n_actors, config.n_envs), TrainingProgress()
        self.actor_state: dict[str, Tensor] = {}
        self.local_actors: list[Actor] = []  # actors in this process: their state can be saved

    @property
    def identity(self) -> dict[str, Any]:
        return self.config.model_dump(mode="json")

    def allocate(self, replicas: int) -> SharedState:
        return SharedState.for_updates(self.networks, self.method.make_updates(self.networks))

    def make_learner(self, trainer: Trainer[Rollouts]) -> Learner:
        config, first = self.config, trainer.steps_done
        updates = [
            replace(u, accept_step=trainer.accept_step) for u in self.method.make_updates(self.networks)
        ]
        averages, rounds = self.method.averages(), trainer.rounds_done
        self.learner = Learner(self.networks, updates, trainer.shared, averages=averages, steps_done=rounds)
        seeds = [derive(config.seed, "environment", number, first) for number in range(self.n_actors)]
        self.actors = [Actor(config, seed) for seed in seeds]
        self.local_actors = self.actors if not config.actors else []
        for actor in self.local_actors:
            actor.setup()
            actor.load_state_dict(self.actor_state)
        self.board = Board.from_tensors(self._acted_weights())
        self.sync_weights(first)
        self.started = time.perf_counter() - self.progress.seconds
        return self.learner

    def _acted_weights(self) -> dict[str, Tensor]:
        prefixes = self.method.acted_weights
        return {n: t for n, t in self.learner.weights.items() if n.startswith(prefixes)}

    def make_layer_stats(self, learner: Learner, steps_done: int) -> LayerStats | None:
        if len(learner.updates) != 1 or self.method.actors_differentiate:
            return None
        rows = self.config.n_steps * self.config.n_envs
        return LayerStats(learner, steps=self.steps, batch_rows=rows, steps_done=steps_done)

    @contextmanager
    def batches(self, first: int) -> Iterator[Iterator[Rollouts]]:
        with _make_reader(self, first * self.config.rollouts_per_step) as self.rollouts:
            yield self._steps(first)

    def _steps(self, step: int) -> Iterator[Rollouts]:
        for self.step in itertools.count(step):
            found = []
            for slot in itertools.islice(self.rollouts, self.config.rollouts_per_step):
                self.progress.returns.extend(ended := self.returns.add(slot))
                self.progress.episodes += len(ended)
                self.progress.steps += slot.length
                found.append({name: view.clone() for name, view in slot.tensors().items()})
                if self.reward is not None:
                    found[-1]["reward"] = self.reward(found[-1]["final_observation"])
                if self.visits is not None:
                    found[-1]["reward"] += self.visits.rewards(found[-1]["final_observation"])
                if self.method.store is not None:
                    self.method.store.add(found[-1], first=slot.producer * self.config.n_envs)
            yield found

    def minibatches(self, record: Rollouts) -> Iterator[Sequence[MicroBatch]]:
        rollout = record[0]
        if len(record) > 1:
            rollout = {name: torch.cat([each[name] for each in record], dim=1) for name in rollout}
        return self.method.minibatches(self.networks, rollout, self.step)

    def lr_scale(self, step: int) -> float:
        return self.config.remaining_fraction(step)

    def sync_weights(self, steps_done: int) -> None:
        if self.learner.updates:
            self.board.publish(self._acted_weights(), steps_done)
        else:  # the actors moved the weights
            self.board.read(self.learner.weights)

    def report(self, steps_done: int, metrics: dict[str, float], clock: Stopwatch) -> dict[str, float] | None:
        self.progress.seconds = time.perf_counter() - self.started
        found = super().report(steps_done, metrics, clock) or {}
        return {**found, **self.rollouts.pop_stats().metrics()}

    def tensors(self) -> dict[str, Tensor]:
        actors = {f"actor/{n}": t for actor in self.local_actors for n, t in actor.state_dict().items()}
        store = dict(self.method.store.tensors()) if self.method.store is not None else {}
        if self.visits is not None:
            store["visits"] = self.visits.counts
        own = {f"store/{n}": t for n, t in store.items()}
        return {"returns": self.returns.partial_returns, **own, **actors}

    def state_dict(self) -> dict[str, Any]:
        return self.progress.state_dict()

    def load_state_dict(self, state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        def under(prefix: str) -> dict[str, Tensor]:
            return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}

        self.progress = TrainingProgress.from_state(state)
        self.returns.partial_returns.copy_(tensors["returns"])
        if self.visits is not None:
            self.visits.counts.copy_(tensors["store/visits"])
        if self.method.store is not None:
            self.method.store.load(under("store/"))
        self.actor_state = under("actor/")


def _make_reader(task: AgentTask, first: int) -> FIFOReader[Any]:
    """Return a reader of the actors' rollouts, from number `first`."""
    config, actors, board = task.config, task.actors, task.board
    size = sum(p.numel() for p in task.networks.parameters()) if task.method.actors_differentiate else None
    spec = rollout_spec(task.method.spaces, config.n_envs, config.n_steps, size, task.method.n_outputs)
    ring: SlotRing[Any] = SlotRing(spec, len(actors) * (1 + config.prefetch if config.actors else 1))
    # No `restarts`: a restarted actor would begin new episodes without marking the old ones as truncated. Their returns
    # would be added to those of the new episodes. A killed actor therefore ends the run.
    kind: Any = ProducerProcess if config.actors else SerialProducer
    producers = [kind(ring, actor, seed=config.seed, number=n, board=board) for n, actor in enumerate(actors)]
    order: Literal["sequence", "ready"] = "ready" if config.actors else "sequence"
    return FIFOReader(ring, producers, start=first, order=order, board=board, max_lag=config.max_policy_lag)


class EpisodeReturns:
    """Returns of whole episodes, summed over rollouts that cut them. One partial sum per copy of each actor."""

    def __init__(self, actors: int, num_envs: int) -> None:
        self.partial_returns = torch.zeros(actors, num_envs, dtype=torch.float64)

    def add(self, slot: Slot[Any]) -> list[float]:
        """Return the undiscounted returns of the episodes that ended in this rollout."""
        data, running, finished = slot.data, self.partial_returns[slot.producer].numpy(), []
        ended = data.terminated | data.truncated
        for reward, over in zip(data.reward, ended, strict=True):
            running += reward
            if over.any():
                finished.extend(running[over].tolist())
                running[over] = 0.0
        return finished


@torch.no_grad()
def evaluate(
    config: MethodConfig, networks: Any, episodes: int, seed: int, *, max_steps: int = MAX_EVALUATION_STEPS,
    observe: Callable[[int, int], None] = lambda step, running: None,
) -> list[float]:  # fmt: skip
    """Return undiscounted returns of `episodes` episodes with greedy actions. Each episode runs in a separate copy.

    Args:
        max_steps: steps after which an episode is cut off; a greedy policy may never end one of an environment without
            a time limit.
        observe: called after each step with its number and the number of episodes that have not ended. The last call
            has the number of episodes that were cut off.
    """
    envs = make_env(config.environment, episodes)
    method = make_method(config, envs.spaces)
    if envs.spaces.players == 2:
        points = method.match_points(networks, episodes, seed)
        observe(0, 0)
        return points
    method.start_rollout(networks, episodes)
    act = partial(method.greedy_action, networks)
    returns = run_episodes(envs, act, seed, max_steps=max_steps, observe=observe)
    envs.close()
    return returns


def check_source(config: MethodConfig, method: Method, demonstrations: bool) -> None:
    """Raise ConfigError if demonstrations are given to a method that does not learn from them, or lack for one that does."""
    if method.needs_demonstrations == demonstrations:
        return
    what, do = "learns from rewards, and demonstrations are given", "leave out --from, or use clone"
    if not demonstrations:
        what = "learns from demonstrations, and none are given"
        do = f"whorl rl train {config.method} {config.environment} --from EXPERT"
    raise ConfigError(f"{config.method} {what}", do=do)


def run_episodes(
    envs: Environment, act: Callable[[Tensor], Tensor], seed: int, *, max_steps: int,
    observe: Callable[[int, int], None] = lambda step, running: None,
    keep: Callable[[Tensor, Tensor, Transition, Tensor], Any] = lambda *step: None,
) -> list[float]:  # fmt: skip
    """Return the undiscounted return of one episode of each copy; see `evaluate`.

    Args:
        act: maps observations [B, d] to actions.
        keep: called for each step with its observations, actions and result, and with the copies [B] that still run.
    """
    observation = envs.reset(seed).flatten(1)
    total, running = torch.zeros(envs.num_envs), torch.ones(envs.num_envs, dtype=torch.bool)
    for step in range(1, max_steps + 1):
        transition = envs.step(action := act(observation))
        keep(observation, action, transition, running)
        total += transition.reward * running
        running = running & ~(transition.terminated | transition.truncated)
        observation = transition.observation.flatten(1)
        observe(step, n_running := int(running.sum()))
        if not n_running:
            break
    return total.tolist()
