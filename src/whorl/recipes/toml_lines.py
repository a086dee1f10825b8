"""The text of a recipe, and the line numbers of its keys, for error messages.

`tomllib` returns values without positions. This module scans the text once for table headers and keys and skips
multi-line strings (a recipe may hold a SQL query with `=`). Only `tomllib` parses the file; the scan serves messages.
"""

from __future__ import annotations

import re
from importlib import resources

from whorl.errors import ConfigError, one_of
from whorl.store import user_path

HEADER = re.compile(r"\s*\[{1,2}\s*([^\[\]]+?)\s*\]{1,2}\s*(#.*)?$")
KEY = re.compile(
    r"""\s*((?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*'))*)\s*="""
)
KEY_SEGMENT = re.compile(r"""[A-Za-z0-9_-]+|"[^"]*"|'[^']*'""")
STRING_DELIMITERS = ('"""', "'''")


def ready_recipes() -> dict[str, str]:
    """Return name -> text of the recipes in the package."""
    folder = resources.files("whorl.recipes")
    found = (entry for entry in folder.iterdir() if entry.name.endswith(".toml"))
    return {entry.name.removesuffix(".toml"): entry.read_text(encoding="utf-8") for entry in found}


def read_recipe_text(name: str) -> tuple[str, str]:
    """Return (text, source name) of a packaged recipe or a TOML file. Raises ConfigError if neither exists."""
    path = user_path(name)
    if path.suffix == ".toml" or path.is_file():
        try:
            return path.read_text(encoding="utf-8"), str(path)
        except OSError as error:
            raise ConfigError(f"the recipe {name} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"the recipe {name} is not UTF-8 text: {error}") from error
    ready = ready_recipes()
    if name not in ready:
        raise ConfigError(
            f"there is no recipe {name!r}",
            expected=f"a .toml file, or {one_of(name, sorted(ready))}",
            do="list the packaged recipes with `whorl recipes`",
        )
    return ready[name], f"{name}.toml"


def key_lines(text: str) -> dict[tuple[str, ...], int]:
    """Return the line (from 1) of every table header and key, by full path."""
    found: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    delimiter = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if delimiter:
            if delimiter in line:
                delimiter = ""
            continue
        if header := HEADER.match(line):
            table = _split_key(header[1])
            _record_line(found, (), table, number)
        elif key := KEY.match(line):
            _record_line(found, table, _split_key(key[1]), number)
            delimiter = _unclosed_delimiter(line[key.end() :])
    return found


def line_of(lines: dict[tuple[str, ...], int], *path: str) -> int:
    """Return the line of a key, or of the nearest enclosing table, or 1."""
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
    """Return the delimiter of a multi-line string that starts in `value` and does not end there, or ""."""
    value = value.strip()
    for delimiter in STRING_DELIMITERS:
        if value.startswith(delimiter) and value.count(delimiter) == 1:
            return delimiter
    return ""
