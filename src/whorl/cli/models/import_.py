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
    """Read a model of a known family (GPT-2, Llama, Mistral, Qwen, Gemma, Mixtral, DeepSeek-V3, ViT, CLIP) into the store.

    Examples:

        whorl import Qwen3-0.6B

        whorl import ./llama --name llama
    """
    from whorl.recipes import Recipe, RecipeStep, run_recipe, step_kinds
    from whorl.recipes.steps.import_model import ImportConfig, import_step_for
    from whorl.store import Store
    from whorl.tracking.progress import Progress

    label = re.sub(r"[^A-Za-z0-9_-]+", "-", name or Path(folder).resolve().name).strip("-_") or "model"
    place_of = Path(folder).expanduser().absolute()
    config = ImportConfig(folder=str(place_of), ignore=ignore or [])
    kind = step_kinds()[import_step_for(place_of)]
    recipe = Recipe("imported", "a model of others", {label: RecipeStep(label, kind, {}, config)})
    progress = Progress()
    artifact = run_recipe(recipe, Store(store), progress).artifacts[label]
    place = f" --store {store}" if store else ""
    following = [f'whorl sample {artifact.name} "..."{place}'] if artifact.kind == "model" else []
    following.append(f"whorl export {artifact.name} FOLDER{place}")
    progress.log(f"model:  {artifact.path}\nnext:   " + "\n        ".join(following))
