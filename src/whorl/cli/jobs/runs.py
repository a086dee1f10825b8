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
            metavar="[RUN]...", help="Runs to compare; of one name, or of a recipe: all its runs."
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
    matches = {name: records.matching_runs(opened, name) for name in names or ()}
    if (remove or page is not None) and not matches:
        option = "--remove" if remove else "--page"
        raise ConfigError(f"{option} needs the name of a run", do="list them: whorl runs")
    if remove:
        exact = {n: [r for r in found if n in (r.folder.name, r.name)] for n, found in matches.items()}
        for name, found in exact.items():
            if len(found) != 1:
                folders = ", ".join(run.folder.name for run in matches[name])
                raise StoreError(f"--remove {name}: not one run", expected=f"one of: {folders}")
        for run in {found[0].folder: found[0] for found in exact.values()}.values():
            records.remove_run(opened, run)
            print(f"removed {run.folder.name}; `whorl gc` lists the artifacts that only it has referred to")
        return
    if matches:
        shown = [found[0] for found in matches.values()]
        tables = records.compare_runs(
            shown if shown[1:] else matches[(names or [])[0]][: records.MAX_COMPARED]
        )
        for table in tables:
            heads = [table.title, *(column.name for column in table.columns[1:])]
            print_table(heads, [[*map(str, row)] for row in table.rows])
            print()
        if page is not None:
            render(ReportData(title="Runs", reports=[("", StepReport(blocks=[*tables]))]), page)
            print(f"wrote {page}: open it in a browser")
        return
    listed = records.read_runs(opened)
    rows = [
        [
            label, run.config.name, format_time(run.when), run.state, ", ".join(map(str, run.config.seeds)),
            format_duration(run.seconds),
            shorten(", ".join(f"{key}={value}" for key, value in run.config.changed.items()), records.MAX_CELL),
            "; ".join(f"{name} {value}" for name, value in run.results.items()),
        ]
        for label, run in zip(records.run_labels(listed), listed, strict=True)
    ]  # fmt: skip
    if rows:
        heads = ["run", "recipe", "when", "state", "seed", "time", "changed", "figures"]
        print_table(heads, rows, left=[head for head in heads if head != "time"])
    else:
        print(f"the store {opened.location} has no runs; start one with `whorl run quickstart`")
