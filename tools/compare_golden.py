"""Compare the golden cases of two commits on this machine, bit for bit.

    python tools/compare_golden.py BASE [--cases REGEX] [--fast]

BASE is checked out into a temporary worktree. Each tree runs its own `tests/golden/write.py` in this interpreter, with its
own `src` first on the path. The base's cases use the base's names, and only results are compared. Prints one row per hash.
Help texts and parameter names are listed separately. Exits with 1 if a hash differs; help texts count with `--help-too`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WRITE = Path("tests/golden/write.py")
SEPARATE = {"help": "help texts", "names": "parameter names"}


def start(tree: Path, dump: Path, options: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a tree's own cases in a process whose `whorl` is the tree's."""
    if not (tree / WRITE).is_file():
        sys.exit(f"{tree} has no {WRITE}: choose a BASE that has the golden cases")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WHORL_")}
    environment |= {
        "PYTHONPATH": os.pathsep.join(map(str, (tree / "src", tree / "tests", tree))),
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable,
        str(tree / WRITE),
        "--dump",
        str(dump),
        "--source",
        str(tree / "src"),
        *options,
    ]
    return subprocess.Popen(
        command, cwd=tree, env=environment, stdout=log.open("wb"), stderr=subprocess.STDOUT
    )


def rows_of(base: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(name, base hash, new hash) of every result in either dump; "-" where it is missing."""
    rows = []
    for name in sorted({*base, *new}):
        ours, theirs = (_hashes(dump.get(name)) for dump in (new, base))
        for part in sorted({*ours, *theirs}):
            rows.append((f"{name} {part}", theirs.get(part, "-"), ours.get(part, "-")))
    return rows


def _hashes(entry: dict[str, Any] | None) -> dict[str, str]:
    if entry is None:
        return {}
    return entry.get("hashes") or {"error": entry["error"]}


def same(row: tuple[str, str, str]) -> bool:
    """Whether both commits have this result, without an error, and it is equal."""
    return row[1] == row[2] != "-" and not row[0].endswith(" error")


def table(title: str, rows: list[tuple[str, str, str]], *, differences_only: bool = False) -> None:
    """Print rows under a title."""
    different = [row for row in rows if not same(row)]
    print(f"\n{title}: {len(rows) - len(different)} same, {len(different)} different")
    shown = different if differences_only else rows
    width = max((len(row[0]) for row in shown), default=0)
    for row in shown:
        name, old, new = row
        cut = 60 if name.endswith(" error") else 16
        print(f"{name:{width}} | {old[:cut]:16} | {new[:cut]:16} | {'same' if same(row) else 'DIFFERENT'}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", help="the commit to compare with")
    parser.add_argument("--cases", default="", metavar="REGEX", help="only cases whose name matches")
    parser.add_argument("--fast", action="store_true", help="leave out slow cases (the quickstart)")
    parser.add_argument("--help-too", action="store_true", help="exit with 1 if only help texts differ, too")
    parser.add_argument("--new", metavar="COMMIT", help="compare this commit instead of the working tree")
    parser.add_argument("--one-by-one", action="store_true", help="run the two trees one after the other")
    given = parser.parse_args()
    options = ["--cases", given.cases, *(["--fast"] if given.fast else [])]
    began, dumps = time.monotonic(), dict[str, dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="golden-compare-") as place:
        folder, trees = Path(place), dict[str, Path]()
        running: list[tuple[str, subprocess.Popen[bytes]]] = []
        try:
            for side, commit in (("base", given.base), ("new", given.new)):
                trees[side] = _worktree(folder / side, commit) if commit else ROOT
            for side, tree in trees.items():
                process = start(tree, folder / f"{side}.json", options, folder / f"{side}.log")
                running.append((side, process))
                if given.one_by_one:
                    process.wait()
            for side, process in running:
                process.wait()
                if not (folder / f"{side}.json").is_file():
                    sys.exit(f"{side} failed:\n{(folder / f'{side}.log').read_text()}")
                dumps[side] = json.loads((folder / f"{side}.json").read_text())
                for trace in re.findall(
                    r"^\S+: failed\n(?:.+\n)+", (folder / f"{side}.log").read_text(), re.M
                ):
                    print(f"{side}: {trace}")
        finally:
            for _, process in running:
                if process.poll() is None:
                    process.terminate()
                    process.wait()
            for tree in trees.values():
                if tree != ROOT:
                    _git("worktree", "remove", "--force", str(tree), check=False)
    rows = rows_of(dumps["base"], dumps["new"])
    groups = {title: [r for r in rows if r[0].split(" ")[0] == name] for name, title in SEPARATE.items()}
    bits = [row for row in rows if row[0].split(" ")[0] not in SEPARATE]
    table("weights, tokens, curves", bits)
    for title, group in groups.items():
        table(title, group, differences_only=True)
    strict = [r for title, group in groups.items() for r in group if title != "help texts" or given.help_too]
    different = sum(not same(row) for row in [*bits, *strict])
    print(f"\n{different} differences; {time.monotonic() - began:.0f} s")
    sys.exit(1 if different or not rows else 0)


def _worktree(folder: Path, commit: str) -> Path:
    _git("worktree", "add", "--detach", str(folder), commit)
    return folder


def _git(*words: str, check: bool = True) -> None:
    git = shutil.which("git") or "git"
    done = subprocess.run([git, "-C", str(ROOT), *words], capture_output=True, text=True)
    if check and done.returncode:
        sys.exit(done.stderr.strip())


if __name__ == "__main__":
    main()
