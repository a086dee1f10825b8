"""Recipes: TOML lists of steps, validated before any work and run by look-up in the store."""

from whorl.recipes.recipe import Recipe, RecipeStep, load_recipe, parse_recipe
from whorl.recipes.registry import StepContext, StepKind, step, step_kinds
from whorl.recipes.runner import RunResult, run_folder, run_recipe
from whorl.recipes.toml_lines import ready_recipes

__all__ = [
    "Recipe",
    "RecipeStep",
    "RunResult",
    "StepContext",
    "StepKind",
    "load_recipe",
    "parse_recipe",
    "ready_recipes",
    "run_folder",
    "run_recipe",
    "step",
    "step_kinds",
]
