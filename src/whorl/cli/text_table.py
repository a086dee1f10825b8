"""Tables on standard output."""

from __future__ import annotations

from collections.abc import Collection, Sequence


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
