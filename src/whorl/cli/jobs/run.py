"""`whorl run`: make everything that a recipe asks for, looking up what is there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from whorl.cli.options import StoreOption

if TYPE_CHECKING:
    from whorl.store import Artifact


def run(
    recipe: Annotated[str, typer.Argument(help="A ready recipe (see `whorl recipes`) or a .toml file.")],
    budget: Annotated[
        str | None,
        typer.Option(metavar="5m", help="What training may cost: a time (90s, 5m, 2h) or 1e15flops."),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="STEP.FIELD=VALUE", help="Replace one value; may be repeated."),
    ] = None,
    until: Annotated[
        str | None, typer.Option(metavar="STEP", help="Only this step and what it needs.")
    ] = None,
    log: Annotated[
        list[str] | None,
        typer.Option(
            metavar="wandb|trackio", help="Send metrics there too, as wandb:project=mine; may be repeated."
        ),
    ] = None,
    live: Annotated[
        bool | None,
        typer.Option("--live/--no-live", help="A dashboard while it trains; by default on a terminal."),
    ] = None,
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic",
            help="The same bits twice on one machine: nothing that was timed decides. Off are: torch.compile (unless set), "
            "bf16 where it is faster, several threads a replica, the faster of two libraries for products of experts, "
            "and a budget of seconds (give FLOPs or plan.steps). Costs what those save; see docs/training.md.",
        ),
    ] = False,
    store: StoreOption = None,
) -> None:
    """Run a recipe: make its artifacts, or look them up.

    Stop it at any moment, with Ctrl-C, SIGTERM (training writes a checkpoint first) or harder; the same command continues.

    Examples:

        whorl run quickstart

        whorl run quickstart --budget 90s --set ingest.sources='["notes/"]'

        whorl run quickstart --budget 1e14flops --deterministic

        whorl run my.toml --until tokens --store s3://bucket/whorl
    """
    from whorl.recipes import load_recipe, run_recipe
    from whorl.store import Store
    from whorl.tracking.dashboard import Dashboard
    from whorl.tracking.progress import Progress, format_duration
    from whorl.tracking.sinks import Sink, parse_loggers

    loaded = load_recipe(recipe, sets=sets or (), budget=budget, deterministic=deterministic)
    progress = Progress()
    sinks: list[Sink] = parse_loggers(log or (), loaded.log)
    if Dashboard.enabled(progress, live):
        sinks.append(Dashboard(progress))
    outcome = run_recipe(loaded, Store(store), progress, until=until, sinks=sinks)
    place = f" --store {store}" if store else ""
    lines = [
        f"done in {format_duration(outcome.seconds)}",
        *closing_lines([*outcome.artifacts.values()], place),
    ]
    progress.log("\n".join(lines))


def closing_lines(artifacts: Sequence[Artifact], store_option: str) -> list[str]:
    """Where the pages and models of a run lie, and what to type next: for the last model, which is what the run was for.

    place: the option that names the store, or nothing.
    """
    from whorl.recipes.stage_report import next_commands

    lines: list[str] = []
    models: list[Artifact] = []
    for artifact in artifacts:
        if artifact.kind == "report" and "report.html" in artifact.files:
            lines.append(f"report: {artifact.file('report.html')}")
        elif artifact.kind == "model":
            lines.append(f"model:  {artifact.path}")
            models.append(artifact)
    if models:
        lines.append(f"next:   {next_commands(models[-1])[0]}{store_option}")
    return lines or [f"next:   whorl show {artifacts[-1].name}{store_option}"]
