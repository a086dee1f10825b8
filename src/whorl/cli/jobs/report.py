"""`whorl report`: the page of a run, finished or not."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from whorl.cli.options import StoreOption


def report(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="Folder or name of a run, or the name of a recipe for its latest run."
        ),
    ] = "quickstart",
    out: Annotated[Path, typer.Option("--out", "-o", help="Path of the page.")] = Path("report.html"),
    store: StoreOption = None,
) -> None:
    """Write the page that explains a run; of an unfinished run, the part that exists.

    Examples:

        whorl report quickstart

        whorl report .whorl/runs/quickstart-1a2b3c4d -o page.html
    """
    from whorl.errors import ConfigError, StoreError
    from whorl.recipes.runs import matching_runs, read_run
    from whorl.recipes.step_records import FAILED, LEFT_OUT, STEPS_FILE, read_step_records, steps_in_state
    from whorl.recipes.steps.evaluation.report import ReportConfig, report_data
    from whorl.report import render
    from whorl.store import Store

    opened = Store(store)
    is_folder = (Path(run) / STEPS_FILE).is_file()
    found = [read_run(Path(run))] if is_folder else matching_runs(opened, run)
    record = next((each for each in found if each.steps), found[0])
    if record.problem:
        name = record.folder.name
        raise StoreError(
            f"the run {name} is damaged: {record.problem}", do=f"remove it: whorl runs --remove {name}"
        )
    steps = read_step_records(record.folder)
    made = {name: opened.find(entry["address"]) for name, entry in steps.items() if "address" in entry}
    # The parents of the recipe's step `report` are the content of the page; without that step it is the whole run.
    recipe = record.settings
    parents = next((step["parents"] for step in recipe.values() if step.get("uses") == "report"), None)
    shown = [*parents.values()] if parents is not None else [*recipe]
    artifacts = [one for name in shown if (one := made.get(name)) is not None and one.kind != "report"]
    left_out, failed = steps_in_state(steps, LEFT_OUT), steps_in_state(steps, FAILED)
    missing = [name for name in shown if made.get(name) is None and name not in {*left_out, *failed}]
    data = report_data(
        artifacts, opened, ReportConfig(), run=record.folder.name, missing=missing, left_out=left_out, failed=failed
    )  # fmt: skip
    try:
        render(data, out)
    except OSError as error:
        raise ConfigError(
            f"{out} cannot be written: {error.strerror}", do="give another path with --out"
        ) from error
    print(f"wrote {out} ({out.stat().st_size / 1e3:.0f} kB): open it in a browser")
