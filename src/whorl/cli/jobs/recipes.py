"""`whorl recipes`: list the packaged recipes."""

from __future__ import annotations


def recipes() -> None:
    """List the packaged recipes with their steps.

    Example:

        whorl recipes
    """
    from whorl.recipes import load_recipe, ready_recipes

    loaded = [load_recipe(name) for name in sorted(ready_recipes())]
    width = max(len(recipe.name) for recipe in loaded)
    for recipe in loaded:
        print(f"{recipe.name:<{width}}  {recipe.about}")
        print(f"{'':<{width}}  {' -> '.join(recipe.steps)}")
