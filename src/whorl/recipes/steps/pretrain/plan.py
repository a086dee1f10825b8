"""The step `plan`: from a budget to the shape of a model and the settings of its training."""

from __future__ import annotations

from whorl.plan.config import PlanConfig
from whorl.recipes.registry import StepContext, step
from whorl.recipes.steps.corpus import CORPUS_PARENTS, open_corpus
from whorl.report.training import plan_blocks


@step("plan", config=PlanConfig, parents=CORPUS_PARENTS, version=6)
def plan(ctx: StepContext, config: PlanConfig) -> None:
    """Time training steps on this machine and choose the configuration for the budget."""
    from whorl.plan.planner import make_plan

    corpus = open_corpus(ctx)
    made = make_plan(config, ctx.machine, corpus.bytes("train"), ctx.progress)
    (ctx.out / "plan.json").write_text(made.model_dump_json(indent=2) + "\n")
    for line in made.arithmetic:
        ctx.progress.log(f"    {line}")
    job = made.job
    headline = (
        f"{job.model.n_layers} x {job.model.d_model}, vocabulary {made.vocab_size:,}, {job.steps:,} steps"
    )
    if "seconds" in made.expected:
        headline += f", {made.expected['seconds']:.0f} s expected"
    ctx.summary.update(
        expected=made.expected, arithmetic=made.arithmetic, budget=made.budget, headline=headline
    )
    ctx.report.blocks += plan_blocks(made.budget, made.expected, made.arithmetic)
