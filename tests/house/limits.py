"""Measure the package against its size limits, and maintain the list of exceptions.

The limits: 12 Python files a folder (`src`, `tests`, `bench`, `studies`, `tools`), and inside the package 15 project modules
imported by a file, 10 parameters and 80 code lines a function, one public class per name, no cycle of imports: neither of
those that run at import time (`import_cycle`) nor of those together with imports inside functions (`deferred_cycle`).

Everything is read from the syntax tree. Nothing of the package is imported, so the script runs without its dependencies.
`limits_allowed.json` lists each exception with its value and its reason. `test_limits.py` fails when a value grows, when a
new exception appears, and when an exception is no longer needed.

    python tests/house/limits.py                        # violations that the list does not cover (exit code 1)
    python tests/house/limits.py --all                  # every exception, the largest first
    python tests/house/limits.py --write                # rewrite the list with today's values, keep the reasons
    python tests/house/limits.py --write --reason TEXT  # the same, and TEXT is the reason of new entries
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
ALLOWED = Path(__file__).with_name("limits_allowed.json")
PACKAGE = "whorl"
FOLDERS = ("src", "tests", "bench", "studies", "tools")

FILES, IMPORTS, PARAMETERS, LINES = 12, 15, 10, 80
LIMITS = {
    "files_per_folder": FILES,
    "imports_per_file": IMPORTS,
    "parameters": PARAMETERS,
    "function_lines": LINES,
    "class_name": 1,
    "import_cycle": 1,
    "deferred_cycle": 1,
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Violation:
    """One value above its limit. `where` is a folder, `file`, `file:function`, a class name, or the modules of a cycle."""

    rule: str
    where: str
    value: int
    detail: str = ""

    @property
    def key(self) -> tuple[str, str]:
        return self.rule, self.where

    def __str__(self) -> str:
        return f"{self.rule:<17} {self.value:>4}  (limit {LIMITS[self.rule]})  {self.where}  {self.detail}".rstrip()


@dataclass(frozen=True)
class Allowed:
    """An exception: the largest value that is accepted for (`rule`, `where`), and why."""

    rule: str
    where: str
    value: int
    reason: str

    @property
    def key(self) -> tuple[str, str]:
        return self.rule, self.where


@dataclass(frozen=True)
class Module:
    """A parsed source file of the package."""

    name: str
    path: str
    tree: ast.Module
    lines: Sequence[str]
    is_package: bool


def python_files(root: Path, folder: str) -> Iterator[Path]:
    """Source files below `folder`, without caches and hidden folders."""
    for path in sorted((root / folder).rglob("*.py")):
        if not any(part.startswith(".") or part == "__pycache__" for part in path.relative_to(root).parts):
            yield path


def modules(root: Path) -> dict[str, Module]:
    """All modules of the package by dotted name."""
    found = {}
    for path in python_files(root, f"src/{PACKAGE}"):
        parts = list(path.relative_to(root / "src").with_suffix("").parts)
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        text = path.read_text("utf-8")
        found[name] = Module(
            name, path.relative_to(root).as_posix(), ast.parse(text), text.splitlines(), is_package
        )
    return found


def files_per_folder(root: Path) -> Iterator[Violation]:
    """Folders with more than 12 Python files; `__init__.py` does not count."""
    counts: Counter[str] = Counter()
    for folder in FOLDERS:
        for path in python_files(root, folder):
            counts[path.parent.relative_to(root).as_posix()] += path.name != "__init__.py"
    for folder, count in counts.items():
        if count > FILES:
            yield Violation("files_per_folder", folder, count)


def imported(module: Module, nodes: Iterable[ast.AST], known: dict[str, Module]) -> set[str]:
    """Modules of the package that the import statements among `nodes` name, the module itself apart."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.name.split(".")
                kept = len(parts) - node.level + module.is_package
                base = ".".join([*parts[:kept], *([base] if base else [])])
            for alias in node.names:
                dotted = f"{base}.{alias.name}"
                if dotted in known:
                    found.add(dotted)
                elif base in known:
                    found.add(base)
    return found - {module.name}


def imports_per_file(known: dict[str, Module]) -> Iterator[Violation]:
    """Files that import more than 15 modules of the package, imports inside functions and for types included."""
    for module in known.values():
        count = len(imported(module, ast.walk(module.tree), known))
        if count > IMPORTS:
            yield Violation("imports_per_file", module.path, count)


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function, bool]]:
    """Every function as (qualified name, node, whether it is a method)."""
    for node in ast.iter_child_nodes(tree):
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
    first = node.body[0]
    if (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    ):
        numbers -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return sum(1 for n in numbers if (text := lines[n - 1].strip()) and not text.startswith("#"))


def is_verb(module: Module, node: Function) -> bool:
    """Whether a function is a verb of the command line: its parameters are typer options."""
    if not module.name.startswith(f"{PACKAGE}.cli"):
        return False
    hints = [a.annotation for a in (*node.args.args, *node.args.kwonlyargs) if a.annotation]
    words = " ".join(ast.unparse(hint) for hint in (*hints, *node.args.defaults))
    return node.name == module.name.rpartition(".")[2] or "Option" in words or "Argument" in words


