"""`whorl plan study`: a scaling law of the user's own tokens."""

from __future__ import annotations

from typing import Annotated

import typer

from whorl.cli.options import StoreOption


def study(
    tokens: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|TOKENS", help="A recipe, whose tokens are made first, or an artifact of tokens."
        ),
    ] = "quickstart",
    budget: Annotated[
        str, typer.Option(help="Of all runs together: a time (30m) or FLOPs (1e15flops).")
    ] = "30m",
    grids: Annotated[
        bool,
        typer.Option("--grids", help="Find learning rate and critical batch, too: a quarter of the budget."),
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the runs.")] = 0,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="As of `whorl run`; needs FLOPs.")
    ] = False,
    store: StoreOption = None,
) -> None:
    """Train small runs on your tokens, and fit a scaling law to their losses; with a page. Interrupted, it continues.

    Examples:

        whorl plan study quickstart --budget 30m

        whorl plan study mine/tokens --budget 1e15flops --deterministic --grids
    """
    from whorl.cli.options import open_artifact
    from whorl.cli.text_table import print_blocks
    from whorl.recipes import Recipe, load_recipe, parse_recipe, ready_recipes, run_recipe
    from whorl.report.blocks import REPORT_FILE, StepReport
    from whorl.store import Store
    from whorl.tracking.progress import Progress

    def recipe(name: str, refs: str) -> Recipe:
        text = f'uses = "study"\nfrom = {{{refs}}}\nseed = {seed}\ngrids = {str(grids).lower()}'
        text = f'name = "{name}-study"\n[steps.law]\n{text}'
        return parse_recipe(text, "study", budget=budget, deterministic=deterministic)

    roles, expected = ("documents", "selection"), "a recipe, or an artifact of the kind tokens"
    # Wrong settings are refused before a step runs.
    recipe("any", ", ".join(f'{role} = "any/tokens"' for role in ("tokens", *roles)))
    opened, progress = Store(store), Progress()
    if tokens.endswith(".toml") or tokens in ready_recipes():
        found = run_recipe(load_recipe(tokens), opened, progress, until="tokens").artifacts["tokens"]
    else:
        found = open_artifact(tokens, store, ("tokens",), expected)
    given = {"tokens": found.address, **{role: found.parents[role] for role in roles}}
    refs = ", ".join(f'{role} = "{address}"' for role, address in given.items())
    law = run_recipe(recipe(found.name.partition("/")[0], refs), opened, progress).artifacts["law"]
    print_blocks(StepReport.read(law.file(REPORT_FILE)).blocks)
    print(f"\npage: {law.file('law.html')}")
