"""The page of `whorl rl solve`: tabular methods in a finite environment, compared with its exact solution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from whorl.agents.environments.registration import make_tables
from whorl.agents.environments.tables import Array, Tables
from whorl.agents.imitation.inverse import reward_table
from whorl.agents.meta.bandit_optimum import FIVE_ARMS, PULLS, RULES, rewards_by_pull
from whorl.agents.seed_statistics import summarize_seeds
from whorl.agents.tabular import (
    ITERATIONS,
    NEXT_VALUES,
    LearningConfig,
    constrained_optimum,
    evaluate_policy,
    expected_total,
    greedy,
    learn,
    policy_iteration,
)
from whorl.errors import ConfigError, one_of
from whorl.report.blocks import Block, Column, HeatMap, StepReport, Table
from whorl.report.data import ReportData

LISTED_STATES = 20  # of an environment without a map


def solution_page(
    environment: str, methods: Sequence[str], config: LearningConfig, seeds: int, budget: float | None = None,
    reward: Callable[[Tensor], Tensor] | None = None,
) -> ReportData:  # fmt: skip
    """Return a table of the methods, and the map of policy and values of the first.

    The return is the exact expected return of the greedy policy, without discount and with the time limit. The distance
    is the root of the mean squared difference from the exact values of reachable states. Methods that learn have the
    interquartile mean of their runs with its 95 % interval.

    Args:
        methods: names of `ITERATIONS` and `NEXT_VALUES`; without any, both iterations.
        config: settings of methods that learn; its discount is that of all.
        budget: adds the best policy of an expected discounted cost of at most this.
        reward: of the states that steps reach, in place of the environment's; returns remain the environment's.

    Raises:
        ConfigError: an unknown method, an environment that is not finite, a budget without costs.
    """
    if environment == "bandits":
        return _bandit_page()
    known = [*ITERATIONS, *NEXT_VALUES]
    for name in methods:
        if name not in known:
            raise ConfigError(f"unknown method {name!r}", expected=one_of(name, known))
    true, methods = make_tables(environment), methods or [*ITERATIONS]
    tables = true
    if reward is not None:
        if not ITERATIONS.keys() >= {*methods}:
            what = "a learned reward is solved from tables, and other methods learn from steps"
            raise ConfigError(what, expected=f"--method {' or '.join(ITERATIONS)}")
        rewards = reward(torch.eye(len(true.terminal))).double().numpy()
        tables = replace(true, reward=reward_table(true, rewards))
    exact = policy_iteration(tables, config.discount).values
    rows, shown = list[list[str]](), list[Array]()
    for name in methods:
        if name in ITERATIONS:
            solution = ITERATIONS[name](tables, config.discount)
            learned, work = [solution.action_values], f"{solution.iterations} iterations"
        else:
            learned = list(learn(environment, tables, name, config, seeds))
            work = f"{seeds} x {config.episodes:,} episodes"
        shown.append(learned[0])
        policies = [tables.policy(greedy(q)) for q in learned]
        rows.append([name, work, *_measures(true, policies, [q.max(axis=1) for q in learned], exact)])
    if budget is not None:
        policy = constrained_optimum(tables, config.discount, budget)
        values = evaluate_policy(tables, policy, config.discount)
        rows.append([f"cost up to {budget:g}", "linear program", *_measures(true, [policy], [values], exact)])
    cost = ["cost"] if tables.cost is not None else []
    columns = [Column(name=name) for name in ("method", "work")]
    columns += [Column(name=name, number=True) for name in ("start value", "return", *cost, "distance")]
    title = f"{environment}: {len(exact)} states, {shown[0].shape[1]} actions, discount {config.discount:g}"
    first = methods[0] + (", seed 0" if methods[0] in NEXT_VALUES else "")
    blocks: list[Block] = [
        Table(title=title, columns=columns, rows=[[*row] for row in rows]),
        _map(tables, shown[0], first),
    ]
    return ReportData(title=environment, reports=[("Solution", StepReport(blocks=blocks))])


def _bandit_page() -> ReportData:
    """Return the exact expected rewards of the optimum and of the arm with the highest mean, in all and by pull."""
    names = ("method", "return", *(f"pull {number}" for number in range(1, PULLS + 1)))
    found = {rule: rewards_by_pull(FIVE_ARMS, PULLS, rule) for rule in RULES}
    rows = [[rule, f"{each.sum():.4f}", *(f"{x:.3f}" for x in each)] for rule, each in found.items()]
    columns = [Column(name=name, number=name != "method") for name in names]
    table = Table(title="bandits: expected reward", columns=columns, rows=[[*row] for row in rows])
    return ReportData(title="bandits", reports=[("Solution", StepReport(blocks=[table]))])


def _measures(tables: Tables, policies: Sequence[Array], values: Sequence[Array], exact: Array) -> list[str]:
    """Return the start value, return, cost and distance of runs, as displayed."""
    found = [
        [float(tables.initial @ v) for v in values],
        [expected_total(tables, policy, tables.reward) for policy in policies],
        [float(((v - exact)[tables.reachable] ** 2).mean() ** 0.5) for v in values],
    ]
    if tables.cost is not None:
        found.insert(2, [expected_total(tables, policy, tables.cost) for policy in policies])
    return [_displayed(runs) for runs in found]


def _displayed(runs: Sequence[float]) -> str:
    """Return one value, or the interquartile mean of several with its interval."""
    if len(runs) == 1:
        return f"{runs[0]:.4f}" if abs(runs[0]) > 5e-5 else f"{runs[0]:.0e}" if runs[0] else "0"
    found = summarize_seeds([runs], np.random.default_rng(0))
    return f"{found.mean:.4f} ({found.low:.4f} to {found.high:.4f})"


def _map(tables: Tables, action_values: Array, method: str) -> HeatMap | Table:
    """Return the best move and the value of each cell, and the letter of a terminal or unreachable one.

    Without a map, return a table of the first states.
    """
    best, reachable = greedy(action_values), tables.reachable
    if not tables.rows:
        columns = [Column(name=name, number=True) for name in ("state", "action", "value")]
        listed = range(min(LISTED_STATES, len(best)))
        rows = [[str(s), str(best[s]), f"{action_values[s].max():.4f}"] for s in listed]
        return Table(
            title=f"Values of {method}, first {len(rows)} states", columns=columns, rows=[[*r] for r in rows]
        )
    width = len(tables.rows[0])
    signs = [tables.arrows[best[s]][s] if reachable[s] else c for s, c in enumerate("".join(tables.rows))]
    values = [float(action_values[s].max()) if reachable[s] else None for s in range(len(signs))]
    starts = range(0, len(signs), width)
    return HeatMap(
        title=f"Policy and values of {method}", values=[values[i : i + width] for i in starts],
        signs=[signs[i : i + width] for i in starts],
    )  # fmt: skip
