"""The step `report`: the page that explains a run; `whorl report` makes it for a run in any state.

    [steps.report]
    parents = ["pretrain", "sft", "rl"]   # any steps; their ancestors are shown, too

The page shows the blocks that each step left in its artifact (`report.json`), so a new step has its panel without a
change here. A parent that is not made yet is named on the page. A section compares the run with others of its recipe. The
page can be rebuilt from the store at any time.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from whorl.recipes.registry import ANY_PARENTS, StepContext, step
from whorl.recipes.run_page import next_commands, with_ancestors
from whorl.recipes.runs import compare_runs, with_others
from whorl.recipes.step_records import LEFT_OUT, read_step_records, steps_in_state
from whorl.report import ReportData, render
from whorl.report.blocks import REPORT_FILE, StepReport
from whorl.store import Artifact, Store


class ReportConfig(BaseModel):
    """Title and cost of the page."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str = Field(
        default="A small language model of {sources}",
        description="heading of the page; {sources}: those of the corpus",
    )
    cost_per_hour: float | None = Field(
        default=None, ge=0, description="of this machine, for the cost column"
    )
    currency: str = "USD"


@step("report", config=ReportConfig, parents=ANY_PARENTS, version=4)
def report(ctx: StepContext, config: ReportConfig) -> None:
    """Write the report: inputs, plan, and results."""
    for artifact in ctx.parents.values():
        artifact.check()
    left_out = steps_in_state(read_step_records(ctx.run.dir), LEFT_OUT)
    data = report_data(ctx.parents.values(), ctx.store, config, run=str(ctx.run.name), left_out=left_out)
    render(data, ctx.out / "report.html")
    size = (ctx.out / "report.html").stat().st_size
    ctx.summary.update(bytes=size, headline=f"report.html, {size / 1e3:.0f} kB, opens offline")


def report_data(
    artifacts: Collection[Artifact],
    store: Store,
    config: ReportConfig,
    *,
    run: str = "",
    missing: Collection[str] = (),
    left_out: Mapping[str, str] | None = None,
    failed: Mapping[str, str] | None = None,
) -> ReportData:
    """Collect the content of the page from `artifacts` and their ancestors.

    Args:
        missing: names of the steps that the run has not reached.
        left_out, failed: step -> reason.
    """
    made = with_ancestors(artifacts, store)
    models = [artifact for artifact in made if artifact.kind == "model"]
    sources = [", ".join(a.summary.get("sources", ())) for a in made if a.kind == "documents"]
    found: dict[str, Any] = {
        "title": config.title.replace("{sources}", sources[0] if sources else "own text"),
        "run": run,
        "created": time.strftime("%Y-%m-%d %H:%M"),
        "about": "Written by whorl run. Every figure was measured by the steps of the run.",
        "reports": [
            (step_name(artifact), StepReport.read(artifact.file(REPORT_FILE)))
            for artifact in made
            if REPORT_FILE in artifact.files
        ]
        + [("", StepReport(blocks=[*compare_runs(with_others(store, run))]))],
        "missing": [*missing],
        "left_out": dict(left_out or {}),
        "failed": dict(failed or {}),
        "time": {
            "steps": [{"step": step_name(a), "seconds": a.seconds, "bytes": a.manifest.size} for a in made],
            "budget_seconds": _budget_seconds(made),
            "cost_per_hour": config.cost_per_hour,
            "currency": config.currency,
        },
        "environment": _environment(),
    }
    if made:
        found["lineage"] = store.lineage((models or made)[-1])
    if models:
        found["next_commands"] = [*next_commands(made), f"whorl lineage {models[-1].name}"]
    return ReportData.model_validate(found)


def step_name(artifact: Artifact) -> str:
    """Return the name that the recipe gave to the step of an artifact."""
    return artifact.name.split("/")[-1]


def _budget_seconds(made: Collection[Artifact]) -> float | None:
    from whorl.machine.budget import Budget

    budgets = [artifact.summary["budget"] for artifact in made if artifact.kind == "plan"]
    return Budget.parse(budgets[-1]).seconds if budgets else None


def _environment() -> dict[str, str]:
    from whorl.report.format import format_si
    from whorl.tracking.run import environment

    flat: dict[str, str] = {}
    for key, value in environment().items():
        if key == "ram_bytes":
            flat["memory"] = format_si(value, "B")
        elif isinstance(value, dict):
            flat.update({k if key == "versions" else f"{key} {k}": str(v) for k, v in value.items()})
        else:
            flat[key] = str(value)
    return flat
