"""Golden cases of the agents: 20 rollouts of the built-in CartPole for each algorithm."""

from __future__ import annotations

from functools import partial

from golden_case import Result, case, weight_hash

from whorl.agents.methods.registration import make_config
from whorl.agents.task import TrainingProgress, train

CHANGES: dict[str, dict[str, object]] = {
    "a2c": {"steps": 20 * 16 * 8},
    "ppo": {"steps": 20 * 16 * 16, "n_steps": 16, "n_epochs": 2, "minibatches": 4},
    "impala": {"steps": 20 * 16 * 8, "actors": 1, "prefetch": 0},  # one actor process in lockstep
}


def _agent(algorithm: str) -> Result:
    curve: list[float] = []

    def observe(progress: TrainingProgress, networks: object) -> None:
        curve.append(progress.metrics["loss"])

    networks = train(make_config(algorithm, "CartPole-v1", hidden=(16,), **CHANGES[algorithm]), observe)
    return Result(bits={"weights": weight_hash(networks)}, curve=curve)


for _name in CHANGES:
    case(_name)(partial(_agent, _name))
