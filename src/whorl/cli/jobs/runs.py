"""`whorl runs`: the runs of a store, compared or removed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from whorl.cli.options import StoreOption, format_time


def runs(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...", help="Runs to compare; one is compared with the latest others of its recipe."
        ),
    ] = None,
    page: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the comparison as a page.")] = None,
    remove: Annotated[
        bool,
        typer.Option("--remove", help="Remove the records of these runs; `whorl gc` then frees artifacts."),
    ] = False,
    store: StoreOption = None,
) -> None:
    """List the runs of a store with their settings and figures, or compare some.

    Examples:

        whorl runs

        whorl runs small quickstart --page runs.html

        whorl runs --remove small
    """
    from whorl.cli.text_table import print_table
    from whorl.errors import ConfigError, StoreError, shorten
    from whorl.recipes import runs as records
    from whorl.report import ReportData, StepReport, render
    from whorl.store import Store
    from whorl.tracking.progress import format_duration

    opened = Store(store)
    found = {name: records.matching_runs(opened, name) for name in names or ()}
    if (remove or page is not None) and not found:
        raise ConfigError("--remove and --page need the name of a run", do="list them: whorl runs")
    if remove:
        for name, matches in found.items():
            if len(matches) > 1:
                folders = ", ".join(run.folder.name for run in matches)
                raise StoreError(f"--remove {name}: several runs", expected=f"one of: {folders}")
        for run in {run.folder: run for (run,) in found.values()}.values():
            records.remove_run(opened, run)
            print(f"removed {run.folder.name}; `whorl gc` lists the artifacts that only it has referred to")
    elif found:
        shown = [matches[0] for matches in found.values()]
        tables = records.compare_runs(
            (shown[1:] and shown) or records.with_others(opened, shown[0].folder.name) or shown
        )
        for table in tables:
            heads = [table.title, *(column.name for column in table.columns[1:])]
            print_table(heads, [[*map(str, row)] for row in table.rows])
            print()
        if page is not None:
            render(ReportData(title="Runs", reports=[("", StepReport(blocks=[*tables]))]), page)
            print(f"wrote {page}: open it in a browser")
    elif listed := records.read_runs(opened):
        heads = ["run", "recipe", "when", "state", "seed", "time", "changed", "figures"]
        rows = [
            [
                label, run.recipe, format_time(run.when), run.state, ", ".join(map(str, run.seeds)),
                format_duration(run.seconds),
                shorten(", ".join(option.removeprefix("--set ") for option in run.changed), records.MAX_CELL),
                "; ".join(f"{name} {value}" for name, value in run.results.items()),
            ]
            for label, run in zip(records.run_labels(listed), listed, strict=True)
        ]  # fmt: skip
        print_table(heads, rows, left=[head for head in heads if head != "time"])
    else:
        print(f"the store {opened.location} has no runs; start one with `whorl run quickstart`")
