"""`whorl profile`: where a training step's time goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from whorl.cli.options import StoreOption

if TYPE_CHECKING:
    from whorl.train.profiling.profiler import Profile


def profile(
    recipe: Annotated[str, typer.Argument(help="A ready recipe (see `whorl recipes`) or a .toml file.")],
    steps: Annotated[int, typer.Option(min=1, help="Steps that are timed, and as many again traced.")] = 8,
    compiled: Annotated[
        bool | None, typer.Option("--compiled/--eager", help="Whether to compile; else as the plan chose.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The figures as JSON.")] = False,
    trace: Annotated[
        str | None, typer.Option(metavar="FILE", help="Where the trace goes; else into the run folder.")
    ] = None,
    step: Annotated[
        str | None, typer.Option(metavar="STEP", help="Which step, where a recipe trains several times.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(metavar="5m", help="As for `whorl run`: what the model is planned for.")
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="STEP.FIELD=VALUE", help="Replace one value; may be repeated."),
    ] = None,
    store: StoreOption = None,
) -> None:
    """Show where a training step's time goes, against what this machine can do.

    The recipe's steps before training are looked up, or made; then a few steps of its training are timed and traced, from
    untrained weights. Nothing is trained for keeps.

    Examples:

        whorl profile quickstart

        whorl profile my.toml --steps 20 --eager --json
    """
    import sys
    from pathlib import Path

    from whorl.recipes import load_recipe
    from whorl.recipes.profile import profile_recipe
    from whorl.store import Store
    from whorl.tracking.progress import Progress

    loaded = load_recipe(recipe, sets=sets or (), budget=budget)
    progress = Progress(sys.stderr if as_json else None)
    found = profile_recipe(
        loaded,
        Store(store),
        progress,
        step=step,
        steps=steps,
        compiled=compiled,
        trace=None if trace is None else Path(trace),
    )
    if as_json:
        import json

        print(json.dumps(found.to_json(), indent=1))
    else:
        print(profile_table(found))


def profile_table(found: Profile) -> str:
    """The profile as text."""
    from whorl.train.profiling.trace import CLASSES

    share = found.traced_seconds or 1.0
    who = f"{found.replicas} replicas, each " if found.replicas > 1 else ""
    how = "compiled" if found.compiled else "eager"
    slower = found.traced_seconds / found.step_seconds - 1
    peaks = ", ".join(f"{kind} {speed / 1e9:,.0f} GFLOP/s" for kind, speed in found.peak_flops.items())
    lines = [
        "",
        f"A step takes {_format_ms(found.step_seconds)} ms ({how}, {found.dtype}; {who}{found.threads} thread"
        f"{'s' * (found.threads > 1)}): {found.tokens_per_second:,.0f} tokens/s.",
        f"The model's products: {found.flops_per_second / 1e9:,.0f} GFLOP/s, {found.mfu:.0%} of the "
        f"{found.machine_flops / 1e9:,.0f} measured just now.",
        f"Peaks of {'one replica' if found.replicas > 1 else 'this machine'} just now: {peaks}; copies "
        f"{found.bandwidth / 1e9:,.1f} GB/s.",
    ]
    if found.compiled:
        lines.append(f"Compiling took {found.compile_seconds:.1f} s, once, and is not in the figures below.")
    lines += [
        f"Traced, a step took {_format_ms(found.traced_seconds)} ms ({slower:+.0%}); the tables are of traced steps"
        + (", in the GPU's time." if found.on_device else "."),
        "",
        f"{'part of a step':<20}{'forward':>12}{'backward':>12}{'share':>9}",
    ]
    for part, both in found.parts.items():
        total = both["forward"] + both["backward"]
        if total:
            back = f"{_format_ms(both['backward']):>9} ms" if both["backward"] else ""
            lines.append(f"{part:<20}{_format_ms(both['forward']):>9} ms{back:>12}{total / share:>9.1%}")
    lines += [
        "",
        f"{'operators':<20}{'time':>12}{'share':>9}{'calls':>7}{'GFLOP':>9}{'MB':>9}{'FLOP/B':>8}{'bound':>12}{'reached':>9}",
    ]
    for kind in CLASSES:
        cost = found.classes.get(kind)
        if cost is None or not cost.seconds:
            continue
        line = f"{kind:<20}{_format_ms(cost.seconds):>9} ms{cost.seconds / share:>9.1%}{cost.calls:>7.0f}"
        if cost.bytes:
            bound = found.roofline_seconds(kind)
            line += f"{cost.flops / 1e9:>9.2f}{cost.bytes / 1e6:>9.1f}{cost.flops / cost.bytes:>8.1f}"
            line += f"{_format_ms(bound):>9} ms{bound / cost.seconds:>9.0%}"
        lines.append(line)
    return "\n".join(
        [
            *lines,
            "",
            "bound: the roofline's time, the longer of FLOPs at the peak of products and bytes at that of copies; above",
            "100 % reached, data came from a cache. The head's gradient is made in its forward. framework: Python etc.",
            f"trace: {found.trace}",
            "       open it at https://ui.perfetto.dev (Open trace file; it stays on this machine) or in chrome://tracing",
        ]
    )


def _format_ms(seconds: float) -> str:
    milliseconds = 1e3 * seconds
    return f"{milliseconds:.{0 if milliseconds >= 1000 else 1 if milliseconds >= 10 else 2}f}"
