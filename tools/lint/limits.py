"""Measure the package against its size limits, and maintain the list of exceptions.

A folder of `src`, `tests`, `bench`, `studies` or `tools` has at most 15 Python files, and a folder within a room of the
package at least 4. Some rooms have a budget of lines (`BUDGETS`). A file of the package imports at most 15 project
modules, and a function has at most 10 parameters and 80 code lines. A public class has one name. There is no cycle of
imports, neither at import time (`import_cycle`) nor with the imports inside functions (`deferred_cycle`).

The syntax tree is read and the package is not imported, so the script runs without its dependencies.
`limits_allowed.json` lists each exception with its value and its reason. `tests/house/test_limits.py` fails when a value
grows, when a new exception appears, and when an exception is no longer needed.

    python tools/lint/limits.py                        # violations that the list does not cover (exit code 1)
    python tools/lint/limits.py --all                  # every exception, the largest first
    python tools/lint/limits.py --write                # rewrite the list with today's values, keep the reasons
    python tools/lint/limits.py --write --reason TEXT  # the same, and TEXT is the reason of new entries
"""

from __future__ import annotations

import argparse
import ast
import gc
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import resolve_name
from pathlib import Path

ROOT = Path(__file__).parents[2]
ALLOWED = Path(__file__).with_name("limits_allowed.json")
PACKAGE = "whorl"
FOLDERS = ("src", "tests", "bench", "studies", "tools")

FEWEST_FILES = 4
# Lines of Python in rooms, blank ones and comments too.
BUDGETS = {
    "evals": 13_000, "corpus": 9_300, "train": 8_200, "nn": 8_600, "align": 8_400, "models": 8_300, "engine": 7_400,
    "recipes": 5_850, "serve router http loadtest": 8_300, "cli": 4_020, "sandbox": 3_100, "machine": 2_000, "agents": 3_400,
    "generative": 3_200, "log": 1_600, "loop": 3_600, "search": 1_300,
}  # fmt: skip
LIMITS = {"files_per_folder": 15, "files_missing": 0, "lines_over_budget": 0, "imports_per_file": 15}
LIMITS |= {"parameters": 10, "function_lines": 80}
LIMITS |= {"class_name": 1, "import_cycle": 1, "deferred_cycle": 1}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Violation:
    """A value of a rule: measured, or accepted by `limits_allowed.json`.

    `where` is a folder, `file`, `file:function`, a class name, or the modules of a cycle. `note` is a detail, or the reason
    why the value is accepted. The rules yield all values; `measure` selects those above their limit.
    """

    rule: str
    where: str
    value: int
    note: str = ""

    @property
    def key(self) -> tuple[str, str]:
        return self.rule, self.where

    @property
    def last_name(self) -> tuple[str, str]:
        """The part of the key that a moved file keeps: the rule, and the function's or the file's name."""
        return self.rule, self.where.rpartition(":" if ":" in self.where else "/")[2]

    def __str__(self) -> str:
        return f"{self.rule:<17} {self.value:>4}  (limit {LIMITS[self.rule]})  {self.where}  {self.note}".rstrip()


@dataclass(frozen=True)
class Module:
    """A parsed source file of the package."""

    name: str
    path: str
    tree: ast.Module
    lines: Sequence[str]
    package: str


def python_files(root: Path, folder: str) -> Iterator[Path]:
    """Source files below `folder`, without caches and hidden folders."""
    for path in sorted((root / folder).rglob("*.py")):
        if not any(part.startswith(".") or part == "__pycache__" for part in path.relative_to(root).parts):
            yield path


def modules(root: Path) -> dict[str, Module]:
    """All modules of the package by dotted name."""
    found = {}
    gc.disable()  # no tree is garbage; with the collector this takes three times as long
    for path in python_files(root, f"src/{PACKAGE}"):
        place, text = path.relative_to(root), path.read_text("utf-8")
        package = ".".join(place.parent.parts[1:])
        name = package if path.name == "__init__.py" else f"{package}.{path.stem}"
        found[name] = Module(name, place.as_posix(), ast.parse(text), text.splitlines(), package)
    gc.enable()
    return found


def files_per_folder(root: Path) -> Iterator[Violation]:
    """Python files of each folder; `__init__.py` does not count."""
    paths = (path for folder in FOLDERS for path in python_files(root, folder) if path.name != "__init__.py")
    for folder, count in Counter(path.parent for path in paths).items():
        place = folder.relative_to(root)
        yield Violation("files_per_folder", place.as_posix(), count)
        if place.parts[:2] == ("src", PACKAGE) and len(place.parts) > 3:
            yield Violation("files_missing", place.as_posix(), FEWEST_FILES - count)


