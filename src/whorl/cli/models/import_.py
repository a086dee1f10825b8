"""`whorl import`: read an external model into the store."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from whorl.cli.options import StoreOption


def import_(
    folder: Annotated[
        str, typer.Argument(help="In the format of transformers: config.json and safetensors.")
    ],
    name: Annotated[str | None, typer.Option(help="Name in the store; default: that of the folder.")] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD", help="A field of config.json that does not affect the result; may be repeated."
        ),
    ] = None,
    store: StoreOption = None,
) -> None:
    """Read a model of a known family (Llama, Mistral, Qwen, Phi, Gemma, DeepSeek-V3, CLIP, ...) into the store.

    Examples:

        whorl import ./Qwen3-0.6B

        whorl import ./llama --name llama
    """
    from whorl.recipes import Recipe, RecipeStep, run_recipe, step_kinds
    from whorl.recipes.steps.import_model import ImportConfig, import_step_for
    from whorl.store import Store
    from whorl.tracking.progress import Progress

    label = re.sub(r"[^A-Za-z0-9_-]+", "-", name or Path(folder).resolve().name).strip("-_") or "model"
    source = Path(folder).expanduser().absolute()
    config = ImportConfig(folder=str(source), ignore=ignore or [])
    kind = step_kinds()[import_step_for(source)]
    recipe = Recipe("imported", "an external model", {label: RecipeStep(label, kind, {}, config)})
    progress = Progress()
    artifact = run_recipe(recipe, Store(store), progress).artifacts[label]
    store_option = f" --store {store}" if store else ""
    can_generate = artifact.kind == "model" and artifact.summary.get("has_tokenizer", True)
    commands = [f'whorl sample {artifact.name} "..."{store_option}'] if can_generate else []
    commands.append(f"whorl export {artifact.name} FOLDER{store_option}")
    progress.log(f"model:  {artifact.path}\nnext:   " + "\n        ".join(commands))
