"""Graders of structure: the form of a text, grids of ARC-AGI (arXiv:1911.01547), patches in the format of SWE-bench.

    format        the text matches a pattern, or has the given tags

    grid          all demanded grids are equal to the gold ones: the last blocks of rows of digits in the text
    grid_cells    share of equal cells; 0 for a grid of another shape

    patch_files   the patch changes the same files as the reference
    patch_lines   it removes and adds the same lines
    patch_found   the text has a unified diff

Neither figure of a patch is SWE-bench's share of resolved issues (arXiv:2310.06770), which runs the repository's tests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import regex

from whorl.errors import DataError
from whorl.evals.grading.final_answer import after_thinking
from whorl.evals.grading.grade import Grade
from whorl.evals.grading.refusal import is_refusal

Grid = list[list[int]]
PATTERN_SECONDS = 1.0
_ROW = re.compile(r"[\s\[\],|]*\d[\d\s\[\],|]*")
_FILE = re.compile(r"^\+\+\+ (?:b/)?(\S+)|^--- (?:a/)?(\S+)", re.MULTILINE)
_HUNK = re.compile(r"^@@ -\d+(?:,\d+)? \+\d+(?:,\d+)? @@", re.MULTILINE)


def format_match(gold: str, text: str) -> Grade:
    """Return the grade of a text's form: `gold` is a pattern for all of it, or a list of tags ("<think><answer>").

    Tags must appear in this order, each opened and closed once and not empty, with only white space around them. The library
    `regex` matches with a time limit, because some texts take a backtracking matcher exponential time.

    Raises:
        DataError: the pattern is not valid.
    """
    if re.fullmatch(r"(<\w+>)+", gold):
        names = re.findall(r"<(\w+)>", gold)
        pattern = r"\s*".join(rf"<{n}>(?=.*?\S.*?</{n}>)(?:(?!</?{n}>).)*</{n}>" for n in names)
        for name in names:
            inner = re.search(rf"<{name}>\s*</{name}>", text)
            if inner or text.count(f"<{name}>") != 1 or text.count(f"</{name}>") != 1:
                return Grade(0.0, False, "another form")
    else:
        pattern = gold
    try:
        match = regex.fullmatch(pattern, text.strip(), flags=regex.DOTALL, timeout=PATTERN_SECONDS)
    except TimeoutError:
        return Grade.error("timeout: the pattern takes too long on this text")
    except regex.error as error:
        raise DataError(f"{gold!r} is not a valid pattern: {error}") from error
    return Grade(1.0, True, "passed") if match else Grade(0.0, False, "another form")


def grid(gold: Any, text: str, *, finish: str = "stop") -> Grade:
    """Return the scores of grids.

    Args:
        gold: a list of rows of integers, or a list of such grids.
        finish: "length" if the limit of tokens cut the text.

    Raises:
        DataError: the gold answer is no grid.
    """
    expected = _gold_grids(gold)
    found = read_grids(text)[-len(expected) :]
    if len(found) < len(expected):
        scores = {"grid": 0.0, "grid_cells": 0.0}
        if finish == "length":
            return Grade.of(scores, "truncated", "the limit of tokens cut the text before its grid")
        return Grade.of(scores, "refused" if is_refusal(text) else "not_found", "no grid was found")
    cells = sum(_equal_cells(a, b) for a, b in zip(expected, found, strict=True)) / len(expected)
    right = found == expected
    cut = finish == "length" and not right
    answer = json.dumps(found if len(found) > 1 else found[0])
    outcome = "right" if right else "truncated" if cut else "wrong"
    return Grade.of({"grid": float(right), "grid_cells": cells}, outcome, f"{cells:.0%} of the cells", answer)  # type: ignore[arg-type]


def read_grids(text: str) -> list[Grid]:
    """Return the blocks of consecutive rows of digits with the same width, in order."""
    grids: list[Grid] = [[]]
    for line in re.sub(r"\],[ \t]*\n?", "]\n", after_thinking(text)).splitlines():
        row = _row(line)
        if row and grids[-1] and len(row) != len(grids[-1][0]):
            grids.append([row])
        elif row:
            grids[-1].append(row)
        elif grids[-1]:
            grids.append([])
        if row and line.rstrip().endswith("]]"):
            grids.append([])
    return [each for each in grids if each]


def patch(gold: str, text: str, *, finish: str = "stop") -> Grade:
    """Return the scores of a unified diff.

    Args:
        gold: the reference patch.
        finish: "length" if the limit of tokens cut the text.

    Raises:
        DataError: the gold answer is no patch.
    """
    if not isinstance(gold, str) or not _HUNK.search(gold):
        raise DataError("the gold answer is no patch", expected="a unified diff")
    text = after_thinking(text)
    files = _files(text)
    if not files or not _HUNK.search(text):
        scores = dict.fromkeys(("patch_files", "patch_lines", "patch_found"), 0.0)
        if finish == "length":
            return Grade.of(scores, "truncated", "the limit of tokens cut the text before its patch")
        return Grade.of(scores, "refused" if is_refusal(text) else "not_found", "no patch was found")
    same_files = files == _files(gold)
    scores = {
        "patch_files": float(same_files), "patch_lines": float(same_files and _changes(text) == _changes(gold)),
        "patch_found": 1.0,
    }  # fmt: skip
    return Grade.of(scores, "right" if same_files else "wrong", f"changes {', '.join(sorted(files))}")


def _row(line: str) -> list[int]:
    if not _ROW.fullmatch(line):
        return []
    numbers = re.findall(r"\d+", line)
    digits = list(numbers[0]) if len(numbers) == 1 else numbers
    return [int(digit) for digit in digits]


def _gold_grids(gold: Any) -> list[Grid]:
    grids = gold if _depth(gold) == 3 else [gold]
    if not grids or any(_depth(each) != 2 for each in grids):
        raise DataError(
            "the gold answer is no grid", expected="a list of rows of integers, or a list of them"
        )
    return [[[int(cell) for cell in row] for row in each] for each in grids]


def _depth(value: Any) -> int:
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        return 1 + _depth(value[0])
    return 0


def _equal_cells(gold: Grid, found: Grid) -> float:
    if [len(row) for row in gold] != [len(row) for row in found]:
        return 0.0
    pairs = [a == b for one, other in zip(gold, found, strict=True) for a, b in zip(one, other, strict=True)]
    return sum(pairs) / len(pairs)


def _files(text: str) -> set[str]:
    return {name for pair in _FILE.findall(text) for name in pair if name and name != "/dev/null"}


def _changes(text: str) -> list[str]:
    start = _HUNK.search(text)
    lines = text[start.start() :].splitlines() if start else []
    return [line.rstrip() for line in lines if re.match(r"[+-](?![+-]{2} )", line)]
