"""`whorl ls`: list the store."""

from __future__ import annotations

from typing import Annotated

import typer

from whorl.cli.options import StoreOption, format_size, format_time


def ls(
    everything: Annotated[
        bool, typer.Option("--all", help="Include artifacts that no name points to.")
    ] = False,
    store: StoreOption = None,
) -> None:
    """List the artifacts: address, kind, size, time, name, headline.

    Example:

        whorl ls --all
    """
    from whorl.store import Store

    opened = Store(store)
    named: dict[str, list[str]] = {}
    for name, address in opened.names().items():
        named.setdefault(address, []).append(name)
    shown = [artifact for artifact in opened.artifacts() if everything or artifact.address in named]
    if not shown:
        print(f"the store {opened.location} is empty; fill it with `whorl run quickstart`")
    for artifact in shown:
        names = ", ".join(named.get(artifact.address, [f"({artifact.name}, superseded)"]))
        figures = artifact.summary.get("headline", "")
        print(
            f"{artifact.address[:8]}  {artifact.kind:<10} {format_size(artifact.manifest.size):>9}  "
            f"{format_time(artifact.created)}  {names}  {figures}".rstrip()
        )
