"""`whorl classify`: the classes of image or text files, with probabilities."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from whorl.cli.options import RefArgument, StoreOption

if TYPE_CHECKING:
    from torch import Tensor

    from whorl.store import Artifact


def classify(
    artifact: RefArgument,
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Image files, or text files for a text classifier."),
    ],
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
    """Print the likeliest classes of images or texts with their probabilities.

    A classifier has its classes from training. A CLIP takes any: with --labels it is a zero-shot classifier. Unusable
    files are skipped, listed and counted on standard error.

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
    found = Store(store).open(artifact)
    if found.kind == "text_classifier" and not names:
        good, classes, probabilities = _classify_texts(found, files)
    else:
        model = open_vision(found)
        model.check_labels(names)
        good, pixels = read_files(files, model.preprocessing.shape)
        classes, probabilities = model.classify(pixels, names, template)
    for path, row in zip(good, probabilities, strict=True):
        print(path)
        for p, number in zip(*(t.tolist() for t in row.topk(min(top, len(classes)))), strict=True):
            print(f"  {p:.3f}  {classes[number]}")


def _classify_texts(found: Artifact, files: list[Path]) -> tuple[list[Path], list[str], Tensor]:
    """Return the readable files, the classes and the probabilities [N, K]. Raises DataError: no file has a text."""
    from whorl.cli.models.embed import TextReader
    from whorl.embedding.classifier import TextClassifier
    from whorl.errors import DataError
    from whorl.machine.device_probe import probe
    from whorl.tokens.tokenizer import Tokenizer

    found.check()
    machine = probe()
    machine.apply()
    model = TextClassifier.load(found.path, Tokenizer.load(found.path), machine.device)
    read = list(TextReader(files))
    if not read:
        raise DataError("no text to classify", expected="a file that is not empty")
    good = [Path(str(source["file"])) for source, _ in read]
    return good, [*model.classes], model.classify([text for _, text in read])
