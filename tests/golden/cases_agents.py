"""Golden cases of the agents: some rollouts of CartPole or Pendulum by each method."""

from __future__ import annotations

from functools import partial

from golden_case import Result, case, weight_hash

from whorl.agents.methods.registration import parse_config
from whorl.agents.task import TrainingProgress, train

CHANGES: dict[str, dict[str, object]] = {
    "a2c": {"steps": 20 * 16 * 8},
    "ppo": {"steps": 20 * 16 * 16, "n_steps": 16, "n_epochs": 2, "minibatches": 4},
    "impala": {"steps": 20 * 16 * 8, "actors": 1, "prefetch": 0},  # one actor process in lockstep
    "reinforce": {"steps": 10 * 4 * 64, "n_envs": 4, "n_steps": 64},
    "a3c": {"steps": 20 * 16 * 8, "actors": 1, "prefetch": 0},
    "trpo": {"steps": 10 * 4 * 16, "n_envs": 4, "n_steps": 16},
    "cpo": {"environment": "CostlyGrid-v0", "steps": 10 * 4 * 16, "n_envs": 4, "n_steps": 16},
    "dqn": {
        "steps": 800,
        "n_steps": 16,
        "learning_starts": 200,
        "batch_size": 16,
        "priority_exponent": 0.5,
        "n_step": 3,
    },
    "ddpg": {"environment": "Pendulum-v1", "steps": 400, "learning_starts": 200, "batch_size": 16},
    "td3": {"environment": "Pendulum-v1", "steps": 400, "learning_starts": 200, "batch_size": 16},
    "sac": {"environment": "Pendulum-v1", "steps": 400, "learning_starts": 200, "batch_size": 16},
}


def _agent(method: str) -> Result:
    curve: list[float] = []
    settings = {"environment": "CartPole-v1", "hidden": (16,), **CHANGES[method]}

    def observe(progress: TrainingProgress, networks: object) -> None:
        if "loss" in progress.metrics:
            curve.append(progress.metrics["loss"])

    networks = train(parse_config(method, str(settings.pop("environment")), settings), observe)
    return Result(bits={"weights": weight_hash(networks)}, curve=curve)


for _name in CHANGES:
    case(_name)(partial(_agent, _name))
