"""Verifiers of programs: they parse, their doctests hold, their tests pass.

The program is the prompt with its continuation. For a conversation it is the last fenced Python block of the answer, or
the whole answer if nothing is fenced. Parsing needs no sandbox; running does.

The subtle part of doctest is the source of the examples: a model could write passing ones. So they come from the task's
answer or, if that is empty, from docstrings that end within the prompt. They run in the process of the tests. Their output
is compared in this process (`doctest.OutputChecker`), and docstrings with examples are empty in the program that runs
(`without_examples`), so the program's process never holds the expected text.

Imports, functions and constants of the prompt run again in the process of the tests (`prompt_definitions`): a completion
that redefines a helper changes only its own copy.
"""

from __future__ import annotations

import ast
import doctest
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from whorl.errors import DataError
from whorl.evals.verify.task import Verdict, VerifiableTask
from whorl.sandbox import ExampleOutput, Program, ProgramResult
from whorl.sandbox.unit_tests import tests_error

_FENCE = re.compile(r"^```[ \t]*(?:python|py)?[ \t]*\n(.*?)^```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class SandboxVerifier:
    """A verifier that runs a program: `build_program` creates it, `grade` turns its result into a verdict."""

    build_program: Callable[[VerifiableTask, str], Program]
    grade: Callable[[ProgramResult, VerifiableTask, str], Verdict]


def parse_or_none(source: str) -> ast.Module | None:
    """Return the tree of untrusted source, or None if it is not Python or too deeply nested."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes
        try:
            return ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
            return None


def program_source(task: VerifiableTask, completion: str) -> str:
    """Return the program of a completion."""
    if task.prompt:
        return task.prompt + completion
    fenced: list[str] = _FENCE.findall(completion)
    return fenced[-1] if fenced else completion


def compiles(task: VerifiableTask, completion: str) -> Verdict:
    """Check that the program parses, compiles (no `return` outside a function), and has an effect.

    The completion must return a value, call, bind, raise or yield something. If the prompt ends in a function or class,
    this must happen inside it. Empty bodies, comments, bare names and code after the function fail, because policies
    trained on this reward produced them. So do `pass`, `...` and NotImplementedError, which parse for every function.
    Whether the code does what the prompt requests is not checked.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of untrusted source: invalid escapes, comparisons
            program = program_source(task, completion)
            compile(program, "completion", "exec", dont_inherit=True)
            if not _has_effect(task.prompt, ast.parse(program)):
                return Verdict(0.0, False, "empty: the code has no effect")
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
        return Verdict(0.0, False, f"syntax: {error}"[:200])
    return Verdict(1.0, True, "passed")


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
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
        if not isinstance(inner, _DEFINITIONS) or (
            scope is not program and has_effect(inner.body, before=True)
        ):
            break
        scope = inner
    return has_effect(scope.body)


def doctest_examples(task: VerifiableTask, completion: str) -> list[doctest.Example]:
    """Return the task's examples, from its answer or from the docstrings of its prompt.

    Raises:
        DataError: the answer has none.
    """
    parser = doctest.DocTestParser()
    if task.answer:
        examples = parser.get_examples(task.answer)
        if not examples:
            raise DataError(
                f"task {task.id!r}: its answer has no example", expected="lines that begin with >>>"
            )
        return examples
    # The prompt\'s last line may continue in the completion; it counts if it ends in the prompt.
    before = task.prompt.count("\n") + 1
    if not task.prompt.endswith("\n"):
        before -= 1
    examples = []
    tree = parse_or_none(program_source(task, completion))
    if tree is None:
        return []  # the program does not run either
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text and (node.body[0].end_lineno or before + 1) <= before:
                examples += parser.get_examples(text)
    return examples


def without_examples(source: str) -> str:
    """Return a program with every docstring that has examples replaced by an empty one of as many lines.

    The prompt's docstring is part of the program, which could otherwise look up what it should print.
    """
    tree = parse_or_none(source)
    if tree is None:
        return source
    # Lines as the parser counts them: str.splitlines also splits at form feeds and other characters.
    lines = [line.encode() for line in re.split(r"(?<=\n)|(?<=\r)(?!\n)", source)]
    documented = [
        node.body[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, *_DEFINITIONS)) and ">>>" in (ast.get_docstring(node) or "")
    ]
    for text in sorted(documented, key=lambda s: (s.lineno, s.col_offset), reverse=True):
        first, last = text.lineno - 1, (text.end_lineno or text.lineno) - 1
        before, after = lines[first][: text.col_offset], lines[last][text.end_col_offset or 0 :]
        lines[first : last + 1] = [before + b'"""' + b"\n" * (last - first) + b'"""' + after]
    return b"".join(lines).decode()


