"""The step `plan`: from a budget to the shape of a model and the settings of its training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from whorl.machine.budget import Budget
from whorl.plan.config import PlanConfig
from whorl.plan.forecast import TOKENIZE_SECONDS
from whorl.recipes.registry import StepContext, step
from whorl.recipes.steps.corpus import CORPUS_PARENTS, open_corpus
from whorl.report.training import plan_blocks
from whorl.store import Artifact, Store

if TYPE_CHECKING:
    from whorl.plan.training_plan import TrainingPlan


def law_of_corpus(parents: Mapping[str, Artifact], store: Store) -> dict[str, Artifact]:
    """Return the newest law that `whorl plan study` has fitted to the selected texts, in the role `law`."""
    laws = [
        a
        for a in store.artifacts()
        if a.kind == "law" and a.parents.get("selection") == parents["selection"].address
    ]
    return {"law": laws[-1]} if laws else {}


@step(
    "plan",
    config=PlanConfig,
    parents={**CORPUS_PARENTS, "law?": "law"},
    version=9,
    find_parents=law_of_corpus,
)
def plan(ctx: StepContext, config: PlanConfig) -> None:
    """Time training steps on this machine and choose the configuration for the budget."""
    from whorl.plan.dial.price import in_compute
    from whorl.plan.dial.probe import run_probe
    from whorl.plan.laws.law import ScalingLaw
    from whorl.plan.planner import make_plan
    from whorl.plan.training_plan import Evidence
    from whorl.tokens.shards import TokenSet

    corpus, before = open_corpus(ctx), ctx.run.seconds
    probe = partial(run_probe, corpus=corpus, progress=ctx.progress) if config.probe else None
    budget, bought = in_compute(given := config.budget, ctx.machine, config.deterministic)
    config, evidence = config.model_copy(update={"budget": str(budget)}), Evidence(probe=probe)
    if "law" in ctx.parents:
        law, size = (
            ctx.parents["law"],
            TokenSet(ctx.store.open(ctx.parents["law"].parents["tokens"]).path).vocab_size,
        )
        if config.model is None and config.vocab_size in (None, size):  # a law holds for its vocabulary
            config = config.model_copy(update={"vocab_size": size})
            evidence = Evidence(ScalingLaw.from_json(json.loads(law.file("law.json").read_text())))
    made = make_plan(config, ctx.machine, corpus.bytes("train"), ctx.progress, evidence)
    made = made.model_copy(update={"budget": given, "arithmetic": [*bought, *made.arithmetic]})
    if "startup_seconds" in made.expected:
        made = with_first_step(made, before, ctx.run.seconds, corpus.bytes("train"))
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


def with_first_step(made: TrainingPlan, before: float, now: float, corpus_bytes: int) -> TrainingPlan:
    """Return a timed plan with the time of planning, and the expected time to the first training step.

    before, now: seconds since the start of the run, when planning began and ended.
    """
    tokens = 2 * TOKENIZE_SECONDS * corpus_bytes / 1e6
    startup, compiling = made.expected["startup_seconds"], made.expected["compile_seconds"]
    first, budget = now + tokens + startup, Budget.parse(made.budget).seconds
    share = f" = {(now - before) / budget:.0%} of the budget" if budget else ""
    lines = [
        f"planning: {now - before:.0f} s{share}, {compiling:.0f} s of it to compile the chosen shape, which the run reuses",
        f"first training step: {first:.0f} s after the start of the run = {before:.0f} s before planning "
        f"+ {now - before:.0f} s + {tokens:.0f} s for tokenizer and tokens + {startup:.0f} s to start",
    ]
    expected = {**made.expected, "plan_seconds": now - before, "first_step_seconds": first}
    return made.model_copy(update={"expected": expected, "arithmetic": [*made.arithmetic, *lines]})
