"""`whorl profile`: where the time of a training step goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from whorl.cli.options import StoreOption

if TYPE_CHECKING:
    from whorl.train.profiling.profiler import Profile


def profile(
    recipe: Annotated[str, typer.Argument(help="A packaged recipe (see `whorl recipes`) or a .toml file.")],
    steps: Annotated[int, typer.Option(min=1, help="Timed steps; as many again are traced.")] = 8,
    compiled: Annotated[
        bool | None, typer.Option("--compiled/--eager", help="Whether to compile; default: as planned.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    trace: Annotated[
        str | None, typer.Option(metavar="FILE", help="Path of the trace; default: in the run folder.")
    ] = None,
    step: Annotated[
        str | None,
        typer.Option(metavar="STEP", help="Name of the step, if the recipe pretrains several times."),
    ] = None,
    budget: Annotated[
        str | None, typer.Option(metavar="5m", help="Budget of the plan, as for `whorl run`.")
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="STEP.FIELD=VALUE", help="Replace one value; may be repeated."),
    ] = None,
    store: StoreOption = None,
) -> None:
    """Profile a training step against the measured peaks of this machine.

    The steps of the recipe before training are made or looked up. Then a few training steps are timed and traced, from
    untrained weights. No model is kept.

    Examples:

        whorl profile quickstart

        whorl profile my.toml --steps 20 --eager --json
    """
    import sys
    from pathlib import Path

    from whorl.machine.malloc import request_huge_pages

    request_huge_pages()  # before an import below loads torch
    from whorl.recipes import load_recipe
    from whorl.recipes.profile import profile_recipe
    from whorl.store import Store
    from whorl.tracking.progress import Progress

    loaded = load_recipe(recipe, sets=sets or (), budget=budget)
    progress = Progress(sys.stderr if as_json else None)
    result = profile_recipe(
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

        print(json.dumps(result.to_json(), indent=1))
    else:
        print(profile_table(result))


def profile_table(found: Profile) -> str:
    """Return the profile as text."""
    from whorl.train.profiling.trace import CLASSES

    total_seconds = found.traced_seconds or 1.0
    per_replica = f"{found.replicas} replicas, each " if found.replicas > 1 else ""
    mode = "compiled" if found.compiled else "eager"
    overhead = found.traced_seconds / found.step_seconds - 1
    peaks = ", ".join(f"{kind} {speed / 1e9:,.0f} GFLOP/s" for kind, speed in found.peak_flops.items())
    lines = [
        "",
        f"A step takes {_format_ms(found.step_seconds)} ms ({mode}, {found.dtype}; {per_replica}{found.threads} thread"
        f"{'s' * (found.threads > 1)}): {found.tokens_per_second:,.0f} tokens/s.",
        f"Model FLOPs: {found.flops_per_second / 1e9:,.0f} GFLOP/s, {found.mfu:.0%} of the "
        f"{found.machine_flops / 1e9:,.0f} measured now.",
        f"Peaks of {'one replica' if found.replicas > 1 else 'this machine'} now: {peaks}; memory bandwidth "
        f"{found.bandwidth / 1e9:,.1f} GB/s.",
    ]
    if found.compiled:
        lines.append(f"Compilation took {found.compile_seconds:.1f} s and is not included below.")
    lines += [
        f"Traced, a step took {_format_ms(found.traced_seconds)} ms ({overhead:+.0%}); the tables show "
        + ("traced steps, in GPU time." if found.on_device else "the faster half of the traced steps."),
        "",
        f"{'part of a step':<20}{'forward':>12}{'backward':>12}{'share':>9}",
    ]
    for part, both in found.parts.items():
        total = both["forward"] + both["backward"]
        if total:
            back = f"{_format_ms(both['backward']):>9} ms" if both["backward"] else ""
            lines.append(
                f"{part:<20}{_format_ms(both['forward']):>9} ms{back:>12}{total / total_seconds:>9.1%}"
            )
    lines += [
        f"Named parts are {found.accounted:.1%} of a step; dispatch is compiled code outside of its kernels.",
        "",
        f"{'operators':<20}{'time':>12}{'share':>9}{'calls':>7}{'GFLOP':>9}{'MB':>9}{'FLOP/B':>8}{'bound':>12}{'reached':>9}",
    ]
    for kind in CLASSES:
        cost = found.classes.get(kind)
        if cost is None or not cost.seconds:
            continue
        line = f"{kind:<20}{_format_ms(cost.seconds):>9} ms{cost.seconds / total_seconds:>9.1%}{cost.calls:>7.0f}"
        if cost.bytes:
            bound = found.roofline_seconds(kind)
            line += f"{cost.flops / 1e9:>9.2f}{cost.bytes / 1e6:>9.1f}{cost.flops / cost.bytes:>8.1f}"
            line += f"{_format_ms(bound):>9} ms{bound / cost.seconds:>9.0%}"
        lines.append(line)
    return "\n".join(
        [
            *lines,
            "",
            "bound: roofline time, the larger of FLOPs over peak FLOP/s and bytes over bandwidth; above 100 % reached, the",
            "data came from a cache. The head computes its gradient in the forward pass. framework: Python and dispatch.",
            f"trace: {found.trace}",
            "       open it at https://ui.perfetto.dev (Open trace file; the file is not uploaded) or in chrome://tracing",
        ]
    )


def _format_ms(seconds: float) -> str:
    milliseconds = 1e3 * seconds
    return f"{milliseconds:.{0 if milliseconds >= 1000 else 1 if milliseconds >= 10 else 2}f}"
