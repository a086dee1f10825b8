"""The step `study`: small runs on a token set, and the scaling law of its text.

Each run is an artifact of the store with its losses alone, so a study that was killed trains only the run under way again.
Losses are those of `evaluate`: bits per byte of test files, each scored alone in the model's evaluation window.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from whorl.machine.budget import Budget
from whorl.plan.config import FRACTIONS, StudyConfig
from whorl.recipes.registry import StepContext, step
from whorl.recipes.steps.corpus import CORPUS_PARENTS

if TYPE_CHECKING:
    from whorl.plan.laws.study import StudyRun
    from whorl.train.job import Job


@step("law", config=StudyConfig, parents={**CORPUS_PARENTS, "tokens": "tokens"})
def study(ctx: StepContext, config: StudyConfig) -> None:
    """Train small runs on the tokens, and fit a scaling law to their losses."""
    from whorl.machine.kernel_choice import choose_once
    from whorl.plan.laws import grids
    from whorl.plan.laws.study import Study
    from whorl.plan.laws.study_run import flops_in
    from whorl.recipes.steps.pretrain.law_page import grid_blocks, law_report
    from whorl.recipes.steps.pretrain.roofline_page import study_roofline
    from whorl.report import ReportData, render

    tokens, budget = ctx.parent_folder("tokens"), Budget.parse(config.budget)
    results: dict[StudyRun, list[float]] = {}
    flops = budget.flops or choose_once("study_flops", lambda: flops_in(budget.seconds or 0.0, ctx.machine))
    law_flops = flops * (1 - grids.SHARE) if config.grids else flops
    made = Study(config, tokens, ctx.machine, law_flops)
    # Too few FLOPs are refused before a run is trained.
    planned = grids.grid_runs(made, flops - law_flops) if config.grids else []
    while (run := made.next_run(results)) is not None:
        results[run] = _losses(ctx, made.job(run), run.name)
        ctx.progress.log(f"    {run.name}: {', '.join(f'{loss:.3f}' for loss in results[run])} bits per byte")
    fit = made.fit(results, corpus=ctx.parents["tokens"].name.partition("/")[0])
    tried = dict[grids.GridRun, float]()
    for one in planned:
        [tried[one]] = _losses(ctx, grids.grid_job(made, one), one.name, (1.0,))
        ctx.progress.log(f"    {one.name}: {tried[one]:.3f} bits per byte")
    ctx.report = law_report(fit)
    if planned:
        ctx.report.blocks += grid_blocks(grids.read_grids(made, tried, fit.law))
    ctx.report.blocks += study_roofline(made.first[-1], made.vocab_size, ctx.machine)
    (ctx.out / "law.json").write_text(json.dumps(fit.law.to_json(), indent=1) + "\n")
    render(
        ReportData(title=f"A scaling law of {fit.law.corpus}", reports=[("law", ctx.report)]),
        ctx.out / "law.html",
    )
    named = {run.name: found for run, found in results.items()} | {one.name: [x] for one, x in tried.items()}
    losses = {name: [x if math.isfinite(x) else None for x in found] for name, found in named.items()}
    ctx.summary.update(headline=ctx.report.summary, flops=flops, runs=losses)


def _losses(ctx: StepContext, job: Job, name: str, fractions: Sequence[float] = FRACTIONS) -> list[float]:
    """Return the losses of a run at fractions of its steps, looked up or trained; all nan if it diverged."""
    from whorl.plan.laws import study_run
    from whorl.store import Build
    from whorl.train.job import NON_IDENTITY_FIELDS
    from whorl.train.learner.update import DivergedError

    settings = {**job.model_dump(mode="json", exclude=NON_IDENTITY_FIELDS), "replicas": job.replicas}
    if fractions != FRACTIONS:
        settings["fractions"] = fractions
    with Build(
        ctx.store, kind="study_run", name=f"study/{name}", parents={"tokens": ctx.parents["tokens"]}, config=settings,
        version=1, step="study", on_message=ctx.progress.log,
    ) as build:  # fmt: skip
        if build.existing is None:
            try:
                with ctx.progress.task(f"Run {name}"):
                    options = {"log": ctx.progress.log, "heartbeat_dir": ctx.heartbeat_dir}
                    losses = study_run.train_run(job, build.scratch, fractions, **options)
            except DivergedError as error:
                ctx.progress.log(f"    {name} diverged: {error.what}")
                losses = [math.nan] * len(fractions)
            (build.path / "losses.json").write_text(json.dumps(losses))
    assert build.artifact is not None
    found: list[float] = json.loads(build.artifact.file("losses.json").read_text())
    return found
