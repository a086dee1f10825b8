"""The metric `program`: an answer is a program that its tests accept, in the sandbox (arXiv:2107.03374).

The program of an answer, from the first that applies:

    fenced code that defines the entry point      the lines of the prompt before its first function, then the code
    other fenced code                             the prompt, then the code
    no fence                                      the prompt, then the text

A text that continues a prompt often continues after the function, with a call, another exercise, or a definition that the
limit of tokens cut. So whole statements without indentation are removed from its end until it parses, and calls at the top
level (`print(f(1))`, `main()`) are removed before.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

from whorl.errors import DataError
from whorl.evals.metrics.refusal import is_refusal
from whorl.evals.metrics.registry import ProgramMetric
from whorl.evals.metrics.result import Graded
from whorl.evals.verify.program_verifiers import parse_or_none, prompt_definitions
from whorl.evals.verify.text_verifiers import after_thinking
from whorl.sandbox import Program, ProgramResult
from whorl.sandbox.unit_tests import tests_error

_FENCE = re.compile(r"^[ \t]*```[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_PRELUDE = re.compile(r"^(?:@|def |async def |class )", re.MULTILINE)
SCORE = "passed"


def build(
    gold: Any, text: str, *, finish: str = "stop", prompt: str = "", entry_point: str = ""
) -> Program | Graded:
    """Return the program of an answer with its tests, or the scores of an answer that has none.

    Args:
        gold: source of the tests, or a record with "test" and "entry_point" (HumanEval), whose tests are
            `check(entry_point)`.
        finish: "length" if the limit of tokens cut the text.
        prompt: source that the text continues.
        entry_point: name of the requested function.

    Raises:
        DataError: there are no tests, they do not parse, or they check nothing.
    """
    if isinstance(gold, Mapping):
        entry_point = str(gold.get("entry_point", "")) or entry_point
        prompt = prompt or str(gold.get("prompt", ""))
        gold = str(gold.get("test", ""))
        if re.search(r"^def check\(", gold, re.MULTILINE) and entry_point:
            gold = f"{gold}\ncheck({entry_point})\n"
    if not isinstance(gold, str) or (reason := tests_error(gold)):
        raise DataError(
            reason if isinstance(gold, str) else "there are no tests",
            expected="source with an assert, also in a test function or a function check(candidate) with entry_point",
            do="correct or remove the record",
        )
    source = program_source(text, prompt, entry_point)
    if source is not None:
        return Program(source, f"{prompt_definitions(prompt, entry_point)}{gold}")
    if is_refusal(text, prompt):
        return Graded({SCORE: 0.0}, "refused", "the model declines")
    if finish == "length":
        return Graded({SCORE: 0.0}, "truncated", "the limit of tokens cut the program")
    if not after_thinking(text).strip():
        return Graded({SCORE: 0.0}, "not_found", "the answer is empty")
    return Graded({SCORE: 0.0}, "not_found", "no program that parses")


def grade(result: ProgramResult) -> Graded:
    """Return the score of a program's result."""
    return Graded({SCORE: float(result.ok)}, "right" if result.ok else "wrong", result.reason)


def program_source(text: str, prompt: str = "", entry_point: str = "") -> str | None:
    """Return the program of an answer, or None if no part of it parses; see the top of this file."""
    text = after_thinking(text)
    fenced = _FENCE.findall(text)
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


program = ProgramMetric(build, grade)
