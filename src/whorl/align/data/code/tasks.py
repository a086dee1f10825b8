"""Tasks out of Python source: continue this code, and a program says whether it is right.

    body       a function's signature and docstring; right if Python accepts them with the body that is written
    doctest    what the function needs (imports, helpers), then its signature and docstring, whose examples are the tests
    compiles   the beginning of a file, cut after a function's signature; right if Python accepts what it becomes

Each comes with the true body as `solution`, so that the checking can be checked: `solvable` puts the solutions to the
verifier that will judge the model, and drops the tasks that it does not pass. (Examples that need a network, print a
date, or use a name from somewhere else: no reader of source can tell them all, a run does.) It drops those, too, that pass
with no answer at all: a docstring is a body, so that a file cut after one is whole already, and silence would be rewarded.

The subtle part is what a function needs. A doctest of a library runs inside its module, where every helper is at hand; a
task runs alone. So the names that the function and its examples use are looked up among the module's own, and the
statements that bind them come along, and what these need in turn, in the order of the file. Which names are the module's,
and not local, Python's own `symtable` says. What needs a relative import, or more than
`context_bytes`, is left out.
"""

from __future__ import annotations

import ast
import doctest
import symtable
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from whorl.align.data.code.functions import (
    PythonFunction,
    SourceText,
    extract_functions,
    parse_or_none,
    source_lines,
)
from whorl.evals.verify.task import Verdict, VerifiableTask


@dataclass(frozen=True)
class CodeTask:
    """A task, a solution that is known to be right or hoped to be, and the file it stands in."""

    task: VerifiableTask
    solution: str
    file: str


TaskVerifier = Callable[[Sequence[VerifiableTask], Sequence[str]], Sequence[Verdict]]


def doctest_tasks(
    files: Iterable[SourceText],
    *,
    seed: int = 0,
    context_bytes: int = 2000,
    skipped: Counter[str] | None = None,
) -> list[CodeTask]:
    """Functions at the top of their files whose docstrings hold examples, in an order of the seed's.

    The task's answer is the docstring, whose examples are to be run after prompt + completion.

    Args:
        files: (path, text) pairs.
        context_bytes: the most that a function may need beside itself.
        skipped: counts of what was left out, by reason.
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


def body_tasks(found: Iterable[PythonFunction]) -> list[CodeTask]:
    """Functions whose body is to be written; what is written must parse, and do more than the docstring did."""
    return [
        CodeTask(
            VerifiableTask(
                f"body:{one.id}", one.header, verifier="compiles", difficulty=float(len(one.body.encode()))
            ),
            one.body,
            one.file,
        )
        for one in found
    ]


def compile_tasks(
    files: Iterable[SourceText],
    *,
    seed: int = 0,
    prompt_bytes: int = 2000,
    body_bytes: tuple[int, int] = (20, 400),
    per_file: int = 2,
    skipped: Counter[str] | None = None,
) -> list[CodeTask]:
    """Beginnings of files, each cut after the signature of a documented function or method; its docstring is to be written.

    Args:
        files: (path, text) pairs.
        prompt_bytes: the longest beginning. body_bytes: of the true body without its docstring, least and most.
        per_file: the most from one file.
        skipped: counts of what was left out, by reason.
    """
    skipped = Counter() if skipped is None else skipped
    texts = dict(files)
    taken = Counter[str]()
    found: dict[str, CodeTask] = {}
    for function in extract_functions(
        texts.items(), seed=seed, min_docstring=1, body_bytes=body_bytes, skipped=skipped
    ):
        lines = source_lines(texts[function.file])
        first, n_signature = function.line - 1, _signature_lines(function)
        cut, end = first + n_signature, first + (function.header + function.body).count("\n")
        prompt = "".join(line + "\n" for line in lines[:cut])
        solution = "".join(line + "\n" for line in lines[cut:end])
        if len(prompt.encode()) > prompt_bytes:
            skipped["long_prompt"] += 1
        elif taken[function.file] == per_file:
            skipped["enough_of_this_file"] += 1
        elif (
            parse_or_none(prompt + solution) is None
        ):  # it stands inside of a `try`, say, whose end comes later
            skipped["does_not_end_here"] += 1
        elif prompt in found:
            skipped["copy"] += 1
        else:
            taken[function.file] += 1
            task = VerifiableTask(
                f"compiles:{function.id}", prompt, verifier="compiles", difficulty=float(len(solution))
            )
            found[prompt] = CodeTask(task, solution, function.file)
    return list(found.values())


def filter_solvable(
    candidates: Sequence[CodeTask], verify: TaskVerifier
) -> tuple[list[CodeTask], Counter[str]]:
    """Tasks that their own solution passes and no answer does not, and why the others were dropped.

    Args:
        judge: what will judge the model's answers: tasks and completions in, verdicts out.
    """
    tasks = [m.task for m in candidates]
    solved, silent = verify(tasks, [m.solution for m in candidates]), verify(tasks, [""] * len(tasks))
    kept: list[CodeTask] = []
    dropped = Counter[str]()
    for one, with_it, without in zip(candidates, solved, silent, strict=True):
        if not with_it.passed:
            dropped[with_it.reason.split(":")[0]] += 1
        elif without.passed:
            dropped["passes without an answer"] += 1
        else:
            kept.append(one)
    return kept, dropped


def _signature_lines(function: PythonFunction) -> int:
    """Lines of the header before the docstring begins."""
    tree = parse_or_none(function.header)
    assert tree is not None and isinstance(tree.body[0], ast.FunctionDef | ast.AsyncFunctionDef)
    return tree.body[0].body[0].lineno - 1


def _examples(docstring: str) -> list[doctest.Example]:
    """Examples, at least one of which says what must come out; empty if one does not parse."""
    try:
        examples = doctest.DocTestParser().get_examples(docstring)
    except ValueError:
        return []
    examples = [e for e in examples if not e.options.get(doctest.SKIP)]
    if not any(e.want for e in examples) or any(parse_or_none(e.source) is None for e in examples):
        return []
    return examples


def _context(text: str, function: PythonFunction, examples: list[doctest.Example], limit: int) -> str | None:
    """The statements of the module that function and examples need, in their order; None if they are too much."""
    tree = parse_or_none(text)
    assert tree is not None
    lines = source_lines(text)
    statements = ["\n".join(lines[_first_line(s) - 1 : s.end_lineno]) + "\n" for s in tree.body]
    binds: dict[str, list[int]] = {}
    for i, statement in enumerate(tree.body):
        for name in _bound_names(statement):
            binds.setdefault(name, []).append(i)
    own = next(i for i, s in enumerate(tree.body) if _first_line(s) == function.line)
    asked, given = _names("".join(e.source for e in examples))
    wanted = _names(function.header + function.body)[0] | (asked - given)
    needed: set[int] = set()
    size = 0
    while wanted:
        for i in binds.get(wanted.pop(), []):
            if i == own or i in needed:
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


def _first_line(statement: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(d.lineno for d in decorators)])


def _bound_names(statement: ast.stmt) -> set[str]:
    """Names that a statement at the top of a module gives a meaning, those inside of `if` and `try` among them."""
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
    """(names that a piece of a module takes from the module, names that it gives to it), as Python's compiler sees it."""
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
