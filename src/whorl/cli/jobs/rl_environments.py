"""`whorl rl environments` and `whorl rl solve`: built-in environments, and tabular methods in finite ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


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
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write a page with the map of values.")] = None,
) -> None:  # fmt: skip
    """Solve a finite environment exactly, or learn action values in it, and print policy and values.

    The return is that of the greedy policy without discount; the distance compares values with the exact ones.

    Examples:

        whorl rl solve FrozenLake-v1

        whorl rl solve CliffWalking-v1 --method sarsa --method q-learning --step-size 0.5

        whorl rl solve CostlyGrid-v0 --budget 1 --out costs.html
    """
    from whorl.agents.tabular import LearningConfig
    from whorl.cli.text_table import print_table
    from whorl.report import Table, render
    from whorl.report.solution import solution_page

    config = LearningConfig(discount, episodes, step_size, epsilon)
    page = solution_page(environment, methods or [], config, seeds, budget)
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
