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
    import json

    from whorl.errors import ConfigError, StoreError
    from whorl.recipes.step_records import FAILED, LEFT_OUT, STEPS_FILE, read_step_records, steps_in_state
    from whorl.recipes.steps.evaluation.report import ReportConfig, report_data
    from whorl.report import render
    from whorl.store import Store

    opened = Store(store)
    folders = opened.root / "runs"
    choices = [Path(run), folders / run]
    if Path(run).name == run:  # the name of a recipe
        finished = [path.parent for path in folders.glob(f"{run}-*/{STEPS_FILE}")]
        choices += sorted(finished, key=lambda p: (p / STEPS_FILE).stat().st_mtime, reverse=True)
    folder = next((p for p in choices if (p / STEPS_FILE).is_file()), None)
    if folder is None:
        known = sorted(p.name for p in folders.glob("*")) if folders.exists() else []
        raise StoreError(
            f"no run {run!r} in {folders}",
            expected=f"one of: {', '.join(known)}" if known else "a run; none exists yet",
            do="start one: whorl run quickstart",
        )
    steps = read_step_records(folder)
    made = {name: opened.find(entry["address"]) for name, entry in steps.items() if "address" in entry}
    # The parents of the recipe's step `report` are the content of the page; without that step it is the whole run.
    recipe = json.loads((folder / "config.json").read_text()).get("steps", {})
    parents = next((step["parents"] for step in recipe.values() if step.get("uses") == "report"), None)
    shown = [*parents.values()] if parents is not None else [*recipe]
    artifacts = [found for name in shown if (found := made.get(name)) is not None and found.kind != "report"]
    left_out, failed = steps_in_state(steps, LEFT_OUT), steps_in_state(steps, FAILED)
    missing = [name for name in shown if made.get(name) is None and name not in {*left_out, *failed}]
    data = report_data(
        artifacts, opened, ReportConfig(), run=folder.name, missing=missing, left_out=left_out, failed=failed
    )
    try:
        render(data, out)
    except OSError as error:
        raise ConfigError(
            f"{out} cannot be written: {error.strerror}", do="give another path with --out"
        ) from error
    print(f"wrote {out} ({out.stat().st_size / 1e3:.0f} kB): open it in a browser")
