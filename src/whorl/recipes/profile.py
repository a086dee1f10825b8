"""Profiling a recipe: its steps up to training looked up or made, then a few steps of its training looked at."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from whorl.errors import ConfigError, one_of
from whorl.recipes.recipe import Recipe, RecipeStep
from whorl.recipes.registry import StepContext
from whorl.recipes.runner import run_recipe
from whorl.store import Store
from whorl.tracking.progress import Progress

if TYPE_CHECKING:
    from whorl.train.profiling.profiler import Profile


def find_training_step(recipe: Recipe, name: str | None = None) -> RecipeStep:
    """The step that pretrains, or the one called `name` among several.

    Raises:
        ConfigError: there is none, or several and none was named.
    """
    found = {step.name: step for step in recipe.steps.values() if step.kind.name == "pretrain"}
    if name is not None and name not in found:
        raise ConfigError(f"--step {name}: no such step that trains", expected=one_of(name, list(found)))
    if name is None and len(found) != 1:
        raise ConfigError(
            f"the recipe {recipe.name} has {len(found) or 'no'} steps that pretrain",
            expected="one",
            do=f"name one: --step {next(iter(found))}" if found else "profile another recipe",
        )
    return found[name] if name is not None else next(iter(found.values()))


def profile_recipe(
    recipe: Recipe,
    store: Store,
    progress: Progress,
    *,
    step: str | None = None,
    steps: int = 8,
    compiled: bool | None = None,
    trace: Path | None = None,
) -> Profile:
    """Profiles the training of a recipe; nothing of it is kept but what training would need anyway, and the trace.

    Args:
        step: which step, where a recipe pretrains several times.
        steps: how many are timed, and as many again traced.
        compiled: compiled or not; by default as planned.
        trace: where the trace goes; by default into the run folder.
    """
    wanted = find_training_step(recipe, step)
    before = {n: s for n, s in recipe.with_ancestors(wanted.name).steps.items() if n != wanted.name}
    outcome = run_recipe(Recipe(recipe.name, recipe.about, before), store, progress)
    from whorl.recipes.steps.model import PretrainConfig, build_job
    from whorl.train.profiling.profiler import profile

    config = (
        wanted.kind.complete_config(wanted.config)
        if wanted.kind.complete_config is not None
        else wanted.config
    )
    assert isinstance(config, PretrainConfig)
    parents = {role: outcome.artifacts[name] for role, name in wanted.parents.items()}
    folder = outcome.run.dir
    job = build_job(StepContext(wanted.name, folder, folder, parents, outcome.run, progress, store), config)
    if compiled is not None:
        job = job.model_copy(update={"compile": compiled})
    path = trace if trace is not None else folder / f"trace-{wanted.name}.json.gz"
    compiles = ", after compiling" if job.compile else ""
    progress.log(f"{wanted.name}: {steps} steps timed and {steps} traced{compiles}")
    return profile(job, path, steps=steps)
