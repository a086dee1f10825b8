"""`whorl classify`: the classes of image files, with probabilities."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from whorl.cli.options import RefArgument, StoreOption


def classify(
    artifact: RefArgument,
    files: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="Image files.")],
    labels: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,...", help="Classes for a CLIP, which compares the image with these texts."
        ),
    ] = None,
    template: Annotated[
        str, typer.Option(metavar="TEXT", help='Text of a label, {} in its place: "a photo of a {}".')
    ] = "{}",
    top: Annotated[int, typer.Option("-k", "--top", min=1, help="Number of classes that are printed.")] = 5,
    store: StoreOption = None,
) -> None:
    """Print the likeliest classes of images with their probabilities.

    A classifier has its classes from training. A CLIP takes any: with --labels it is a zero-shot classifier. Files that are
    no images are skipped, listed and counted on standard error.

    Examples:

        whorl classify classify-digits/classifier digit.png

        whorl classify caption-scenes/clip scene.png --labels "a red circle left of a blue square,a blue square"
    """
    from whorl.cli.images import open_vision, read_files
    from whorl.errors import ConfigError
    from whorl.store import Store

    if "{}" not in template:
        raise ConfigError(f"--template {template!r} has no place for the label", expected='{}, as in "a {}"')
    names = [label.strip() for label in labels.split(",")] if labels is not None else []
    if not all(names):
        raise ConfigError(f"--labels {labels!r} has an empty label", expected="labels between commas")
    model = open_vision(Store(store).open(artifact))
    model.check_labels(names)
    good, pixels = read_files(files, model)
    classes, probabilities = model.classify(pixels, names, template)
    for path, row in zip(good, probabilities, strict=True):
        print(path)
        for p, number in zip(*(t.tolist() for t in row.topk(min(top, len(classes)))), strict=True):
            print(f"  {p:.3f}  {classes[number]}")