def lines_over_budget(known: dict[str, Module]) -> Iterator[Violation]:
    """Lines of each room with a budget, or of rooms that share one, beyond it."""
    for rooms, budget in BUDGETS.items():
        parts = {f"{PACKAGE}.{room}" for room in rooms.split()}
        lines = sum(len(m.lines) for m in known.values() if ".".join(m.name.split(".")[:2]) in parts)
        yield Violation("lines_over_budget", rooms, lines - budget)


def imported(module: Module, nodes: Iterable[ast.AST], known: dict[str, Module]) -> set[str]:
    """Modules of the package that the import statements among `nodes` name, the module itself apart."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), module.package)
            names = {f"{base}.{alias.name}" for alias in node.names}
            found |= {name if name in known else base for name in names}
    return (found & known.keys()) - {module.name}


def imports_per_file(known: dict[str, Module]) -> Iterator[Violation]:
    """Modules of the package that each file imports, inside functions and for types too."""
    for module in known.values():
        count = len(imported(module, statements(module.tree), known))
        yield Violation("imports_per_file", module.path, count)


def substatements(node: ast.AST) -> Iterator[ast.AST]:
    """The statements (handlers and cases) directly within `node`. Expressions, most of a tree, hold none."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        yield from getattr(node, field, ())


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """All statements within `tree`."""
    for node in substatements(tree):
        yield node
        yield from statements(node)


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function, bool]]:
    """Every function as (qualified name, node, whether it is a method)."""
    for node in substatements(tree):
        if isinstance(node, Function):
            name = f"{prefix}{node.name}"
            static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list)
            yield name, node, isinstance(tree, ast.ClassDef) and not static
            yield from functions(node, f"{name}.")
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        else:
            yield from functions(node, prefix)


def parameter_count(node: Function, method: bool) -> int:
    """Parameters of a function; `self` and `cls` of a method do not count, `*args` and `**kwargs` count as one each."""
    args = node.args
    count = len(args.posonlyargs) + len(args.args) + len(args.kwonlyargs)
    return count + bool(args.vararg) + bool(args.kwarg) - method


def code_lines(node: Function, lines: Sequence[str]) -> int:
    """Lines of a function from `def` on that are neither blank, comment nor docstring."""
    numbers = set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    if ast.get_docstring(node, clean=False) is not None:
        numbers -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return sum(1 for n in numbers if (text := lines[n - 1].strip()) and not text.startswith("#"))


def is_verb(module: Module, node: Function) -> bool:
    """Whether a function is a verb of the command line: its parameters are typer options."""
    if not module.name.startswith(f"{PACKAGE}.cli"):
        return False
    hints = [a.annotation for a in (*node.args.args, *node.args.kwonlyargs) if a.annotation]
    words = " ".join(ast.unparse(hint) for hint in (*hints, *node.args.defaults))
    return node.name == module.name.rpartition(".")[2] or "Option" in words or "Argument" in words


def function_sizes(known: dict[str, Module]) -> Iterator[Violation]:
    """Parameters and code lines of each function; kernels and command-line verbs are exempt."""
    for module in known.values():
        if not module.name.startswith(f"{PACKAGE}.nn.gpu"):
            for name, node, method in functions(module.tree):
                if not is_verb(module, node):
                    where = f"{module.path}:{name}"
                    yield Violation("parameters", where, parameter_count(node, method))
                    yield Violation("function_lines", where, code_lines(node, module.lines))


def class_names(known: dict[str, Module]) -> Iterator[Violation]:
    """Modules that define a public top-level class of the same name."""
    homes: defaultdict[str, list[str]] = defaultdict(list)
    for module in known.values():
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(module.name)
    for name, places in homes.items():
        yield Violation("class_name", name, len(places), ", ".join(sorted(places)))


def import_time(body: Sequence[ast.stmt], deferred: bool = False) -> Iterator[ast.stmt]:
    """Statements that run when a module is imported, or with `deferred` those of functions too; none for types alone."""
    for node in body:
        if isinstance(node, Function) and not deferred:
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from import_time(node.orelse, deferred)
            continue
        yield node
        for field in ("body", "orelse", "finalbody"):
            yield from import_time(getattr(node, field, []), deferred)
        for handler in getattr(node, "handlers", []):
            yield from import_time(handler.body, deferred)


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """The nodes that edges lead to from `start`, and `start`."""
    found, pending = {start}, [start]
    while pending:
        new = graph[pending.pop()] - found
        found |= new
        pending += new
    return found


