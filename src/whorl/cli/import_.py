"""`whorl import`: a model of others becomes an artifact."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from whorl.cli.options import StoreOption


def import_(
    folder: Annotated[str, typer.Argument(help="As transformers writes it: config.json and safetensors.")],
    name: Annotated[str | None, typer.Option(help="Its name in the store; else the folder's.")] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD", help="A field of config.json known not to matter; may be repeated."),
    ] = None,
    store: StoreOption = None,
) -> None:
    """Read a model of a known family (GPT-2, Llama, Mistral, Qwen, Gemma, Mixtral, DeepSeek-V3) into the store.

    Examples:

        whorl import Qwen3-0.6B

        whorl import ./llama --name llama
    """
    from whorl.recipes import Recipe, RecipeStep, run_recipe, step_kinds
    from whorl.recipes.steps.exchange import ImportConfig
    from whorl.runs import Progress
    from whorl.store import Store

    label = re.sub(r"[^A-Za-z0-9_-]+", "-", name or Path(folder).resolve().name).strip("-_") or "model"
    config = ImportConfig(folder=str(Path(folder).expanduser().absolute()), ignore=ignore or [])
    recipe = Recipe(
        "imported", "a model of others", {label: RecipeStep(label, step_kinds()["import_model"], {}, config)}
    )
    progress = Progress()
    artifact = run_recipe(recipe, Store(store), progress).artifacts[label]
    place = f" --store {store}" if store else ""
    progress.say(f"model:  {artifact.path}\nnext:   whorl export {artifact.name} FOLDER --to FAMILY{place}")
