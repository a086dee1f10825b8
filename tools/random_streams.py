"""List the names of all random streams: the literals that `derive`, `generator` and `numpy_rng` are called with.

    python tools/random_streams.py [--tree FOLDER]          prints one line per call in FOLDER/src and FOLDER/bench, sorted
    python tools/random_streams.py --against BASE           compares with a commit; exits with 1 on a difference

A stream's seed is the hash of its name (`derive`), so a renamed literal changes every number that is drawn. A line has the
function and its arguments: literals verbatim, everything else as `_`. Identifiers, files and order may change.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import io
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("src", "bench")  # studies may move from one to the other
FUNCTIONS = frozenset({"derive", "generator", "numpy_rng"})


def calls(tree: ast.AST) -> Iterator[str]:
    """One line for each call of a stream function, direct or through `partial`."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name, arguments = _name(node.func), list(node.args)
        if name == "partial" and arguments:
            name, arguments = _name(arguments[0]), arguments[1:]
        if name == "EpochOrder":  # appends the epoch
            yield f"numpy_rng({', '.join(map(_shown, arguments))}, _)"
        if name in FUNCTIONS:
            given = [_shown(a) for a in (*arguments, *(k.value for k in node.keywords))]
            yield f"{name}({', '.join(given)})"


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _shown(node: ast.AST) -> str:
    """A literal verbatim; an expression as the string literals inside of it, or `_`."""
    if isinstance(node, ast.Constant):
        return repr(node.value)
    inside = [
        repr(n.value) for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)
    ]
    star = "*" if isinstance(node, ast.Starred) else ""
    return star + ("|".join(inside) or "_")


def streams(tree: Path) -> list[str]:
    """The sorted lines of all Python files of a tree's `FOLDERS`."""
    files = [path for name in FOLDERS for path in (tree / name).rglob("*.py")]
    return sorted(line for path in files for line in calls(ast.parse(path.read_text())))


def streams_of(commit: str) -> list[str]:
    """The sorted lines of a commit."""
    done = subprocess.run(["git", "-C", str(ROOT), "archive", commit, *FOLDERS], capture_output=True)
    if done.returncode:
        sys.exit(done.stderr.decode().strip())
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            archive.extractall(folder, filter="data")
        return streams(Path(folder))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tree", type=Path, default=ROOT, help="the tree to read (default: this one)")
    parser.add_argument("--against", metavar="BASE", help="a commit to compare with")
    given = parser.parse_args()
    found = streams(given.tree)
    if given.against is None:
        print("\n".join(found))
        return
    before = streams_of(given.against)
    changed = [line for line in difflib.ndiff(before, found) if line[:2] in ("- ", "+ ")]
    print("\n".join(changed) or f"{len(found)} calls, the same in {given.against}")
    sys.exit(1 if changed else 0)


if __name__ == "__main__":
    main()
