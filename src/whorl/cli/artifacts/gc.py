"""`whorl gc`: remove artifacts without a name or a run."""

from __future__ import annotations

from typing import Annotated

import typer

from whorl.cli.options import StoreOption, format_size


def gc(
    yes: Annotated[bool, typer.Option("--yes", help="Remove; without it, only list.")] = False,
    recent: Annotated[
        float, typer.Option(metavar="HOURS", help="Keep artifacts made in the last HOURS.")
    ] = 1.0,
    store: StoreOption = None,
) -> None:
    """Remove artifacts that no name or run refers to, and leftovers of dead builds; a dry run by default.

    Examples:

        whorl gc

        whorl gc --yes
    """
    from whorl.store import Store

    found = Store(store).require().gc(dry_run=not yes, recent_seconds=recent * 3600)
    for garbage in found:
        print(f"{format_size(garbage.size):>9}  {garbage.label}")
    total = format_size(sum(garbage.size for garbage in found))
    if not found:
        print("nothing to remove; `whorl runs --remove RUN` frees the artifacts of a run")
    elif yes:
        print(f"removed {total}")
    else:
        print(f"{total} can be removed with `whorl gc --yes`")
