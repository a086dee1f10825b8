"""Methods by name, and their settings for an environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from whorl.agents.imitation import IMITATION
from whorl.agents.meta import META_METHODS
from whorl.agents.methods.a2c import A2C
from whorl.agents.methods.a3c import A3C
from whorl.agents.methods.cpo import CPO
from whorl.agents.methods.ddpg import DDPG, TD3
from whorl.agents.methods.dqn import DQN
from whorl.agents.methods.impala import IMPALA
from whorl.agents.methods.method import Method, MethodConfig
from whorl.agents.methods.ppo import PPO
from whorl.agents.methods.reinforce import REINFORCE
from whorl.agents.methods.sac import SAC
from whorl.agents.methods.trpo import TRPO
from whorl.agents.search import SEARCH_METHODS
from whorl.errors import ConfigError, one_of, settings_error

METHODS: dict[str, type[Method]] = {
    kind.Config.model_fields["method"].default: kind
    for kind in (
        REINFORCE, A2C, A3C, PPO, IMPALA, TRPO, CPO, DQN, DDPG, TD3, SAC, *IMITATION, *META_METHODS, *SEARCH_METHODS
    )
}  # fmt: skip

# Tuned settings per environment (LOG.md has the experiments).
_DQN = {
    "n_steps": 64, "updates_per_step": 0.5, "batch_size": 64, "n_step": 3, "target_every": 128, "anneal": True,
    "exploration": {"fraction": 0.16, "end": 0.04},
}  # fmt: skip
TUNED_OVERRIDES: dict[tuple[str, str], dict[str, Any]] = {
    ("ppo", "CartPole-v1"): {
        "n_steps": 32, "hidden": (32,), "discount": 0.98, "gae_lambda": 0.85, "n_epochs": 8, "minibatches": 3,
        "learning_rate": 0.014, "clip_norm": 1.0,
    },
    ("ppo", "Pendulum-v1"): {"discount": 0.9, "learning_rate": 3e-3},
    ("dqn", "CartPole-v1"): _DQN,
    ("dqn", "Acrobot-v1"): {**_DQN, "steps": 100_000},
    ("rl2", "bandits"): {
        "discount": 1.0, "gae_lambda": 0.3, "learning_rate": 8e-3, "n_envs": 1000, "n_epochs": 4,
        "steps": 1_500_000,
    },
    ("rl2", "GoalGrid-v0"): {
        "n_steps": 128, "n_envs": 64, "gae_lambda": 0.9, "entropy_coef": 3e-3, "steps": 2_000_000,
    },
    **{(method, f"GoalGrid{kind}-v0"): {"n_steps": 26} for method in ("rl2", "one-shot") for kind in ("Demo", "HeldOut")},
    ("alphazero", "tictactoe"): {
        "steps": 60_000, "actors": 0, "n_envs": 64, "hidden": (32,), "capacity": 40_000, "learning_starts": 500, "n_step": 9,
        "learning_rate": 5e-3, "updates_per_step": 0.12, "batch_size": 256, "simulations": 25, "opening_moves": 3,
        "random_moves": 0.6, "search_value": 1.0, "opponent_simulations": 100,
    },
    ("gail", "Pendulum-v1"): {"discount": 0.9},
    **{(method, "Pendulum-v1"): {"hidden": (64, 64)} for method in ("ddpg", "td3", "sac")},
}  # fmt: skip


def make_config(method: str, environment: str, **changes: object) -> MethodConfig:
    """Return a method's settings for an environment, with `changes` applied; `exploration` may hold some of its fields."""
    config_type = METHODS[method].Config
    settings = {**TUNED_OVERRIDES.get((method, environment), {}), "environment": environment}
    exploration = config_type.model_fields["exploration"].default.model_dump() | settings.get(
        "exploration", {}
    )
    given = changes.get("exploration", {})
    changes["exploration"] = exploration | given if isinstance(given, Mapping) else given
    return config_type.model_validate(settings | changes)


def make_method(config: MethodConfig, spaces: Any) -> Method:
    """Return the method of these settings.

    Raises:
        ConfigError: it does not suit the environment.
    """
    return METHODS[config.method](config, spaces)


def parse_config(method: str, environment: str, changes: Mapping[str, object]) -> MethodConfig:
    """Return a method's settings with changes by field. Strings are parsed as the field's type.

    Raises:
        ConfigError: unknown method or field, or an invalid value.
    """
    if method not in METHODS:
        raise ConfigError(f"unknown method {method!r}", expected=one_of(method, list(METHODS)))
    config_type, do = METHODS[method].Config, f"see `whorl rl methods {method}`"
    for name, value in changes.items():
        if name in ("method", "environment"):
            raise ConfigError(f"{method}: {name} is no setting", do=do)
        if name in METHODS[method].without_effect and value != config_type.model_fields[name].default:
            raise ConfigError(f"the setting {name!r} has no effect in {method}", do="remove it")
    try:
        return make_config(method, environment, **changes)
    except ValidationError as error:
        raise settings_error(error.errors()[0], method, config_type, do) from error
