"""Read what the steps `agents` and `demonstrations` stored: results, networks, values of a grid, returns of episodes."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from whorl.agents.environments.registration import make_env
from whorl.agents.imitation.demonstrations import FILE, RESULT, Demonstrations, Policy
from whorl.agents.imitation.inverse import MaxEntropyIRL
from whorl.agents.imitation.inverse import recovered as recovered
from whorl.agents.meta.adaptation import returns_by_episode as returns_by_episode
from whorl.agents.methods.method import MethodConfig
from whorl.agents.methods.registration import make_method, parse_config
from whorl.agents.task import open_method
from whorl.errors import ConfigError
from whorl.store import Artifact, Store


def read_result(artifact: Artifact) -> dict[str, Any]:
    """Return the result.json of an agent.

    Raises:
        ConfigError: the artifact is no agent.
    """
    if artifact.kind != "agents":
        raise ConfigError(
            f"{artifact.name} is of the kind {artifact.kind}", expected="an agent",
            do="train one with `whorl rl train`, or list the artifacts with `whorl ls`",
        )  # fmt: skip
    artifact.check()
    found: dict[str, Any] = json.loads(artifact.file("result.json").read_text())
    return found


def load_agent(artifact: Artifact, seed: int | None = None) -> tuple[MethodConfig, Any]:
    """Return the settings and the networks of one seed; by default of the seed with the highest return.

    Raises:
        ConfigError: the artifact is no agent, or has no such seed.
    """
    from safetensors.torch import load_file

    result = read_result(artifact)
    seeds = range(result["seed"], result["seed"] + result["seeds"])
    if seed is None:
        seed = seeds[int(np.argmax(result["returns"]))]
    if seed not in seeds:
        given = ", ".join(map(str, seeds))
        raise ConfigError(f"{artifact.name} has no seed {seed}", expected=f"one of: {given}")
    changes = {**result["settings"], "steps": result["steps"], "seed": seed}
    config = parse_config(result["method"], result["environment"], changes)
    return config, restore_networks(config, load_file(artifact.file(f"seed-{seed}.safetensors")))


def expert_policy(
    config: MethodConfig, networks: Any, copies: int = 1, generator: torch.Generator | None = None
) -> Policy:
    """Return the greedy policy of an agent, or with a generator the one that draws its actions.

    Action vectors are within their bounds, as the environment gets them.
    """
    method, _ = open_method(config)
    method.start_rollout(networks, copies)
    low, high = map(torch.tensor, (method.spaces.action_low, method.spaces.action_high))

    @torch.no_grad()
    def act(observation: torch.Tensor) -> torch.Tensor:
        if generator is None:
            action = method.greedy_action(networks, observation)
        elif method.spaces.n_actions is not None:
            noise = torch.rand(len(observation), generator=generator)
            action, _ = method.act(networks, observation, noise)
        else:
            noise = torch.randn(len(observation), method.spaces.action_size, generator=generator)
            action, _ = method.act(networks, observation, noise)
        return action if method.spaces.n_actions is not None else action.clamp(low, high)

    return act


def load_reward(artifact: Artifact, environment: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the reward [...] of observations [..., d] that inverse RL has found, for use in an environment.

    Raises:
        ConfigError: the artifact has no reward, or one of other observations.
    """
    config, networks = load_agent(artifact)
    method, _ = open_method(config)
    if not isinstance(method, MaxEntropyIRL):
        raise ConfigError(
            f"{artifact.name} was trained by {config.method}: it has no reward", expected="a reward",
            do="whorl rl train max-entropy-irl ENVIRONMENT --from EXPERT",
        )  # fmt: skip
    (other := make_env(environment, 1)).close()
    given, wanted = method.spaces.observation_shape, other.spaces.observation_shape
    if given != wanted:
        what = f"{artifact.name} is a reward of observations of shape {given}, and {environment} has {wanted}"
        raise ConfigError(what, expected=f"a reward of an environment like {environment}")
    return torch.no_grad()(partial(method.state_rewards, networks))


def load_demonstrations(artifact: Artifact, store: Store) -> Demonstrations:
    """Return recorded episodes. Their expert is the agent among the artifact's parents, if the store still has it."""
    from safetensors.torch import load_file

    artifact.check()
    found = json.loads(artifact.file(RESULT).read_text())
    agent = store.find(artifact.parents["expert"])
    expert = None if agent is None else expert_policy(*load_agent(agent, artifact.config["seed"]))
    steps = load_file(artifact.file(FILE))
    return Demonstrations(found["environment"], found["lengths"], steps, found["random_return"], expert)


def restore_networks(config: MethodConfig, parameters: dict[str, torch.Tensor]) -> Any:
    """Return networks with these parameters by name; buffers have their first values."""
    _, networks = open_method(config)
    expected = {name: tuple(p.shape) for name, p in networks.named_parameters()}
    if expected != (found := {name: tuple(t.shape) for name, t in parameters.items()}):
        names = sorted({name for name, _ in expected.items() ^ found.items()})
        raise ConfigError(
            f"{config.method} in {config.environment}: the stored networks have other parameters, such as {names[0]}",
            expected="an agent of this version", do="train it again",
        )  # fmt: skip
    networks.load_state_dict({**networks.state_dict(), **parameters})
    return networks


@torch.no_grad()
def value_map(config: MethodConfig, networks: Any) -> dict[str, list[list[Any]]] | None:
    """Return {"values", "arrows"} of a grid's cells, [rows][columns], with None where no step begins.

    None if the environment is no grid, or the method has no values.
    """
    environment = make_env(config.environment, 1)
    tables, method = environment.tables(), make_method(config, environment.spaces)
    environment.close()
    if tables is None or not tables.rows:
        return None
    states = torch.eye(len(tables.terminal))
    values = method.values(networks, states)
    if values is None:
        return None
    actions, width, letters = (
        method.greedy_action(networks, states),
        len(tables.rows[0]),
        "".join(tables.rows),
    )
    ends = [bool(tables.terminal[s]) or letter == "C" for s, letter in enumerate(letters)]
    numbers = [None if end else value for end, value in zip(ends, values.tolist(), strict=True)]
    signs = [letters[s] if ends[s] else tables.arrows[a][s] for s, a in enumerate(actions.tolist())]
    starts = range(0, len(letters), width)
    return {
        "values": [numbers[i : i + width] for i in starts],
        "arrows": [signs[i : i + width] for i in starts],
    }