def components(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components with more than one node."""
    reached = {node: reachable(graph, node) for node in graph}
    groups = {frozenset(m for m in reached[node] if node in reached[m]) for node in graph}
    return [sorted(group) for group in groups if len(group) > 1]


def import_cycles(known: dict[str, Module]) -> Iterator[Violation]:
    """Groups of modules that import each other. The implicit import of parent packages does not count."""
    reported: list[list[str]] = []
    for rule, deferred in (("import_cycle", False), ("deferred_cycle", True)):
        graph = {m.name: imported(m, import_time(m.tree.body, deferred), known) for m in known.values()}
        for members in components(graph):
            if members not in reported:
                reported.append(members)
                yield Violation(rule, " <-> ".join(members), len(members))


def measure(root: Path = ROOT) -> list[Violation]:
    """All values above their limit, by rule and place."""
    known = modules(root)
    rules = (lines_over_budget, imports_per_file, function_sizes, class_names, import_cycles)
    found = [*files_per_folder(root), *(value for rule in rules for value in rule(known))]
    return sorted((v for v in found if v.value > LIMITS[v.rule]), key=lambda v: v.key)


def read_allowed(path: Path = ALLOWED) -> list[Violation]:
    """The list of exceptions.

    Raises:
        ValueError: an entry occurs twice, has no reason, or names an unknown rule.
    """
    rows = json.loads(path.read_text("utf-8")) if path.exists() else []
    entries = [Violation(row["rule"], row["where"], row["value"], row["reason"]) for row in rows]
    for key, count in Counter(entry.key for entry in entries).items():
        if count > 1:
            raise ValueError(f"{path.name}: {key} is listed twice; delete one of the entries")
    for entry in entries:
        if entry.rule not in LIMITS:
            raise ValueError(f"{path.name}: unknown rule {entry.rule!r}; known are {sorted(LIMITS)}")
        if not entry.note.strip():
            raise ValueError(f"{path.name}: {entry.key} has no reason; write why it is accepted")
    return entries


def compare(found: Sequence[Violation], allowed: Sequence[Violation]) -> list[str]:
    """Messages for every new violation, every value that grew and every entry that is no longer needed."""
    accepted = {entry.key: entry.value for entry in allowed}
    measured = {violation.key for violation in found}
    errors = []
    for violation in found:
        if violation.key not in accepted:
            errors.append(f"above its limit: {violation}")
        elif violation.value > accepted[violation.key]:
            errors.append(f"grew from {accepted[violation.key]}: {violation}")
    unneeded = [f"{entry.rule} {entry.where}" for entry in allowed if entry.key not in measured]
    return errors + [f"no longer needed: {e}; run `python tools/lint/limits.py --write`" for e in unneeded]


def rewrite(found: Sequence[Violation], allowed: Sequence[Violation], reason: str) -> list[Violation]:
    """Today's exceptions. A moved file keeps its reason if it is the only old entry that ends in the same name."""
    same = {entry.key: entry.note for entry in allowed}
    moved: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for entry in allowed:
        moved[entry.last_name].add(entry.note)
    entries = []
    for violation in found:
        candidates = moved[violation.last_name]
        kept = same.get(violation.key) or (next(iter(candidates)) if len(candidates) == 1 else reason)
        entries.append(replace(violation, note=kept))
    return entries


def write(entries: Sequence[Violation]) -> None:
    """Store the exceptions."""
    rows = ({"rule": e.rule, "where": e.where, "value": e.value, "reason": e.note} for e in entries)
    text = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    ALLOWED.write_text(f"[\n{text}\n]\n" if entries else "[]\n", "utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--write", action="store_true", help="rewrite limits_allowed.json with today's values"
    )
    parser.add_argument("--reason", default="", help="with --write: the reason of new entries")
    parser.add_argument("--all", action="store_true", help="print every violation, accepted ones included")
    given = parser.parse_args()
    found, allowed = measure(), read_allowed()
    if given.write:
        entries = rewrite(found, allowed, given.reason)
        if missing := [e for e in entries if not e.note.strip()]:
            print(*(f"new: {e.rule} {e.where}" for e in missing), sep="\n")
            print("nothing written: new entries need --reason TEXT")
            return 1
        write(entries)
        print(f"{len(entries)} entries (were {len(allowed)})")
        return 0
    if given.all:
        print(*sorted(found, key=lambda v: (v.rule, -v.value, v.where)), sep="\n")
        return 0
    errors = compare(found, allowed)
    if errors:
        print(*errors, sep="\n")
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main())
