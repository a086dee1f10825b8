"""Profile the training step of a recipe, after its earlier steps are made or looked up."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from whorl.errors import ConfigError, one_of
from whorl.machine.kernel_choice import force_choices
from whorl.recipes.recipe import Recipe, RecipeStep
from whorl.recipes.registry import StepContext
from whorl.recipes.runner import open_given, run_recipe
from whorl.store import Store
from whorl.tracking.progress import Progress

if TYPE_CHECKING:
    from whorl.train.profiling.profiler import Profile


def find_training_step(recipe: Recipe, name: str | None = None) -> RecipeStep:
    """Return the step that pretrains, or the one called `name` if there are several.

    Raises:
        ConfigError: the recipe has none, or several and no name is given.
    """
    found = {step.name: step for step in recipe.steps.values() if step.kind.name == "pretrain"}
    if name is not None and name not in found:
        raise ConfigError(f"--step {name}: no such pretraining step", expected=one_of(name, list(found)))
    if name is None and len(found) != 1:
        raise ConfigError(
            f"the recipe {recipe.name} has {len(found) or 'no'} pretraining steps",
            expected="one",
            do=f"select one: --step {next(iter(found))}" if found else "profile another recipe",
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
    """Profile the training of a recipe; only the artifacts of earlier steps and the trace are kept.

    Args:
        step: name of the step, if the recipe pretrains several times.
        steps: number of timed steps; as many again are traced.
        compiled: whether to compile; default: as planned.
        trace: path of the trace; default: in the run folder.
    """
    training = find_training_step(recipe, step)
    result = run_recipe(
        recipe, store, progress, until=[p for p in training.parents.values() if p in recipe.steps]
    )
    from whorl.recipes.steps.pretrain.pretrain import PretrainConfig, build_job
    from whorl.train.profiling.profiler import profile

    config = (
        training.kind.complete_config(training.config, store)
        if training.kind.complete_config is not None
        else training.config
    )
    assert isinstance(config, PretrainConfig)
    found = {**open_given(recipe, store), **result.artifacts}
    parents = {role: found[name] for role, name in training.parents.items()}
    folder = result.run.dir
    job = build_job(StepContext(training.name, folder, folder, parents, result.run, progress, store), config)
    if compiled is not None:
        job = job.model_copy(update={"compile": compiled})
    path = trace if trace is not None else folder / f"trace-{training.name}.json.gz"
    compiles = ", after compiling" if job.compile else ""
    progress.log(f"{training.name}: {steps} steps timed and {steps} traced{compiles}")
    with force_choices(recipe.kernels):
        return profile(job, path, steps=steps)
