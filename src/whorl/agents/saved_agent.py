"""Read an agent that the step `agents` stored: its result, its networks, and the values of a grid's cells."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch

from whorl.agents.environments.registration import make_env
from whorl.agents.methods.method import MethodConfig
from whorl.agents.methods.registration import make_method, parse_config
from whorl.agents.task import open_method
from whorl.errors import ConfigError
from whorl.store import Artifact


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


def restore_networks(config: MethodConfig, parameters: dict[str, torch.Tensor]) -> Any:
    """Return networks with these parameters by name; buffers have their first values."""
    _, networks = open_method(config)
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
