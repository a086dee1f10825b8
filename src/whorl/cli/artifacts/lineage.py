"""`whorl lineage`: which bytes an artifact came from."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from whorl.cli.options import RefArgument, StoreOption


def lineage(
    artifact: RefArgument,
    as_json: Annotated[bool, typer.Option("--json", help="As nested JSON, with configurations.")] = False,
    store: StoreOption = None,
) -> None:
    """Show what an artifact was made from, all the way down to the sources.

    Examples:

        whorl lineage tokens

        whorl lineage tokens --json
    """
    from whorl.store import Store

    opened = Store(store)
    tree = opened.lineage(opened.open(artifact))
    if as_json:
        print(json.dumps(tree, indent=1, ensure_ascii=False))
    else:
        print("\n".join(format_tree(tree)))


def format_tree(tree: dict[str, Any]) -> list[str]:
    """The tree as text. What stands above already is not unfolded again: lineages share their roots."""
    lines: list[str] = []
    unfolded: set[str] = set()

    def add(node: dict[str, Any], head: str, indent: str, role: str) -> None:
        address = str(node["address"])
        label = "(gone)" if node.get("missing") else f"{node['name']} [{node['kind']}]"
        again = bool(node["parents"]) and address in unfolded
        lines.append(f"{head}{role}{label} {address[:8]}{' (see above)' if again else ''}")
        if again:
            return
        unfolded.add(address)
        parents = list(node["parents"].items())
        for number, (name, parent) in enumerate(parents, start=1):
            last = number == len(parents)
            add(parent, indent + ("└─ " if last else "├─ "), indent + ("   " if last else "│  "), f"{name}: ")

    add(tree, "", "", "")
    return lines
