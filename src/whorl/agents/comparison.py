"""Compare agents that the step `agents` trained: returns over seeds, on one environment or on several.

On one environment the scores are raw returns. On several, returns of each environment are scaled so that the lowest run
of all agents has 0 and the highest has 1. Normalised scores therefore depend on the set of agents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from whorl.agents.saved_agent import read_result
from whorl.agents.seed_statistics import (
    SeedSummary,
    SummaryCurve,
    interquartile_curve,
    performance_profile,
    probability_of_improvement,
    summarize_seeds,
)
from whorl.errors import ConfigError
from whorl.store import Artifact

MAX_AGENTS = 6  # that a chart can show in distinct colours
PROFILE_POINTS = 101


@dataclass(frozen=True)
class TrainedAgent:
    """One artifact. name: in tables; result: its result.json."""

    name: str
    artifact: str
    result: dict[str, Any]

    @property
    def environment(self) -> str:
        return str(self.result["environment"])

    @property
    def returns(self) -> list[float]:
        return list(self.result["returns"])


@dataclass(frozen=True)
class AgentComparison:
    """The statistics of several agents by name.

    agents: in the order given. scores: returns, or normalised returns of all environments.
    returns: (name, environment) -> interquartile mean of raw returns. curves: environment -> name -> return over steps.
    improvement: (one, other) -> probability that a run of the one beats a run of the other.
    """

    agents: Sequence[TrainedAgent]
    scores: dict[str, SeedSummary]
    returns: dict[tuple[str, str], SeedSummary]
    curves: dict[str, dict[str, SummaryCurve]]
    profiles: dict[str, SummaryCurve]
    improvement: dict[tuple[str, str], SeedSummary]

    @property
    def environments(self) -> list[str]:
        return [*dict.fromkeys(agent.environment for agent in self.agents)]

    @property
    def names(self) -> list[str]:
        return [*dict.fromkeys(agent.name for agent in self.agents)]


def read_agents(artifacts: Sequence[Artifact]) -> list[TrainedAgent]:
    """Return the agents of artifacts, named by method; agents of one method by the settings that differ, too.

    Raises:
        ConfigError: an artifact is no agent or occurs twice.
    """
    results = [read_result(artifact) for artifact in artifacts]
    if len({artifact.address for artifact in artifacts}) < len(artifacts):
        raise ConfigError("an agent is given twice", expected="different artifacts")
    agents = []
    for artifact, result in zip(artifacts, results, strict=True):
        same = [r for r in results if all(r[n] == result[n] for n in ("method", "environment"))]
        settings = [{**_flat(r["settings"]), **{n: r[n] for n in ("steps", "seeds", "seed")}} for r in same]
        mine = settings[next(i for i, other in enumerate(same) if other is result)]
        differing = [f"{n}={v}" for n, v in mine.items() if any(s.get(n) != v for s in settings)]
        agents.append(TrainedAgent(" ".join([result["method"], *differing]), artifact.label, result))
    return agents


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of nested tables under dotted names."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        nested = isinstance(value, Mapping)
        found |= {f"{name}.{n}": v for n, v in _flat(value).items()} if nested else {name: value}
    return found


def compare(agents: Sequence[TrainedAgent], rng: np.random.Generator) -> AgentComparison:
    """Return the statistics of two agents or more.

    Raises:
        ConfigError: fewer than two agents or too many, different numbers of evaluation episodes, or an agent that lacks
            an environment.
    """
    names = [*dict.fromkeys(agent.name for agent in agents)]
    environments = [*dict.fromkeys(agent.environment for agent in agents)]
    if not 2 <= len(names) <= MAX_AGENTS:
        raise ConfigError(f"{len(names)} agents to compare", expected=f"2 to {MAX_AGENTS}")
    if len({agent.result["episodes"] for agent in agents}) > 1:
        each = ", ".join(f"{agent.artifact} {agent.result['episodes']}" for agent in agents)
        raise ConfigError(
            f"the agents have different numbers of evaluation episodes: {each}", expected="the same number",
            do="train with the same --episodes",
        )  # fmt: skip
    found = {(agent.name, agent.environment): agent for agent in agents}
    for name in names:
        for environment in environments:
            if (name, environment) not in found:
                raise ConfigError(
                    f"there is no agent {name} on {environment}", expected="every method on every environment",
                    do=f"give it, or compare on one environment: {', '.join(environments)}",
                )  # fmt: skip
    tasks = {n: [found[n, e].returns for e in environments] for n in names}
    if len(environments) > 1:
        tasks = {n: [_scaled(found[n, e], agents) for e in environments] for n in names}
    every = np.concatenate([scores for each in tasks.values() for scores in each])
    thresholds = np.linspace(every.min(), every.max(), PROFILE_POINTS)
    return AgentComparison(
        agents,
        {name: summarize_seeds(scores, rng) for name, scores in tasks.items()},
        {key: summarize_seeds([agent.returns], rng) for key, agent in found.items()},
        {e: {n: c for n in names if (c := return_curve(found[n, e].result, rng))} for e in environments},
        {name: performance_profile(scores, thresholds, rng) for name, scores in tasks.items()},
        {(a, b): probability_of_improvement(tasks[a], tasks[b], rng) for a, b in combinations(names, 2)},
    )  # fmt: skip


def return_curve(
    result: dict[str, Any], rng: np.random.Generator, metric: str = "return"
) -> SummaryCurve | None:
    """Return the curve of a metric over the seeds of a result.json; None if a seed has none."""
    curves = [curve[metric] for curve in result["curves"]]
    if not all(curves):
        return None
    return interquartile_curve([([x for x, _ in curve], [y for _, y in curve]) for curve in curves], rng)


def _scaled(agent: TrainedAgent, agents: Sequence[TrainedAgent]) -> list[float]:
    """Return the place of an agent's returns between the lowest and the highest of all agents on its environment."""
    every = [r for other in agents if other.environment == agent.environment for r in other.returns]
    low, high = min(every), max(every)
    return [(r - low) / (high - low) if high > low else 0.5 for r in agent.returns]