def function_sizes(known: dict[str, Module]) -> Iterator[Violation]:
    """Functions with more than 10 parameters or 80 code lines; kernels and command-line verbs are exempt."""
    for module in known.values():
        if module.name.startswith(f"{PACKAGE}.nn.kernels"):
            continue
        for name, node, method in functions(module.tree):
            if is_verb(module, node):
                continue
            where = f"{module.path}:{name}"
            if (count := parameter_count(node, method)) > PARAMETERS:
                yield Violation("parameters", where, count)
            if (count := code_lines(node, module.lines)) > LINES:
                yield Violation("function_lines", where, count)


def class_names(known: dict[str, Module]) -> Iterator[Violation]:
    """Public top-level classes whose name is defined in more than one module."""
    homes: defaultdict[str, list[str]] = defaultdict(list)
    for module in known.values():
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(module.name)
    for name, places in homes.items():
        if len(places) > 1:
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


def components(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components with more than one node (Tarjan 1972, without recursion)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    on_stack: set[str] = set()
    found = []
    for root in graph:
        if root in index:
            continue
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        work = [(root, iter(sorted(graph[root])))]
        while work:
            node, targets = work[-1]
            for target in targets:
                if target not in index:
                    index[target] = low[target] = len(index)
                    stack.append(target)
                    on_stack.add(target)
                    work.append((target, iter(sorted(graph[target]))))
                    break
                if target in on_stack:
                    low[node] = min(low[node], index[target])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    at = stack.index(node)
                    members = stack[at:]
                    del stack[at:]
                    on_stack.difference_update(members)
                    if len(members) > 1:
                        found.append(sorted(members))
    return found


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
    found = [
        *files_per_folder(root),
        *imports_per_file(known),
        *function_sizes(known),
        *class_names(known),
        *import_cycles(known),
    ]
    return sorted(found, key=lambda v: v.key)


def read_allowed(path: Path = ALLOWED) -> list[Allowed]:
    """The list of exceptions.

    Raises:
        ValueError: an entry stands twice, has no reason, or names an unknown rule.
    """
    entries = [Allowed(**entry) for entry in json.loads(path.read_text("utf-8"))] if path.exists() else []
    seen: set[tuple[str, str]] = set()
    for entry in entries:
        if entry.key in seen:
            raise ValueError(f"{path.name}: {entry.key} is listed twice; delete one of the entries")
        if entry.rule not in LIMITS:
            raise ValueError(f"{path.name}: unknown rule {entry.rule!r}; known are {sorted(LIMITS)}")
        if not entry.reason.strip():
            raise ValueError(f"{path.name}: {entry.key} has no reason; write why it is accepted")
        seen.add(entry.key)
    return entries


def compare(found: Sequence[Violation], allowed: Sequence[Allowed]) -> list[str]:
    """Messages for every new violation, every value that grew and every entry that is no longer needed."""
    accepted = {entry.key: entry for entry in allowed}
    measured = {violation.key for violation in found}
    errors = []
    for violation in found:
        entry = accepted.get(violation.key)
        if entry is None:
            errors.append(f"above its limit: {violation}")
        elif violation.value > entry.value:
            errors.append(f"grew from {entry.value}: {violation}")
    errors += [
        f"no longer needed: {e.rule} {e.where}; run `python tests/house/limits.py --write`"
        for e in allowed
        if e.key not in measured
    ]
    return errors


def rewrite(found: Sequence[Violation], allowed: Sequence[Allowed], reason: str) -> list[Allowed]:
    """Today's exceptions. A moved file keeps its reason if it is the only old entry that ends in the same name."""
    same = {entry.key: entry.reason for entry in allowed}
    moved: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for entry in allowed:
        moved[entry.rule, last_name(entry.where)].add(entry.reason)
    entries = []
    for violation in found:
        candidates = moved[violation.rule, last_name(violation.where)]
        kept = same.get(violation.key) or (next(iter(candidates)) if len(candidates) == 1 else reason)
        entries.append(Allowed(violation.rule, violation.where, violation.value, kept))
    return entries


def last_name(where: str) -> str:
    """The part of a place that a moved file keeps: the function's or the file's name."""
    return where.rpartition(":")[2] if ":" in where else where.rpartition("/")[2]


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
        if missing := [e for e in entries if not e.reason.strip()]:
            print(*(f"new: {e.rule} {e.where}" for e in missing), sep="\n")
            print("nothing written: new entries need --reason TEXT")
            return 1
        text = ",\n".join(json.dumps(asdict(e), ensure_ascii=False) for e in entries)
        ALLOWED.write_text(f"[\n{text}\n]\n" if entries else "[]\n", "utf-8")
        print(f"{len(entries)} entries (were {len(allowed)})")
        return 0
    if given.all:
        print(*sorted(found, key=lambda v: (v.rule, -v.value, v.where)), sep="\n")
        return 0
    if errors := compare(found, allowed):
        print(*errors, sep="\n")
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main())
