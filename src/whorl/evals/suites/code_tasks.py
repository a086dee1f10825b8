"""Coding tasks from Python source, with a program as verifier.

    body       signature and docstring of a function; correct if Python accepts them with the completion
    doctest    required imports and helpers, then signature and docstring, whose examples are the tests

Each task has the original body as `solution`, so that the verifier can be tested. `filter_solvable` runs the solutions
through the verifier and drops tasks that fail: examples that need a network, print a date or use foreign names cannot
be detected in the source. It also drops tasks that pass with an empty completion. A docstring is a valid body, so a
prompt that ends after one is complete, and an empty answer would be rewarded.

The subtle point is context. A library's doctest runs inside its module; a task runs alone. So the module-level names
that the function and its examples use are resolved. The statements that bind them are included, recursively, in file
order. Python's `symtable` separates module names from local names and builtins. A function that needs a relative
import, or more than `context_bytes`, is skipped.
"""

from __future__ import annotations

import ast
import doctest
import symtable
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from whorl.evals.grading import Grade, VerifiableTask
from whorl.evals.grading.programs import parse_or_none
from whorl.evals.suites.python_functions import (
    PythonFunction,
    SourceText,
    extract_functions,
    first_line,
    rare_garbage_collection,
    source_lines,
)


@dataclass(frozen=True)
class CodeTask:
    """A task, its reference solution, and the file it comes from."""

    task: VerifiableTask
    solution: str
    file: str


TaskVerifier = Callable[[Sequence[VerifiableTask], Sequence[str]], Sequence[Grade]]


def doctest_tasks(
    files: Iterable[SourceText],
    *,
    seed: int = 0,
    context_bytes: int = 2000,
    skipped: Counter[str] | None = None,
) -> list[CodeTask]:
    """Return tasks from top-level functions whose docstrings have examples, in a seeded order.

    The answer of a task is the docstring; its examples run after prompt + completion.

    Args:
        files: (path, text) pairs.
        context_bytes: largest size of the required context.
        skipped: counts of skipped functions by reason.
    """
    skipped = Counter() if skipped is None else skipped
    texts = {path: text for path, text in files if ">>>" in text}
    found: list[CodeTask] = []
    for function in extract_functions(
        texts.items(), seed=seed, body_bytes=(10, 2000), header_bytes=4000, skipped=skipped
    ):
        if ">>>" not in function.docstring:
            continue
        if not function.is_top:
            skipped["method"] += 1
            continue
        examples = _examples(function.docstring)
        if not examples:
            skipped["no_examples"] += 1
            continue
        context = _context(texts[function.file], function, examples, context_bytes)
        if context is None:
            skipped["needs_too_much"] += 1
            continue
        size = len(function.body.encode())
        task = VerifiableTask(
            id=f"doctest:{function.id}",
            prompt=context + function.header,
            verifier="doctest",
            answer=function.docstring,
            difficulty=float(size),
        )
        found.append(CodeTask(task, function.body, function.file))
    return found


def body_tasks(functions: Iterable[PythonFunction]) -> list[CodeTask]:
    """Return tasks to write a body; the completion must parse and add to the docstring."""
    return [
        CodeTask(
            VerifiableTask(
                f"body:{function.id}",
                function.header,
                verifier="compiles",
                difficulty=float(len(function.body.encode())),
            ),
            function.body,
            function.file,
        )
        for function in functions
    ]


def filter_solvable(
    candidates: Sequence[CodeTask], verify: TaskVerifier
) -> tuple[list[CodeTask], Counter[str]]:
    """Return the tasks that their solution passes and an empty completion does not, and counts of the others by reason.

    Args:
        verify: takes tasks and completions, returns grades; the same as in training.
    """
    tasks = [m.task for m in candidates]
    solved, silent = verify(tasks, [m.solution for m in candidates]), verify(tasks, [""] * len(tasks))
    kept: list[CodeTask] = []
    dropped = Counter[str]()
    for candidate, with_solution, with_empty in zip(candidates, solved, silent, strict=True):
        if not with_solution.passed:
            dropped[with_solution.reason.split(":")[0]] += 1
        elif with_empty.passed:
            dropped["passes without an answer"] += 1
        else:
            kept.append(candidate)
    return kept, dropped


def _examples(docstring: str) -> list[doctest.Example]:
    """Return the examples, at least one with expected output; empty if one does not parse."""
    try:
        examples = doctest.DocTestParser().get_examples(docstring)
    except ValueError:
        return []
    examples = [e for e in examples if not e.options.get(doctest.SKIP)]
    if not any(e.want for e in examples) or any(parse_or_none(e.source) is None for e in examples):
        return []
    return examples


@rare_garbage_collection()
def _context(text: str, function: PythonFunction, examples: list[doctest.Example], limit: int) -> str | None:
    """Return the module statements that function and examples need, in order; None if they exceed the limit."""
    tree = parse_or_none(text)
    assert tree is not None
    lines = source_lines(text)
    statements = ["\n".join(lines[first_line(s) - 1 : s.end_lineno]) + "\n" for s in tree.body]
    binds: dict[str, list[int]] = {}
    for i, statement in enumerate(tree.body):
        for name in _bound_names(statement):
            binds.setdefault(name, []).append(i)
    own_index = next(i for i, s in enumerate(tree.body) if first_line(s) == function.line)
    used, bound = _names("".join(e.source for e in examples))
    wanted = _names(function.header + function.body)[0] | (used - bound)
    needed: set[int] = set()
    size = 0
    while wanted:
        for i in binds.get(wanted.pop(), []):
            if i == own_index or i in needed:
                continue
            needed.add(i)
            size += len(statements[i].encode())
            statement = tree.body[i]
            if size > limit or (isinstance(statement, ast.ImportFrom) and statement.level):
                return None
            if parse_or_none(statements[i]) is None:  # two statements share a line
                return None
            wanted |= _names(statements[i])[0]
    context = "".join(statements[i] for i in sorted(needed))
    return context + "\n" if context else ""


def _bound_names(statement: ast.stmt) -> set[str]:
    """Return the names that a module-level statement binds, including those inside `if` and `try`."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    names = set[str]()
    for node in ast.walk(statement):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(a.asname or a.name).split(".")[0] for a in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
    return names


def _names(source: str) -> tuple[set[str], set[str]]:
    """Return (names that source code uses from the module, names that it binds), according to the compiler."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            top = symtable.symtable(source, "<mined>", "exec")
    except SyntaxError:  # parses, but does not compile: a return outside of a function
        return set(), set()
    taken = {s.get_name() for s in top.get_symbols() if s.is_referenced()}
    given = {s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported()}
    inner = list(top.get_children())
    while inner:
        table = inner.pop()
        taken |= {s.get_name() for s in table.get_symbols() if s.is_global()}
        inner += table.get_children()
    return taken, given
