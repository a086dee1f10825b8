"""`whorl export`: a model of the store, written as others read it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from whorl.cli.options import RefArgument, StoreOption


def export(
    artifact: RefArgument,
    folder: Annotated[Path, typer.Argument(help="Made by this command; must be empty or absent.")],
    to: Annotated[
        str, typer.Option(metavar="FAMILY", help="As llama, qwen3, mixtral; an unknown one lists all.")
    ],
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; else as it is.")] = None,
    store: StoreOption = None,
) -> None:
    """Write a model as a folder that transformers loads.

    Example:

        whorl export imported/Qwen3-0.6B mine --to qwen3 --dtype bfloat16
    """
    import torch

    from whorl.errors import ConfigError, one_of
    from whorl.models.exchange import export_model, import_model
    from whorl.store import Store

    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype is not None and dtype not in kinds:
        raise ConfigError(f"--dtype {dtype}", expected=one_of(dtype, list(kinds)))
    found = Store(store).open(artifact)
    if found.kind != "transformer":
        raise ConfigError(
            f"{found.name} is a {found.kind}",
            expected="a transformer, as `whorl import` makes",
            do="our own small models have n-gram memories and smeared keys, for which no other format has a word"
            if found.kind == "model"
            else "list what there is with `whorl ls`",
        )
    found.check()
    model = import_model(found.path / "model")
    export_model(model, folder, to, dtype=kinds[dtype] if dtype else None, source=found.path / "model")
    print(f"{to}: {folder}")
