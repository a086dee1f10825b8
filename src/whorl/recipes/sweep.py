"""Names of runs, one run of a recipe for each of several seeds, and the mean of their figures (`whorl run --seeds`).

A seed belongs to the steps that train: data, plan, tokenizer, tasks and evaluation are the same for all. A seed that `--set`
gives stays.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from whorl.errors import ConfigError, shorten
from whorl.recipes.recipe import STEP_NAME, Recipe
from whorl.report.blocks import EMPTY
from whorl.report.format import NBSP, format_number

if TYPE_CHECKING:
    from whorl.store import Artifact

# Kinds of artifacts with trained weights. `agents` has several seeds; that of `text_classifier` also splits the texts.
WEIGHTS = ("model", "reward_model", "vision", "embedder", "generative")
MAX_SEEDS = 1000


def training_seeds(recipe: Recipe) -> dict[str, int]:
    """Return step -> seed of the steps that train; a step without one has that of its plan."""
    found: dict[str, int] = {}
    for step in recipe.steps.values():
        if step.kind.output_kind in WEIGHTS and hasattr(step.config, "seed"):
            plan: Any = recipe.steps.get(step.parents.get("plan", ""), step)
            found[step.name] = step.config.seed if step.config.seed is not None else plan.config.seed or 0
    return found


def named(recipe: Recipe, name: str) -> Recipe:
    """Return the recipe with another name for its run and artifacts. Raises ConfigError."""
    if not STEP_NAME.fullmatch(name):
        what = f"--name {shorten(name)}: a run cannot be called that"
        raise ConfigError(what, expected="letters, digits, _ and -, at most 100")
    return replace(recipe, given_name=name)


def parse_seeds(text: str) -> list[int]:
    """Return the seeds of `--seeds`: "3" gives 0, 1 and 2; "3,7" gives these two. Raises ConfigError."""
    parts = [int(part) if part.isdecimal() else -1 for part in text.split(",")]
    seeds = parts if parts[1:] else [*range(min(parts[0], MAX_SEEDS + 1))]
    if not 0 < len({*seeds}) == len(seeds) <= MAX_SEEDS or min(seeds) < 0:
        expected = f"a number of runs from 1 to {MAX_SEEDS:,}, or different seeds from 0 on, such as 3,7"
        raise ConfigError(f"--seeds {text}: no seeds", expected=expected)
    return seeds


def seed_settings(recipe: Recipe, seed: int, sets: Collection[str]) -> list[str]:
    """Return `--set` options: the given ones, and the seed of each step that trains.

    Raises:
        ConfigError: no step has a seed that is not given already.
    """
    given = {text.partition("=")[0].strip() for text in sets}
    seeds = {step: own for step, own in training_seeds(recipe).items() if f"{step}.seed" not in given}
    if not seeds:
        raise ConfigError(
            f"--seeds: no step of {recipe.name} trains with a seed that may change",
            expected=f"a step that makes one of: {', '.join(WEIGHTS)}, without --set STEP.seed",
        )
    return [*sets, *(f"{step}.seed={seed}" for step, own in seeds.items() if own != seed)]


def figures_over_seeds(runs: Sequence[Mapping[str, Artifact]]) -> list[list[str]]:
    """Return rows of figure, number of runs, mean, 95 % interval (Student's t). runs: step -> artifact, for each seed."""
    from whorl.evals.statistics.intervals import mean_interval

    found: dict[str, list[dict[str, Any]]] = {}
    for step, artifact in (pair for artifacts in runs for pair in artifacts.items()):
        if (
            len({other[step].address for other in runs if step in other}) > 1
        ):  # else it does not depend on the seed
            for label, figure in artifact.summary.get("figures", {}).items():
                if figure["number"] is not None:
                    found.setdefault(f"{step}: {label}", []).append(figure)
    rows = []
    for name, figures in found.items():
        mean = mean_interval([figure["number"] for figure in figures])
        unit = "".join(figures[0]["value"].replace(NBSP, " ").partition(" ")[1:]).rstrip()
        cells = [format_number(value, 4) + unit for value in (mean.mean, mean.low, mean.high)]
        rows.append([name, str(mean.n), cells[0], f"{cells[1]} to {cells[2]}" if mean.n > 1 else EMPTY])
    return rows
