"""`whorl run`: make the artifacts of a recipe, or look them up."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from whorl.cli.options import StoreOption

if TYPE_CHECKING:
    from whorl.store import Artifact


def run(
    recipe: Annotated[str, typer.Argument(help="A packaged recipe (see `whorl recipes`) or a .toml file.")],
    budget: Annotated[
        str | None,
        typer.Option(metavar="5m", help="Budget of training: 90s, 5m, 2h, FLOPs (2e15flops), or 3usd@h100."),
    ] = None,
    serve_tokens: Annotated[
        float | None,
        typer.Option(metavar="N", help="Tokens to generate, a part of the cost that sizes the model."),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="STEP.FIELD=VALUE", help="Replace one value; may be repeated."),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="MODEL",
            help="Start from this model in place of the one that the recipe would train: an artifact, or a folder in the "
            "format of transformers.",
        ),
    ] = "",
    until: Annotated[
        str | None, typer.Option(metavar="STEP", help="Only this step and its ancestors.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the run and of its artifacts; default: that of the recipe.")
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            metavar="N", help="One run for each seed from 0 to N - 1, or for the seeds in a list such as 3,7."
        ),
    ] = None,
    log: Annotated[
        list[str] | None,
        typer.Option(
            metavar="wandb|trackio", help="Also send metrics there, e.g. wandb:project=mine; may be repeated."
        ),
    ] = None,
    live: Annotated[
        bool | None,
        typer.Option("--live/--no-live", help="Show a dashboard during training; default: on a terminal."),
    ] = None,
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic",
            help="Bitwise equal results on one machine; no timing affects them. Disables torch.compile (unless set), "
            "automatic bf16, several threads per replica, C++ kernels of training, the choice of the faster expert kernel, "
            "and budgets in seconds (give FLOPs or plan.steps). Slower; see docs/training.md.",
        ),
    ] = False,
    store: StoreOption = None,
) -> None:
    """Run a recipe: make its artifacts, or look them up.

    The run can be interrupted at any moment, by Ctrl-C, SIGTERM (training writes a checkpoint first) or SIGKILL; the same
    command continues it.

    Examples:

        whorl run quickstart

        whorl run quickstart --budget 90s --set ingest.sources='["notes/"]'

        whorl run quickstart --budget 1e14flops --deterministic

        whorl run quickstart --name small --set plan.budget=2m --seeds 5

        whorl run chat --from quickstart/pretrain --set data.path=talks.jsonl

        whorl run my.toml --until tokens --store s3://bucket/whorl
    """
    from whorl.machine.malloc import request_huge_pages

    request_huge_pages()  # before an import below loads torch
    from whorl.cli.text_table import print_table
    from whorl.recipes import load_recipe, run_recipe
    from whorl.recipes.sweep import figures_over_seeds, named, parse_seeds, seed_settings
    from whorl.store import Store
    from whorl.tracking.dashboard import Dashboard
    from whorl.tracking.progress import Progress, format_duration
    from whorl.tracking.sinks import Sink, parse_loggers

    sets = [*(sets or ()), *([] if serve_tokens is None else [f"plan.serve_tokens={serve_tokens!r}"])]
    load = partial(load_recipe, recipe, budget=budget, deterministic=deterministic, model=model)
    loaded = load(sets=sets)
    recipes = [loaded if name is None else named(loaded, name)]
    if seeds is not None:
        recipes = [
            named(load(sets=seed_settings(loaded, seed, sets)), f"{recipes[0].run_name}-seed{seed}")
            for seed in parse_seeds(seeds)
        ]
    progress, results = Progress(), []
    for each in recipes:
        sinks: list[Sink] = parse_loggers(log or (), each.log)
        if Dashboard.enabled(progress, live):
            sinks.append(Dashboard(progress))
        results.append(run_recipe(each, Store(store), progress, until=until, sinks=sinks))
    store_option = f" --store {shlex.quote(store)}" if store else ""
    progress.log(f"done in {format_duration(sum(result.seconds for result in results))}")
    if seeds is not None:
        if rows := figures_over_seeds([result.artifacts for result in results]):
            print_table(["figure", "runs", "mean", "95 % interval"], rows)
        progress.log(f"next:   whorl runs {' '.join(each.run_name for each in recipes)}{store_option}")
        return
    progress.log("\n".join(closing_lines([*results[0].artifacts.values()], store_option)))


def closing_lines(artifacts: Sequence[Artifact], store_option: str) -> list[str]:
    """Return a sample, the paths of the pages and models of a run, and the next commands.

    Args:
        store_option: the option that names the store, or "".
    """
    from whorl.recipes.run_page import best_sample, next_commands

    lines = [
        line for artifact in artifacts if artifact.kind == "evaluation" for line in best_sample(artifact)
    ]
    for artifact in artifacts:
        if artifact.kind == "report" and "report.html" in artifact.files:
            lines.append(f"report: {artifact.file('report.html')}")
        elif artifact.kind == "model":
            lines.append(f"model:  {artifact.name}: {artifact.path}")
    commands = next_commands(artifacts)
    if not lines:
        commands = [f"whorl show {artifacts[-1].name}"]
    # An environment that is not activated has the program, but not on the path.
    hidden = Path(sys.argv[0]).name == "whorl" and shutil.which("whorl") is None
    program = shlex.quote(sys.argv[0]) if hidden else "whorl"
    for number, command in enumerate(commands):
        full = program + command.removeprefix("whorl") + store_option
        lines.append(f"{'' if number else 'next:':8}{full}")
    return lines
