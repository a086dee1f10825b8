"""`whorl profile`: where the time of a training step goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from whorl.cli.options import StoreOption

if TYPE_CHECKING:
    from whorl.train.profiling.profiler import Profile


ROWS = 25  # of the table


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
        "Phases: " + ", ".join(f"{name} {_format_ms(s)} ms" for name, s in found.phases.items()) + ".",
    ]
    if found.compiled:
        lines.append(f"Compilation took {found.compile_seconds:.1f} s and is not included below.")
    time = "GPU time" if found.on_device else "time"
    lines += [
        f"Traced, a step took {_format_ms(found.traced_seconds)} ms ({overhead:+.0%}).",
        "",
        f"{'operation':<44} {'shapes':<34}{'calls':>7}{time + ', ms':>13}{'share':>8}{'GFLOP':>8}{'GFLOP/s':>9}"
        f"{'of peak':>9}",
    ]
    total = sum(operation.seconds for operation in found.operations) or 1.0
    for operation in found.operations[:ROWS]:
        line = f"{operation.name[:44]:<44} {operation.shapes[:33]:<34}{operation.calls:>7.0f}"
        line += f"{_format_ms(operation.seconds):>13}{operation.seconds / total:>8.1%}"
        if operation.flops:
            line += f"{operation.flops / 1e9:>8.2f}{operation.flops / operation.seconds / 1e9:>9,.0f}"
            line += f"{found.share_of_peak(operation):>9.0%}"
        lines.append(line)
    rest = sum(operation.seconds for operation in found.operations[ROWS:])
    lines.append(f"{'others':<86}{_format_ms(rest):>13}{rest / total:>8.1%}")
    return "\n".join(
        [
            *lines,
            "",
            "The time of an operation is without that of the operations in it. `whorl: PHASE` is Python, and C++ that is no",
            "operator of torch, such as the optimizer's passes; `graph_N_...` is a compiled kernel. --json lists all.",
            f"trace: {found.trace}",
            "       open it at https://ui.perfetto.dev (Open trace file; the file is not uploaded) or in chrome://tracing",
        ]
    )


def _format_ms(seconds: float) -> str:
    milliseconds = 1e3 * seconds
    return f"{milliseconds:.{0 if milliseconds >= 1000 else 1 if milliseconds >= 10 else 2}f}"
