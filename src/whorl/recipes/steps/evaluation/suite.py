"""The step `suite`: the tasks of a suite that needs no corpus; results as of `whorl eval` are in `suite/`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from whorl.recipes.registry import StepContext, step
from whorl.recipes.steps.evaluation.tasks import answer_tasks, summary_of


class SuiteStepConfig(BaseModel):
    """The suite and its size."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    suite: str = Field(default="probes", description="its name, or a TOML file")
    items: int = Field(default=300, ge=1, description="of each task", json_schema_extra={"shrinks_to": 16})
    seed: int = Field(default=0, ge=0)


@step("suite", config=SuiteStepConfig, parents={"model": "model"})
def suite(ctx: StepContext, config: SuiteStepConfig) -> None:
    """Measure a model on the tasks of a suite."""
    from whorl.evals.results_io import save_results
    from whorl.evals.suites import SuiteInputs, load_suite
    from whorl.report.scores import task_table

    inputs = SuiteInputs(
        limit=config.items, seed=config.seed, log=lambda line: ctx.progress.log(f"    {line}")
    )
    found = answer_tasks(ctx, load_suite(config.suite, inputs))
    save_results(ctx.out / "suite", found, {"suite": config.suite})
    figures = [f"{r.task} {m} {r.measure(m).value:.1%}" for r in found for m in r.metrics]
    ctx.summary.update(tasks=[summary_of(result) for result in found], headline="; ".join(figures))
    ctx.report.blocks.append(task_table(found))
