"""Training of agents: bitwise equal runs, resumption, learning, and failing actors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.children import children

from whorl.agents import Environment
from whorl.agents import task as training
from whorl.agents.environments.registration import make_env
from whorl.agents.methods.method import MethodConfig
from whorl.agents.methods.registration import make_config, make_method
from whorl.agents.networks import ActorCritic
from whorl.agents.rollout import Actor, rollout_spec
from whorl.agents.task import TrainingProgress, evaluate, train
from whorl.errors import ConfigError, ProducerError
from whorl.slots import Board, FIFOReader, ProducerProcess, SerialProducer, SlotRing
from whorl.train.learner.loop import StopTraining

Observer = Callable[[TrainingProgress, ActorCritic], None]


def weights(config: MethodConfig) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in train(config).named_parameters()}


def make_board(name: str, num_envs: int) -> tuple[Environment, ActorCritic, Board]:
    """An environment, untrained networks of width 8, and a board with their weights."""
    environment = make_env(name, num_envs)
    networks = ActorCritic(environment.spaces, (8,), torch.Generator().manual_seed(0))
    return environment, networks, Board.from_tensors(dict(networks.named_parameters()))


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[n], b[n]) for n in a)


def test_train_is_deterministic_per_seed() -> None:
    config = make_config("ppo", "CartPole-v1", steps=1024, n_epochs=2, minibatches=4)
    first = weights(config)
    assert same(first, weights(config)) and not same(first, weights(config.model_copy(update={"seed": 1})))


def test_impala_without_v_trace_in_lockstep_equals_a2c() -> None:
    impala = make_config("impala", "CartPole-v1", steps=2048, actors=1, prefetch=0, v_trace=False)
    assert same(weights(impala), weights(make_config("a2c", "CartPole-v1", steps=2048)))


def test_impala_in_lockstep_equals_serial_impala() -> None:
    """One actor process with a single slot is filled after the last one is read."""
    impala = make_config("impala", "CartPole-v1", steps=2048, actors=0)
    assert same(weights(impala), weights(impala.model_copy(update={"actors": 1, "prefetch": 0})))


def test_actor_process_equals_serial_actor() -> None:
    environment, networks, board = make_board("Pendulum-v1", 3)
    spec = rollout_spec(environment.spaces, 3, 5)
    config = make_config("a2c", "Pendulum-v1", n_envs=3, n_steps=5, hidden=(8,))

    def records(kind: type) -> list[dict[str, torch.Tensor]]:
        ring = SlotRing(spec, 1, poison=True)
        with FIFOReader(ring, [kind(ring, Actor(config, 7), seed=1, board=board)]) as drain:
            return [{n: t.clone() for n, t in next(drain).tensors().items()} for _ in range(4)]

    line, process = records(SerialProducer), records(ProducerProcess)
    for a, b in zip(line, process, strict=True):
        assert all(torch.equal(a[n], b[n]) for n in a)
        assert not any(t.isnan().any() for t in a.values() if t.is_floating_point())
        output = networks.policy(a["observation"][:-1])
        assert torch.allclose(networks.log_prob(output, a["action"]), a["behaviour_log_prob"], atol=1e-5)
    assert torch.equal(line[0]["observation"][-1], line[1]["observation"][0])


def test_restored_observations_keep_their_layout() -> None:
    """CartPole's observations are a transposed state: the contiguous ones of a checkpoint changed products' last bits."""
    actor, restored = Actor(config := make_config("ppo", "CartPole-v1", n_envs=2), 1), Actor(config, 2)
    actor.setup()
    restored.setup()
    restored.load_state_dict({name: t.clone().contiguous() for name, t in actor.state_dict().items()})
    assert torch.equal(restored._observation, actor._observation)
    assert restored._observation.stride() == actor._observation.stride() == (1, 2)


def test_truncation_bootstraps_from_final_observation() -> None:
    config = make_config("a2c", "CartPole-v1", n_envs=4, n_steps=60, hidden=(8,))
    environment, networks, board = make_board("CartPole-v1", 4)
    actor = Actor(config, 7)
    actor.setup()
    actor._envs.max_episode_steps = 20  # type: ignore[attr-defined]
    actor._observation = actor._envs.reset(7).flatten(1)
    ring = SlotRing(rollout_spec(environment.spaces, 4, 60), 1)
    record = next(FIFOReader(ring, [SerialProducer(ring, actor, board=board)])).tensors()
    assert record["truncated"].any() and record["terminated"].any()
    target = make_method(config, environment.spaces).estimate_advantages(networks, record)["target"]  # type: ignore[attr-defined]
    cut = record["truncated"] & ~record["terminated"]
    bootstrapped = 1.0 + config.discount * networks.values(record["final_observation"][cut]).detach()
    torch.testing.assert_close(target[cut], bootstrapped, rtol=1e-4, atol=1e-5)
    assert target[record["terminated"]].tolist() == pytest.approx([1.0] * int(record["terminated"].sum()))


def test_episode_returns_sum_over_rollouts() -> None:
    environment = make_env("MountainCar-v0", 2)
    ring = SlotRing(rollout_spec(environment.spaces, 2, 3), 1)
    returns, ended = training.EpisodeReturns(1, 2), []
    slot = ring.slots[0]
    slot.data.reward[:] = [[1, 10], [1, 10], [1, 10]]
    for truncated in ([[0, 0], [1, 0], [0, 0]], [[0, 0], [0, 1], [1, 0]]):
        slot.data.truncated[:] = np.array(truncated, bool)
        slot.data.terminated[:] = False
        ended += returns.add(slot)
    assert ended == [2, 50, 4]


@pytest.mark.parametrize(("method", "bar"), [("ppo", 300), ("a2c", 200), ("impala", 200)])
def test_train_learns_cartpole(method: str, bar: float) -> None:
    config, best = make_config(method, "CartPole-v1", steps=120_000), 0.0

    def mean_return(networks: ActorCritic) -> float:
        return float(np.mean(evaluate(config, networks, 20, 123)))

    def observe(progress: TrainingProgress, networks: ActorCritic) -> None:
        nonlocal best
        if len(progress.returns) == 100:
            best = max(best, progress.mean_return)
            if best >= bar:
                raise StopTraining

    untrained, trained = mean_return(training.open_method(config)[1]), mean_return(train(config, observe))
    assert untrained < 60 and best >= bar and trained > 2 * untrained


def test_train_updates_every_parameter_continuous() -> None:
    config = make_config("ppo", "Pendulum-v1", steps=2048, n_epochs=2)
    before = weights(config.model_copy(update={"steps": 1, "learning_rate": 1e-12}))
    after = weights(config)
    assert not any(torch.equal(before[n], after[n]) for n in after)


def test_train_rejects_bad_config() -> None:
    with pytest.raises(ConfigError, match="unknown environment"):
        train(make_config("ppo", "Nothing-v0"))
    with pytest.raises(ValueError, match="minibatches"):
        make_config("ppo", "CartPole-v1", minibatches=1000)


class _Crash(Exception):
    pass


def crash_at(steps: int) -> Observer:
    """Return an observer that raises after that many steps, so that there is no final checkpoint."""

    def observe(progress: TrainingProgress, networks: ActorCritic) -> None:
        if progress.steps >= steps:
            raise _Crash

    return observe


def test_resumed_run_equals_uninterrupted_run(tmp_path: Path) -> None:
    config = make_config("ppo", "CartPole-v1", steps=3000, hidden=(16,))
    straight, parts, messages = list[float](), list[float](), list[str]()
    whole = train(config, lambda progress, _: straight.append(progress.mean_return))
    resumable = partial(train, config, scratch=tmp_path, log=messages.append)
    for stop in (1000, 2000):
        with pytest.raises(_Crash):
            resumable(crash_at(stop), checkpoint_seconds=0.0)
    last = resumable(lambda progress, _: parts.append(progress.mean_return))
    assert len(messages) == 2 and all("continues at step" in text for text in messages)
    assert same(dict(whole.state_dict()), dict(last.state_dict()))
    assert parts == straight[-len(parts) :] and len(parts) < len(straight)


def test_resumed_async_run_starts_new_episodes(tmp_path: Path) -> None:
    config = make_config("impala", "CartPole-v1", steps=3000, hidden=(16,))
    with pytest.raises(_Crash):
        train(config, crash_at(1500), scratch=tmp_path, checkpoint_seconds=0.0)
    steps: list[int] = []
    train(config, lambda progress, _: steps.append(progress.steps), scratch=tmp_path)
    assert steps[0] == 1536 + config.rollout_steps and steps[-1] >= 3000


def test_killed_actor_raises_and_leaves_no_process() -> None:
    def kill(progress: TrainingProgress, networks: ActorCritic) -> None:
        if progress.steps == 2 * 128:
            children("producer")[-1].kill()

    with pytest.raises(ProducerError, match="SIGKILL"):
        train(make_config("impala", "CartPole-v1", steps=200_000, hidden=(16,)), kill)
    assert not children("producer")
