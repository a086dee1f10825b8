"""The grader `doctest`: examples print the expected output.

The subtle part is the source of the examples: a model could write passing ones. So they come from the gold answer or, if
that is empty, from docstrings that end within the prompt. They run in the process of the tests. Their output is compared in
this process (`doctest.OutputChecker`), and docstrings with examples are empty in the program that runs
(`without_examples`), so the program's process never holds the expected text.
"""

from __future__ import annotations

import ast
import doctest
import re

from whorl.errors import DataError
from whorl.evals.grading.grade import Grade
from whorl.evals.grading.programs import (
    DEFINITIONS,
    ProgramGrader,
    parse_or_none,
    program_source,
    prompt_definitions,
)
from whorl.sandbox import ExampleOutput, Program, ProgramResult


def doctest_examples(gold: str, text: str, prompt: str = "") -> list[doctest.Example]:
    """Return the examples of the gold answer or of the docstrings of the prompt.

    Raises:
        DataError: the gold answer has none.
    """
    parser = doctest.DocTestParser()
    if gold:
        examples = parser.get_examples(gold)
        if not examples:
            raise DataError("the gold answer has no example", expected="lines that begin with >>>")
        return examples
    # The prompt's last line may continue in the completion; it counts if it ends in the prompt.
    before = prompt.count("\n") + 1
    if not prompt.endswith("\n"):
        before -= 1
    examples = []
    tree = parse_or_none(program_source(text, prompt))
    if tree is None:
        return []  # the program does not run either
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node)
            if docstring and (node.body[0].end_lineno or before + 1) <= before:
                examples += parser.get_examples(docstring)
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
        if isinstance(node, (ast.Module, *DEFINITIONS)) and ">>>" in (ast.get_docstring(node) or "")
    ]
    for text in sorted(documented, key=lambda s: (s.lineno, s.col_offset), reverse=True):
        first, last = text.lineno - 1, (text.end_lineno or text.lineno) - 1
        before, after = lines[first][: text.col_offset], lines[last][text.end_col_offset or 0 :]
        lines[first : last + 1] = [before + b'"""' + b"\n" * (last - first) + b'"""' + after]
    return b"".join(lines).decode()


def build(gold: str, text: str, *, prompt: str = "") -> Program:
    """Return the program of an answer with its examples.

    Args:
        gold: lines that begin with >>>, each with the expected output; "": the examples of the prompt's docstrings.
        prompt: source that the text continues; "" for an answer with fenced code.

    Raises:
        DataError: the gold answer has no example.
    """
    return Program(
        without_examples(program_source(text, prompt)),
        prompt_definitions(prompt),
        examples=tuple(e.source for e in doctest_examples(gold, text, prompt)) or ("None",),
    )


def grade(result: ProgramResult, gold: str, text: str, *, prompt: str = "") -> Grade:
    """Return the grade of a program's output. Raises DataError: there is no example."""
    if not result.ok:
        return Grade(0.0, False, result.reason)
    expected_examples = doctest_examples(gold, text, prompt)
    if not expected_examples:
        raise DataError(
            "there is no example", expected="an example in the gold answer or the prompt's docstrings"
        )
    if len(expected_examples) != len(result.example_outputs):
        return Grade(0.0, False, "failed: not all examples ran")
    for expected, printed in zip(expected_examples, result.example_outputs, strict=True):
        if not _output_matches(expected, printed):
            return Grade(0.0, False, f"failed: {expected.source.strip()}"[:200])
    return Grade(1.0, True, "passed")


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


examples_pass = ProgramGrader(build, grade)
