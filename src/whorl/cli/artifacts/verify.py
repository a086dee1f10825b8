"""`whorl verify`: check every file against its hash."""

from __future__ import annotations

from typing import Annotated

import typer

from whorl.cli.options import StoreOption


def verify(
    artifact: Annotated[
        str | None,
        typer.Argument(
            metavar="[ARTIFACT]", help="One artifact and its ancestors; default: the whole store."
        ),
    ] = None,
    store: StoreOption = None,
) -> None:
    """Check the content of every file against its hash and list the damaged files.

    Examples:

        whorl verify

        whorl verify tokens
    """
    from whorl.errors import CorruptArtifactError
    from whorl.store import Store
    from whorl.tracking.progress import Progress

    progress = Progress()
    with progress.task("Verifying", unit="artifacts") as task:
        problems = (
            Store(store).require().verify(artifact, on_artifact=lambda found: task.advance(note=found.label))
        )
    for problem in problems:
        print(problem)
    if problems:
        raise CorruptArtifactError(
            f"{len(problems)} problem{'s' * (len(problems) > 1)} found",
            do="run the recipe again: damaged artifacts are moved away and remade",
        )
    print("no damage found")
