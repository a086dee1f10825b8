"""`whorl lineage`: the ancestors of an artifact."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from whorl.cli.options import RefArgument, StoreOption


def lineage(
    artifact: RefArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print nested JSON with configurations.")] = False,
    store: StoreOption = None,
) -> None:
    """Show what an artifact was made from, down to the sources.

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
    """Return the tree as lines of text; a repeated artifact is not expanded again."""
    lines: list[str] = []
    expanded: set[str] = set()

    def add(node: dict[str, Any], head: str, indent: str, role: str) -> None:
        address = str(node["address"])
        label = "(missing)" if node.get("missing") else f"{node['name']} [{node['kind']}]"
        repeated = bool(node["parents"]) and address in expanded
        lines.append(f"{head}{role}{label} {address[:8]}{' (see above)' if repeated else ''}")
        if repeated:
            return
        expanded.add(address)
        parents = list(node["parents"].items())
        for number, (name, parent) in enumerate(parents, start=1):
            last = number == len(parents)
            add(parent, indent + ("└─ " if last else "├─ "), indent + ("   " if last else "│  "), f"{name}: ")

    add(tree, "", "", "")
    return lines
