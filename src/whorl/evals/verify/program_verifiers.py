"""Answers that are programs: they parse, their examples hold, their tests pass.

The program is the prompt with its continuation, or, where a conversation was answered, the last fenced block of Python in
the answer (all of it, where nothing is fenced). Parsing needs no sandbox; running does.

The subtle part of doctest is *whose* examples count. A model could write its own, and they would pass. So they come from
the task's answer, or, where that is empty, from the docstrings of the prompt alone: those that end before the continuation
begins. And what they print is compared here, in our process, with what was expected (`doctest.OutputChecker`): the program
never had the expected text in its memory, so there is nothing in there to be tampered with.
"""

from __future__ import annotations

import ast
import doctest
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from whorl.errors import DataError
from whorl.evals.verify.task import Verdict, VerifiableTask
from whorl.sandbox import ExampleOutput, Program, ProgramResult

_FENCE = re.compile(r"^```[ \t]*(?:python|py)?[ \t]*\n(.*?)^```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class SandboxVerifier:
    """A verifier that runs a program: what to run, and what to make of what came of it."""

    build_program: Callable[[VerifiableTask, str], Program]
    grade: Callable[[ProgramResult, VerifiableTask, str], Verdict]


def program_source(task: VerifiableTask, completion: str) -> str:
    """The program that a completion makes."""
    if task.prompt:
        return task.prompt + completion
    fenced: list[str] = _FENCE.findall(completion)
    return fenced[-1] if fenced else completion


def compiles(task: VerifiableTask, completion: str) -> Verdict:
    """The program parses as Python, and the compiler takes it (no `return` outside of a function).

    And what was written does something: in the function or class that the prompt ends in, if it ends in one, a value is
    returned, something called, bound, raised or yielded. Silence is no answer (a docstring is a body already), nor is a line
    behind the function that was to be written, a comment, a bare name: all were found by policies that were rewarded for
    them, or are the next to be found. Nor is a body that is put off, by `pass`, `...` or NotImplementedError: it parses for
    every function alike. Whether what is done is what was asked for, this verifier cannot know.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a stranger's escapes and comparisons
            whole = program_source(task, completion)
            compile(whole, "completion", "exec", dont_inherit=True)
            if not _has_effect(task.prompt, ast.parse(whole)):
                return Verdict(0.0, False, "empty: nothing is done in what was begun")
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
        return Verdict(0.0, False, f"syntax: {error}"[:200])
    return Verdict(1.0, True, "passed")


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_EFFECTS = (
    *(ast.Return, ast.Raise, ast.Assert, ast.Delete, ast.Import, ast.ImportFrom, ast.ClassDef),
    *(ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr, ast.Call, ast.Await, ast.Yield, ast.YieldFrom),
)


def _has_effect(prompt: str, whole: ast.Module) -> bool:
    """Whether anything is done in `whole` behind the end of `prompt`, in what that ends in."""
    end = prompt.count("\n") + 1, len(prompt.rpartition("\n")[2].encode())  # line, byte: as nodes have them

    def does(statements: Sequence[ast.AST], *, before: bool = False) -> bool:
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

    place: ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef = whole
    while begun := [s for s in place.body if (s.lineno, s.col_offset) < end]:
        inner = begun[-1]
        # A method that was whole in the prompt may be followed by another; at the top the last function is meant.
        if not isinstance(inner, _DEFINITIONS) or (place is not whole and does(inner.body, before=True)):
            break
        place = inner
    return does(place.body)


def doctest_examples(task: VerifiableTask, completion: str) -> list[doctest.Example]:
    """The task's examples: of its answer, or of the docstrings of its prompt.

    Raises:
        DataError: the answer has none.
    """
    parser = doctest.DocTestParser()
    if task.answer:
        found = parser.get_examples(task.answer)
        if not found:
            raise DataError(
                f"task {task.id!r}: its answer has no example", expected="lines that begin with >>>"
            )
        return found
    before = (
        task.prompt.count("\n") + 1
    )  # the prompt's last line may go on in the completion: it counts if it ends there
    if not task.prompt.endswith("\n"):
        before -= 1
    found = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(program_source(task, completion))
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        return []  # the program will not run either
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text and (node.body[0].end_lineno or before + 1) <= before:
                found += parser.get_examples(text)
    return found


def _examples_program(task: VerifiableTask, completion: str) -> Program:
    return Program(
        program_source(task, completion),
        examples=tuple(e.source for e in doctest_examples(task, completion)) or ("None",),
    )


def _examples_verdict(outcome: ProgramResult, task: VerifiableTask, completion: str) -> Verdict:
    if not outcome.ok:
        return Verdict(0.0, False, outcome.reason)
    wanted = doctest_examples(task, completion)
    if not wanted:
        raise DataError(
            f"task {task.id!r} has no example", expected="an example in its answer or its prompt's docstrings"
        )
    if len(wanted) != len(outcome.example_outputs):
        return Verdict(0.0, False, "failed: not all examples ran")
    for want, printed in zip(wanted, outcome.example_outputs, strict=True):
        if not _output_matches(want, printed):
            return Verdict(0.0, False, f"failed: {want.source.strip()}"[:200])
    return Verdict(1.0, True, "passed")


def _output_matches(want: doctest.Example, printed: ExampleOutput) -> bool:
    """Whether an example printed, or raised, what it was to; by the rules and options of doctest."""
    flags = 0
    for flag, on in want.options.items():
        flags |= flag if on else 0
    check = doctest.OutputChecker().check_output
    if printed.exception is None:
        return want.exc_msg is None and check(want.want, printed.text, flags)
    if want.exc_msg is None:
        return False
    if flags & doctest.IGNORE_EXCEPTION_DETAIL:
        return _exception_name(want.exc_msg) == _exception_name(printed.exception)
    return check(want.exc_msg, printed.exception + "\n", flags)


def _exception_name(message: str) -> str:
    return message.split(":")[0].strip().rpartition(".")[2]


def _tests_program(task: VerifiableTask, completion: str) -> Program:
    if not task.answer.strip():
        raise DataError(f"task {task.id!r} has no tests", expected="their source in the task's answer")
    return Program(program_source(task, completion), tests=task.answer)


def _tests_verdict(outcome: ProgramResult, task: VerifiableTask, completion: str) -> Verdict:
    return Verdict(float(outcome.ok), outcome.ok, outcome.reason)


doctest_verifier = SandboxVerifier(_examples_program, _examples_verdict)
unittest_verifier = SandboxVerifier(_tests_program, _tests_verdict)
