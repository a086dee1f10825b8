"""`whorl gc`: remove what no name reaches."""

from __future__ import annotations

from typing import Annotated

import typer

from whorl.cli.options import StoreOption, format_size


def gc(
    yes: Annotated[bool, typer.Option("--yes", help="Really remove; without it nothing is touched.")] = False,
    recent: Annotated[
        float, typer.Option(metavar="HOURS", help="Spare artifacts made in the last so many hours.")
    ] = 1.0,
    store: StoreOption = None,
) -> None:
    """Remove artifacts that no name reaches, and what dead builds left behind; a dry run by default.

    Examples:

        whorl gc

        whorl gc --yes
    """
    from whorl.store import Store

    found = Store(store).gc(dry_run=not yes, recent_seconds=recent * 3600)
    for garbage in found:
        print(f"{format_size(garbage.size):>9}  {garbage.label}")
    total = format_size(sum(garbage.size for garbage in found))
    if not found:
        print("nothing to remove")
    elif yes:
        print(f"removed {total}")
    else:
        print(f"{total} can go: `whorl gc --yes` removes it")
