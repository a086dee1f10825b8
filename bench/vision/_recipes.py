"""Runs of a shipped recipe with another seed, in a temporary store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from whorl.recipes import load_recipe, run_recipe
from whorl.store import Artifact, Store
from whorl.tracking.progress import Progress


def run_seed(
    recipe: str, seed: int, folder: Path, sets: Sequence[str] = (), until: str | None = None
) -> dict[str, Artifact]:
    """The artifacts of a recipe, step name -> artifact; `seed` decides data, weights and order of every step.

    Args:
        sets: further settings, "step.field=value".
        until: the last step.
    """
    steps = load_recipe(recipe).steps
    seeds = [
        f"{name}.seed={seed}" for name, step in steps.items() if "seed" in type(step.config).model_fields
    ]
    chosen = load_recipe(recipe, sets=[*seeds, *sets])
    return dict(run_recipe(chosen, Store(folder), Progress.silent(), until=until).artifacts)
