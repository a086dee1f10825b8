"""Graders of programs: `compiles` parses, `program` and `unittest` run tests in the sandbox (arXiv:2107.03374).

Strict, as `unittest` and `compiles` read an answer: the program is the prompt with the whole text. Without a prompt it is
the last fenced Python block of the answer, or the whole answer if nothing is fenced. Lenient, as `program` reads it, from
the first that applies:

    fenced code that defines the entry point      the lines of the prompt before its first function, then the code
    other fenced code                             the prompt, then the code
    no fence                                      the prompt, then the text

A text that continues a prompt often continues after the function, with a call, another exercise, or a definition that the
limit of tokens cut. So the lenient reading removes whole statements without indentation from the end until the rest parses,
and calls at the top level (`print(f(1))`, `main()`).

Imports, functions and constants of the prompt run again in the process of the tests (`prompt_definitions`): a completion
that redefines a helper changes only its own copy.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whorl.errors import DataError
from whorl.evals.grading.final_answer import after_thinking
from whorl.evals.grading.grade import Grade
from whorl.evals.grading.refusal import is_refusal
from whorl.sandbox import Program, ProgramResult
from whorl.sandbox.unit_tests import tests_error

_FENCE = re.compile(r"^[ \t]*```[ \t]*([^\n]*)\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_PYTHON = ("", "py", "python", "python3")
_PRELUDE = re.compile(r"^(?:@|def |async def |class )", re.MULTILINE)


@dataclass(frozen=True)
class ProgramGrader:
    """A grader that runs programs: `build` creates the program of an answer, `grade` turns its result into a grade.

    `build` takes the arguments of a grader, and returns a `Grade` for an answer that has no program. `grade` takes the
    result and the same arguments.
    """

    build: Callable[..., Program | Grade]
    grade: Callable[..., Grade]


def parse_or_none(source: str) -> ast.Module | None:
    """Return the tree of untrusted source, or None if it is not Python or too deeply nested."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes
        try:
            return ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
            return None


def tests_program(gold: str, text: str, *, prompt: str = "") -> Program:
    """Return the strict program of an answer with its tests.

    Args:
        gold: source of the tests.
        prompt: source that the text continues; "" for an answer with fenced code.

    Raises:
        DataError: there are no tests, they do not parse, or they check nothing.
    """
    return Program(program_source(text, prompt), f"{prompt_definitions(prompt)}{_checked_tests(gold)}")


def build(
    gold: Any, text: str, *, finish: str = "stop", prompt: str = "", entry_point: str = ""
) -> Program | Grade:
    """Return the lenient program of an answer with its tests, or the grade of an answer that has none.

    Args:
        gold: source of the tests, or a record with "test" and "entry_point" (HumanEval), whose tests are
            `check(entry_point)`.
        finish: "length" if the limit of tokens cut the text.
        prompt: source that the text continues.
        entry_point: name of the requested function.

    Raises:
        DataError: as `tests_program`.
    """
    if isinstance(gold, Mapping):
        entry_point = str(gold.get("entry_point", "")) or entry_point
        prompt = prompt or str(gold.get("prompt", ""))
        gold = str(gold.get("test", ""))
        if re.search(r"^def check\(", gold, re.MULTILINE) and entry_point:
            gold = f"{gold}\ncheck({entry_point})\n"
    tests = _checked_tests(gold)
    source = find_program(text, prompt, entry_point)
    if source is not None:
        return Program(source, f"{prompt_definitions(prompt, entry_point)}{tests}")
    scores = {"passed": 0.0}
    if is_refusal(text, prompt):
        return Grade.of(scores, "refused", "the model declines")
    if finish == "length":
        return Grade.of(scores, "truncated", "the limit of tokens cut the program")
    reason = "no program that parses" if after_thinking(text).strip() else "the answer is empty"
    return Grade.of(scores, "not_found", reason)


def grade(result: ProgramResult, gold: Any, text: str) -> Grade:
    """Return the grade of a program's result."""
    return Grade.of({"passed": float(result.ok)}, "right" if result.ok else "wrong", result.reason)


def _checked_tests(tests: Any) -> str:
    if not isinstance(tests, str) or (reason := tests_error(tests)):
        raise DataError(
            reason if isinstance(tests, str) else "there are no tests",
            expected="source with an assert, also in a test function or a function check(candidate) with entry_point",
            do="correct or remove the record",
        )
    return tests


def program_source(text: str, prompt: str = "") -> str:
    """Return the strict program of an answer; see the top of this file."""
    if prompt:
        return prompt + text
    text = after_thinking(text)
    return (_fenced(text) or [text])[-1]


