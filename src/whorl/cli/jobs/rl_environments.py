"""`whorl rl environments`, `methods` and `solve`: two lists, and tabular methods in finite environments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from whorl.cli.options import StoreOption, open_artifact


def solve(
    environment: Annotated[str, typer.Argument(help="A finite environment, e.g. FrozenLake-v1.")],
    methods: Annotated[
        list[str] | None,
        typer.Option("--method", help="policy-iteration, value-iteration, monte-carlo, sarsa, expected-sarsa or "
                     "q-learning; may be repeated. Default: both iterations."),
    ] = None,
    discount: Annotated[float, typer.Option(min=0, max=1, help="Weight of a reward one step later.")] = 0.99,
    episodes: Annotated[int, typer.Option(min=1, help="Episodes of a run that learns.")] = 2_000,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of a method that learns.")] = 5,
    step_size: Annotated[float, typer.Option(min=0, max=1, help="Fraction of the way to each target.")] = 0.1,
    epsilon: Annotated[float, typer.Option(min=0, max=1, help="Probability of a random action.")] = 0.1,
    budget: Annotated[float | None, typer.Option(help="Limit of the discounted cost: adds its best policy.")] = None,
    reward: Annotated[str | None, typer.Option(metavar="REWARD", help="A reward that max-entropy-irl has found.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write a page with the map of values.")] = None,
    store: StoreOption = None,
) -> None:  # fmt: skip
    """Solve a finite environment exactly, or learn action values in it, and print policy and values.

    The return is that of the greedy policy without discount; the distance compares values with the exact ones. With
    --reward, values are those of a learned reward, and returns are the environment's.

    Examples:

        whorl rl solve FrozenLake-v1

        whorl rl solve CliffWalking-v1 --method sarsa --method q-learning --step-size 0.5

        whorl rl solve CostlyGrid-v0 --budget 1 --out costs.html

        whorl rl solve FrozenLake-v1 --reward max-entropy-irl-DryLake-v0
    """
    from whorl.agents.saved_agent import load_reward
    from whorl.agents.tabular import LearningConfig
    from whorl.cli.text_table import print_table
    from whorl.report import Table, render
    from whorl.report.solution import solution_page

    config = LearningConfig(discount, episodes, step_size, epsilon)
    found = (
        None
        if reward is None
        else load_reward(open_artifact(reward, store, ("agents",), "a reward"), environment)
    )
    page = solution_page(environment, methods or [], config, seeds, budget, found)
    for block in page.reports[0][1].blocks:
        print(block.title)
        if isinstance(block, Table):
            print_table(
                [c.name for c in block.columns], [[*map(str, r)] for r in block.rows], ["method", "work"]
            )
        elif block.kind == "heatmap":
            for signs, values in zip(block.signs, block.values, strict=True):
                print(*signs, " ", *(f"{v:8.3f}" if v is not None else " " * 8 for v in values))
        print()
    if out is not None:
        print(f"page: {render(page, out)}")


def environments() -> None:
    """List the environments with built-in tensor dynamics; any other gymnasium name works too.

    Example:

        whorl rl environments
    """
    from whorl.agents import TENSOR_ENVIRONMENTS

    for name, kind in TENSOR_ENVIRONMENTS.items():
        print(f"{name:<16} {(kind.__doc__ or '').strip().splitlines()[0]}")


def methods(
    method: Annotated[str | None, typer.Argument(help="List the settings of this one.")] = None,
) -> None:
    """List the methods, with the actions that each suits; or the settings of one, with their defaults.

    Examples:

        whorl rl methods

        whorl rl methods ppo
    """
    from whorl.agents.methods.registration import METHODS, TUNED_OVERRIDES, parse_config
    from whorl.cli.text_table import print_methods, print_settings

    if method is None:
        print_methods(METHODS, {name: kind.actions for name, kind in METHODS.items()})
        return
    parse_config(method, "CartPole-v1", {})  # raises for an unknown name
    hidden = ("method", "environment", "steps", "seed", *METHODS[method].without_effect)
    print_settings(METHODS[method].Config, hidden)
    for (tuned, environment), settings in TUNED_OVERRIDES.items():
        if tuned == method:
            print(f"{environment} has other defaults: {', '.join(f'{n}={v}' for n, v in settings.items())}")