def prompt_definitions(prompt: str, entry_point: str = "") -> str:
    """Return the imports, functions and assignments of a prompt, for the tests; "" if it does not end in a definition.

    Classes are left out: the tests use those of the program.

    Args:
        entry_point: name of the requested function, which is left out; by default the last one.
    """
    tree = parse_or_none(prompt) or parse_or_none(prompt + "    pass\n")
    if tree is None or not tree.body or not isinstance(tree.body[-1], _DEFINITIONS):
        return ""
    requested = entry_point or tree.body[-1].name
    kept = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign)
    body: list[ast.stmt] = [
        n for n in tree.body if isinstance(n, kept) and getattr(n, "name", "") != requested
    ]
    return ast.unparse(ast.Module(body, [])) + "\n" if body else ""


def _examples_program(task: VerifiableTask, completion: str) -> Program:
    return Program(
        without_examples(program_source(task, completion)),
        prompt_definitions(task.prompt),
        examples=tuple(e.source for e in doctest_examples(task, completion)) or ("None",),
    )


def _examples_verdict(result: ProgramResult, task: VerifiableTask, completion: str) -> Verdict:
    if not result.ok:
        return Verdict(0.0, False, result.reason)
    expected_examples = doctest_examples(task, completion)
    if not expected_examples:
        raise DataError(
            f"task {task.id!r} has no example", expected="an example in its answer or its prompt's docstrings"
        )
    if len(expected_examples) != len(result.example_outputs):
        return Verdict(0.0, False, "failed: not all examples ran")
    for expected, printed in zip(expected_examples, result.example_outputs, strict=True):
        if not _output_matches(expected, printed):
            return Verdict(0.0, False, f"failed: {expected.source.strip()}"[:200])
    return Verdict(1.0, True, "passed")


def _output_matches(expected: doctest.Example, printed: ExampleOutput) -> bool:
    """Return whether an example printed or raised what it should, by the rules and options of doctest."""
    flags = 0
    for flag, on in expected.options.items():
        flags |= flag if on else 0
    check = doctest.OutputChecker().check_output
    if printed.exception is None:
        return expected.exc_msg is None and check(expected.want, printed.text, flags)
    if expected.exc_msg is None:
        return False
    if flags & doctest.IGNORE_EXCEPTION_DETAIL:
        return _exception_name(expected.exc_msg) == _exception_name(printed.exception)
    return check(expected.exc_msg, printed.exception + "\n", flags)


def _exception_name(message: str) -> str:
    return message.split(":")[0].strip().rpartition(".")[2]


def tests_program(task: VerifiableTask, completion: str) -> Program:
    """Return the program of a completion, with the tests of the task's answer.

    Raises:
        DataError: the task has no tests, or tests that check nothing.
    """
    if reason := tests_error(task.answer):
        raise DataError(
            f"task {task.id!r}: {reason}",
            expected="source with an assert, also in a function test... or a unittest case, as the task's answer",
            do="call a function such as check(candidate) in the last line of the tests",
        )
    return Program(program_source(task, completion), tests=f"{prompt_definitions(task.prompt)}{task.answer}")


def _tests_verdict(result: ProgramResult, task: VerifiableTask, completion: str) -> Verdict:
    return Verdict(float(result.ok), result.ok, result.reason)


NEEDS_SANDBOX = ("doctest", "unittest")  # names of the verifiers that run programs


def needs_sandbox(tasks: Iterable[VerifiableTask]) -> bool:
    """Return whether a verifier of the tasks runs programs, alone or as a part of another."""
    return any(name in task.verifier for task in tasks for name in NEEDS_SANDBOX)


doctest_verifier = SandboxVerifier(_examples_program, _examples_verdict)
unittest_verifier = SandboxVerifier(tests_program, _tests_verdict)
