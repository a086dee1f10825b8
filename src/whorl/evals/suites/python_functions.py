"""Functions from Python source: each with a docstring as the task and a body as the solution.

`extract_functions` finds functions with `ast`, without importing or running code, and splits each one:

    header   decorators, signature and docstring, as in the file, dedented
    body     the rest, up to the function's last line

header + body is, character for character, a function that parses. The functions give tasks with doctests or the compiler
as verifier (`tasks.py`), and preference pairs (`align/data/bug_injection.py`).

The subtle point is which functions to use. Libraries copy each other's code, so a function whose name and syntax tree
of the body occurred before is skipped. Which copy stays, and the order of the result, are hashes of the seed: the first
n functions are a random sample.
"""

from __future__ import annotations

import ast
import gc
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b

from whorl.evals.grading.programs import parse_or_none as parse_or_none

SourceText = tuple[str, str]  # (path, text)
MIN_DOCSTRING = 20  # characters


@dataclass(frozen=True)
class PythonFunction:
    """A function with a docstring, split after it.

    Attributes:
        file, line, name: position and name.
        header, body: see the top of this file; both end with a line break.
        docstring: after `inspect.cleandoc`.
        is_top: at the top level of the file, so it runs without a class.
    """

    file: str
    line: int
    name: str
    header: str
    body: str
    docstring: str
    is_top: bool

    @property
    def id(self) -> str:
        return f"{self.file}:{self.line}:{self.name}"


def stable_hash(*names: str | int) -> int:
    """Return a hash in [0, 2**64), for selection and order."""
    key = "\0".join(map(str, names)).encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "big")


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Collect garbage after 50,000 new objects instead of 700.

    A syntax tree is built of objects that all stay, and each collection walks them: parsing took twice as long.
    """
    before = gc.get_threshold()
    gc.set_threshold(50_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@rare_garbage_collection()
def extract_functions(
    files: Iterable[SourceText],
    *,
    seed: int = 0,
    body_bytes: tuple[int, int] = (20, 800),
    header_bytes: int = 1600,
    skipped: Counter[str] | None = None,
) -> list[PythonFunction]:
    """Return all functions with docstring and body, without copies, in a seeded order.

    Args:
        files: (path, text) pairs.
        body_bytes: least and largest size of the body; header_bytes: largest size of the header.
        skipped: counts of skipped functions by reason.
    """
    skipped = Counter() if skipped is None else skipped
    found: list[tuple[int, PythonFunction, str]] = []
    for path, text in files:
        tree = parse_or_none(text)
        if tree is None:
            skipped["does_not_parse"] += 1
            continue
        lines = source_lines(text)
        top = {id(node) for node in tree.body}
        for node in _definitions(tree):
            result = _split_function(path, lines, node, id(node) in top)
            if isinstance(result, str):
                skipped[result] += 1
            elif len(result.docstring) < MIN_DOCSTRING:
                skipped["short_docstring"] += 1
            elif len(result.header.encode()) > header_bytes:
                skipped["long_header"] += 1
            elif not body_bytes[0] <= len(result.body.encode()) <= body_bytes[1]:
                skipped["body_size"] += 1
            elif not _is_one_definition(result):  # last: parsing takes most of the time
                skipped["not_indented"] += 1
            else:
                found.append((stable_hash(seed, result.id), result, _body_hash(node)))
    kept: dict[str, PythonFunction] = {}
    for _, function, body_hash in sorted(found, key=lambda f: (f[0], f[1].id)):
        if body_hash in kept:
            skipped["copy"] += 1
        else:
            kept[body_hash] = function
    return list(kept.values())


def _definitions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield all functions at any depth. Only statements are visited, since most of a tree is expressions."""
    left: list[ast.AST] = [tree]
    while left:
        node = left.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, part, None)
            if isinstance(inner, list):  # the body of a lambda is an expression, which contains no statement
                left += inner


def source_lines(text: str) -> list[str]:
    """Return lines as `ast` counts them, without line ends; form feeds do not end a line."""
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def first_line(statement: ast.stmt) -> int:
    """Return the number of the first line of a statement, with its decorators."""
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(d.lineno for d in decorators)])


def _split_function(
    path: str, lines: list[str], node: ast.FunctionDef | ast.AsyncFunctionDef, is_top: bool
) -> PythonFunction | str:
    """Return the function, or the reason why it is skipped."""
    docstring = ast.get_docstring(node)
    if docstring is None:
        return "no_docstring"
    if len(node.body) < 2 or _is_stub(node.body[1:]):
        return "no_body"
    docstring_node, next_statement = node.body[0], node.body[1]
    first, docstring_end = first_line(node), docstring_node.end_lineno or 0
    if first_line(next_statement) <= docstring_end:
        return "one_line"
    header = _dedent_lines(lines[first - 1 : docstring_end], node.col_offset)
    body = _dedent_lines(lines[docstring_end : node.end_lineno], node.col_offset)
    if header is None or body is None:
        return "not_indented"
    return PythonFunction(path, first, node.name, header, body, docstring, is_top)


def _is_one_definition(function: PythonFunction) -> bool:
    """Return False if a multi-line string was dedented, or a semicolon follows."""
    whole = parse_or_none(function.header + function.body)
    return whole is not None and len(whole.body) == 1


def _dedent_lines(lines: list[str], columns: int) -> str | None:
    """Return dedented lines, or None where a line is indented less."""
    if any(line[:columns].strip() for line in lines):
        return None
    return "".join(line[columns:] + "\n" for line in lines)


def _is_stub(body: list[ast.stmt]) -> bool:
    """Return whether the body is only pass, ..., or `raise NotImplementedError`."""
    for statement in body:
        if isinstance(statement, ast.Pass):
            continue
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue
        if isinstance(statement, ast.Raise) and "NotImplementedError" in ast.unparse(statement):
            continue
        return False
    return True


def _body_hash(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return a hash of name and body, independent of layout and docstring."""
    dumped = "".join(ast.dump(statement) for statement in node.body[1:])
    return blake2b(f"{node.name}\0{dumped}".encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
