"""Where in a recipe's text a key stands, so that an error can name the line.

`tomllib` gives values without places. This walks the text once, following table headers and top-level keys
of each table, and skips what stands inside multi-line strings (a recipe may hold a SQL query, full of `=`).
It is a finder for messages, not a parser: the file is parsed by `tomllib` alone.
"""

from __future__ import annotations

import re

HEADER = re.compile(r"\s*\[{1,2}\s*([^\[\]]+?)\s*\]{1,2}\s*(#.*)?$")
KEY = re.compile(
    r"""\s*((?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*'))*)\s*="""
)
KEY_SEGMENT = re.compile(r"""[A-Za-z0-9_-]+|"[^"]*"|'[^']*'""")
STRING_DELIMITERS = ('"""', "'''")


def key_lines(text: str) -> dict[tuple[str, ...], int]:
    """The line (from 1) of every table header and key, by its full path."""
    found: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    fence = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if fence:
            if fence in line:
                fence = ""
            continue
        if header := HEADER.match(line):
            table = _split_key(header[1])
            _record_line(found, (), table, number)
        elif key := KEY.match(line):
            _record_line(found, table, _split_key(key[1]), number)
            fence = _unclosed_delimiter(line[key.end() :])
    return found


def line_of(lines: dict[tuple[str, ...], int], *path: str) -> int:
    """The line of a key, or of the nearest table around it; 1 if neither stands in the text."""
    for length in range(len(path), 0, -1):
        if path[:length] in lines:
            return lines[path[:length]]
    return 1


def _record_line(
    found: dict[tuple[str, ...], int], table: tuple[str, ...], key: tuple[str, ...], number: int
) -> None:
    for length in range(1, len(key) + 1):
        found.setdefault((*table, *key[:length]), number)


def _split_key(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip("\"'") for part in KEY_SEGMENT.findall(dotted))


def _unclosed_delimiter(value: str) -> str:
    """The fence of a multi-line string that begins in `value` and does not end there, or ""."""
    value = value.strip()
    for fence in STRING_DELIMITERS:
        if value.startswith(fence) and value.count(fence) == 1:
            return fence
    return ""
