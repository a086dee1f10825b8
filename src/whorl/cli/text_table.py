"""Tables and lists on standard output."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import BaseModel


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[str] = ()) -> None:
    """Print rows of cells below their heads. The first column, and those named in `left`, are aligned to the left."""
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
    to_left = [i == 0 or head in left for i, head in enumerate(heads)]
    for row in [heads, *rows]:
        cells = [
            cell.ljust(width) if is_left else cell.rjust(width)
            for cell, width, is_left in zip(row, widths, to_left, strict=True)
        ]
        print("  ".join(cells).rstrip())


def print_methods(methods: Mapping[str, type], notes: Mapping[str, str] | None = None) -> None:
    """Print each method with its note, and what its docstring or that of its file has after the name."""
    for name, kind in methods.items():
        text = kind.__doc__ or sys.modules[kind.__module__].__doc__ or ""
        text = text.partition("\n\n")[0].split("(")[0].strip().rstrip(".")
        note = f"{notes[name]:<9} " if notes else ""
        print(f"{name:<16}{note}{text.partition(': ')[2]}")


def print_settings(config: type[BaseModel], hidden: Collection[str]) -> None:
    """Print each setting with its default and its description, which a base class may have."""
    for name, field in config.model_fields.items():
        if name in hidden:
            continue
        fields = [getattr(base, "model_fields", {}).get(name) for base in config.__mro__]
        text = next((f.description for f in fields if f is not None and f.description), "")
        default, inside = field.default, getattr(type(field.default), "model_fields", {})
        if inside and not hasattr(default, "kind"):
            text, default = f"{text}: {', '.join(inside)}", "a table"
        print(f"{name:<20} {getattr(default, 'kind', default)!s:<12} {text}".rstrip())


def print_blocks(blocks: Sequence[Any]) -> None:
    """Print the texts and tables of a report; other blocks need a page."""
    for block in blocks:
        if block.kind == "text":
            print("\n".join(block.lines))
        elif block.kind == "table":
            print(f"\n{block.title}")
            print_table([column.name for column in block.columns], block.rows)