def find_program(text: str, prompt: str = "", entry_point: str = "") -> str | None:
    """Return the lenient program of an answer, or None if no part of it parses; see the top of this file."""
    text = after_thinking(text)
    fenced = _fenced(text)
    parts = [*reversed(fenced), "\n".join(fenced)] if len(fenced) > 1 else fenced or [text]
    if entry_point:
        defines = re.compile(
            rf"^(?:async )?def {re.escape(entry_point)}\b|^{re.escape(entry_point)}\s*=", re.MULTILINE
        )
        complete = [part for part in parts if defines.search(part)]
        first = _PRELUDE.search(prompt)
        prelude = prompt[: first.start()] if first else ""
        for part in complete:
            if (source := _parsed(prelude, part)) is not None:
                return source
    for part in parts:
        if part.strip() and (source := _parsed(prompt, part)) is not None:
            return source
    return None


def _fenced(text: str) -> list[str]:
    """Return the fenced blocks of Python, or those of any language if there are none."""
    blocks = _FENCE.findall(text)
    return [code for language, code in blocks if language.strip().lower() in _PYTHON] or [
        code for _, code in blocks
    ]


def _parsed(before: str, code: str) -> str | None:
    """Return before + code, with as many whole statements of the code as parse; None without any."""
    lines = code.split("\n")
    for _ in range(200):
        source = before + "\n".join(lines)
        tree = parse_or_none(source)
        if tree is not None:
            end = before.count("\n") + 1
            after = [node for node in tree.body if node.lineno >= end and isinstance(node, ast.Expr)]
            if before and not "\n".join(lines).strip():
                return None
            return _without(source, [node for node in after if isinstance(node.value, ast.Call)])
        cut = next((i for i in range(len(lines) - 1, 0, -1) if lines[i][:1].strip()), None)
        if cut is None:
            return None
        lines = lines[:cut]
    return None


def _without(source: str, nodes: list[ast.Expr]) -> str:
    """Return the source with empty lines in place of top-level statements."""
    lines = source.split("\n")
    for node in nodes:
        for i in range(node.lineno - 1, node.end_lineno or node.lineno):
            lines[i] = ""
    return "\n".join(lines)


def compiles(gold: str, text: str, *, prompt: str = "") -> Grade:
    """Check that the program parses, compiles (no `return` outside a function), and has an effect.

    The completion must return a value, call, bind, raise or yield something. If the prompt ends in a function or class,
    this must happen inside it. Empty bodies, comments, bare names and code after the function fail, because policies
    trained on this reward produced them. So do `pass`, `...` and NotImplementedError, which parse for every function.
    Whether the code does what the prompt requests is not checked.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of untrusted source: invalid escapes, comparisons
            program = program_source(text, prompt)
            compile(program, "completion", "exec", dont_inherit=True)
            if not _has_effect(prompt, ast.parse(program)):
                return Grade(0.0, False, "empty: the code has no effect")
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
        return Grade(0.0, False, f"syntax: {error}"[:200])
    return Grade(1.0, True, "passed")


DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_EFFECTS = (
    *(ast.Return, ast.Raise, ast.Assert, ast.Delete, ast.Import, ast.ImportFrom, ast.ClassDef),
    *(ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr, ast.Call, ast.Await, ast.Yield, ast.YieldFrom),
)


def _has_effect(prompt: str, program: ast.Module) -> bool:
    """Return whether code after the end of `prompt`, inside its last definition, has an effect."""
    end = prompt.count("\n") + 1, len(prompt.rpartition("\n")[2].encode())  # (line, byte), as in ast nodes

    def has_effect(statements: Sequence[ast.AST], *, before: bool = False) -> bool:
        waiting = [*statements]
        while waiting:
            node = waiting.pop()
            if isinstance(node, ast.Raise) and "NotImplementedError" in ast.unparse(node):
                continue
            done = isinstance(node, _EFFECTS) and not (isinstance(node, ast.Return) and node.value is None)
            if done and before == ((node.end_lineno or 0, node.end_col_offset or 0) <= end):  # type: ignore[attr-defined]
                return True
            waiting += ast.iter_child_nodes(node)
        return False

    scope: ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef = program
    while started := [s for s in scope.body if (s.lineno, s.col_offset) < end]:
        inner = started[-1]
        # A complete method of the prompt may be followed by another; at the top level the last function is meant.
        if not isinstance(inner, DEFINITIONS) or (
            scope is not program and has_effect(inner.body, before=True)
        ):
            break
        scope = inner
    return has_effect(scope.body)


def prompt_definitions(prompt: str, entry_point: str = "") -> str:
    """Return the imports, functions and assignments of a prompt, for the tests; "" if it does not end in a definition.

    Classes are left out: the tests use those of the program.

    Args:
        entry_point: name of the requested function, which is left out; by default the last one.
    """
    tree = parse_or_none(prompt) or parse_or_none(prompt + "    pass\n")
    if tree is None or not tree.body or not isinstance(tree.body[-1], DEFINITIONS):
        return ""
    requested = entry_point or tree.body[-1].name
    kept = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign)
    body: list[ast.stmt] = [
        n for n in tree.body if isinstance(n, kept) and getattr(n, "name", "") != requested
    ]
    return ast.unparse(ast.Module(body, [])) + "\n" if body else ""


program = ProgramGrader(build, grade)
unittest = ProgramGrader(tests_program, grade)
