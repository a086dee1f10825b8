"""`whorl show`: one artifact in full."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from whorl.cli.options import RefArgument, StoreOption, format_size, format_time


def show(
    artifact: RefArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest as JSON.")] = False,
    store: StoreOption = None,
) -> None:
    """Show an artifact: step, parents, configuration, figures, files.

    Examples:

        whorl show tokens

        whorl show 3f2a --json
    """
    from whorl.store import Store
    from whorl.tracking.progress import format_duration

    opened = Store(store)
    found = opened.open(artifact)
    if as_json:
        print(found.manifest.to_json())
        return
    print(f"{found.name}  ({found.kind})")
    print(f"address  {found.address}")
    maker = f"{found.step} version {found.version}"
    print(f"made     {format_time(found.created)} in {format_duration(found.seconds)}, by {maker}")
    print(f"folder   {found.path}")
    for role, address in found.parents.items():
        parent = opened.find(address)
        print(f"from     {role}: {parent.label if parent is not None else address + ' (missing)'}")
    print("configuration")
    for key, value in found.config.items():
        print(f"  {key} = {json.dumps(value)}")
    print("figures")
    for key, value in found.summary.items():
        text = json.dumps(value)
        print(f"  {key} = {text if len(text) <= 200 else text[:200] + ' ...'}")
    print(f"files ({format_size(found.manifest.size)})")
    for name, entry in found.files.items():
        print(f"  {format_size(entry['size']):>9}  {entry['sha256'][:12]}  {name}")
