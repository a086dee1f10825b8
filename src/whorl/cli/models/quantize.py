"""`whorl quantize`: a quantized copy of a model in the store."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from whorl.cli.options import RefArgument, StoreOption, open_artifact


def quantize(
    artifact: RefArgument,
    scheme: Annotated[
        str, typer.Option(metavar="int8|int4|fp8", help="Number format of the weights.")
    ] = "int8",
    group: Annotated[
        int | None,
        typer.Option(min=2, help="Columns per scale; default: 64 for int4, else the whole row."),
    ] = None,
    dynamic: Annotated[
        bool, typer.Option("--dynamic", help="Also round activations, row by row; integer matrix products.")
    ] = False,
    calibrate: Annotated[
        int, typer.Option(min=0, help="Rows of training text for GPTQ; 0 rounds to nearest.")
    ] = 0,
    head: Annotated[bool, typer.Option("--head", help="Also the output matrix, in int8.")] = False,
    ngram: Annotated[bool, typer.Option("--ngram", help="Also the n-gram tables, in int8.")] = False,
    tokens: Annotated[
        str | None,
        typer.Option(metavar="ARTIFACT", help="Token set for calibration; default: the one of its training."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name in the store; default: made of model and scheme.")
    ] = None,
    store: StoreOption = None,
) -> None:
    """Store a model's matrices in few bits. The result is used like any other model.

    Examples:

        whorl quantize quickstart/pretrain --scheme int8 --ngram

        whorl quantize quickstart/pretrain --scheme int4 --group 64 --calibrate 64

        whorl quantize quickstart/pretrain --scheme int8 --dynamic --head
    """
    from pydantic import ValidationError

    from whorl.errors import ConfigError
    from whorl.models.compression.quantize import QuantizationConfig
    from whorl.recipes import Recipe, RecipeStep, run_recipe, step_kinds
    from whorl.recipes.steps.quantize import QuantizeConfig
    from whorl.store import Store
    from whorl.tracking.progress import Progress

    opened = Store(store)
    found = open_artifact(artifact, store, ("model",), "a model")
    group = 64 if group is None and scheme == "int4" else group
    rounding = "calibrated" if calibrate else "nearest"
    fields = {
        "format": scheme,
        "group_size": group,
        "dynamic": dynamic,
        "rounding": rounding,
        "head": head,
        "ngram": ngram,
    }
    try:
        made = QuantizationConfig.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        flags = {"format": "--scheme", "group_size": "--group"}
        given = [
            f"{flags.get(k, f'--{k}')} {v}"
            for k, v in fields.items()
            if v and (not first["loc"] or k in first["loc"])
        ]
        expected = str(first["msg"]).removeprefix("Value error, ")
        raise ConfigError(" ".join(given), expected=expected) from error
    parents = {"model": found}
    if calibrate:
        text = opened.open(tokens) if tokens else opened.find(found.parents.get("tokens", ""))
        if text is None or text.kind != "tokens":
            raise ConfigError(
                f"--calibrate {calibrate}: {found.name} was not trained on a token set of this store"
                if text is None
                else f"--tokens {tokens} is of the kind {text.kind}",
                expected="a token set, encoded with the model's own tokenizer",
                do="give one with --tokens, or omit --calibrate",
            )
        parents["tokens"] = text
    parts = [
        *found.name.split("/")[-2:],
        scheme,
        *([str(group)] if group else []),
        *(["dynamic"] if dynamic else []),
    ]
    label = re.sub(r"[^A-Za-z0-9_-]+", "-", name or "-".join(parts))
    config = QuantizeConfig(
        scheme=made.model_dump(), **({"calibration_samples": calibrate} if calibrate else {})
    )
    recipe = Recipe(
        "quantized",
        "a quantized model",
        {label: RecipeStep(label, step_kinds()["quantize"], {role: role for role in parents}, config)},
    )
    progress = Progress()
    artifact_made = run_recipe(recipe, opened, progress, existing=parents).artifacts[label]
    store_option = f" --store {store}" if store else ""
    progress.log(
        f'model:  {artifact_made.path}\nnext:   whorl sample {artifact_made.name} "..."{store_option}'
    )
