"""`whorl caption`: captions of image files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from whorl.cli.options import RefArgument, StoreOption


def caption(
    artifact: RefArgument,
    files: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="Image files.")],
    store: StoreOption = None,
) -> None:
    """Print a caption for each image, one per line; with several images after the name of the file.

    Files that are no images are skipped, listed and counted on standard error.

    Example:

        whorl caption caption-scenes/captioner scene.png
    """
    from whorl.cli.images import open_vision, read_files
    from whorl.store import Store

    model = open_vision(Store(store).open(artifact))
    model.check_captioner()
    good, pixels = read_files(files, model.preprocessing.shape)
    for path, text in zip(good, model.caption(pixels), strict=True):
        print(f"{path}: {text}" if len(files) > 1 else text)
