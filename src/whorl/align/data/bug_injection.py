"""Preference pairs from Python source: the original body is chosen, the same body with one injected bug is rejected.

    syntax     removes a bracket, colon, quote or space of indentation, so that Python rejects it
    operator   == for !=, < for >=, + for -, and for or ...
    variable   another variable of the function
    constant   a number plus one, True for False
    return     the value is computed and not returned

The label is certain: a syntax bug fails `ast.parse`, any other bug changes the syntax tree. Each variant is checked, so
chosen and rejected never have the same meaning (as after a change of a comment or a space).

The subtle point is to change one place only. `ast.unparse` of a changed tree would also change quotes, comments and
line breaks, and a model would learn layout. So a bug is an edit of the text: tokens locate it, the parser confirms
it. Chosen and rejected differ in a few characters.
"""

from __future__ import annotations

import ast
import io
import token
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from whorl.align.data.formats import Preference
from whorl.errors import ConfigError, one_of
from whorl.evals.grading.programs import parse_or_none
from whorl.evals.suites.python_functions import PythonFunction, stable_hash

OPERATOR_SWAPS = {
    "==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">",
    "+": "-", "-": "+", "*": "+", "//": "*", "%": "//", "&": "|", "|": "&", "<<": ">>", ">>": "<<",
    "+=": "-=", "-=": "+=", "and": "or", "or": "and",
}  # fmt: skip
BRACKETS = frozenset("()[]{}")
MAX_EDITS = 20  # attempts per kind and function


@dataclass(frozen=True)
class Edit:
    """Replacement of the characters from start to stop by `text`."""

    start: int
    stop: int
    text: str


@dataclass(frozen=True)
class _BodyToken:
    """A token of the body: kind, text, and character positions in the whole function."""

    kind: int
    text: str
    start: int
    stop: int


def inject_bug(function: PythonFunction, kind: str, seed: int = 0) -> str | None:
    """Return the body with one bug of a kind, or None if there is no place for it.

    Raises:
        ConfigError: unknown kind.
    """
    if kind not in BUG_KINDS:
        raise ConfigError(f"unknown kind of bug {kind!r}", expected=one_of(kind, list(BUG_KINDS)))
    whole = function.header + function.body
    tree = parse_or_none(whole)
    pieces = _body_tokens(whole, len(function.header))
    if tree is None or not pieces:
        return None
    edits = BUG_KINDS[kind](whole, tree, pieces, len(function.header))
    edits.sort(key=lambda e: (stable_hash(seed, function.id, kind, e.start, e.text), e.start, e.text))
    before = ast.dump(tree)
    for edit in edits[:MAX_EDITS]:
        changed = whole[: edit.start] + edit.text + whole[edit.stop :]
        after = parse_or_none(changed)
        fits = after is None if kind == "syntax" else after is not None and ast.dump(after) != before
        if fits:
            return changed[len(function.header) :]
    return None


def bug_preferences(
    functions: Iterable[PythonFunction],
    *,
    kinds: Sequence[str] = ("syntax", "operator", "variable", "constant", "return"),
    per_function: int = 1,
    seed: int = 0,
    counts: Counter[str] | None = None,
) -> list[Preference]:
    """Return pairs of bodies in the functions' order; the id ends in the kind of bug.

    Args:
        kinds: of bugs. per_function: maximum pairs per function, each of another kind, chosen by the seed.
        counts: pairs by kind, and under "none" the functions without a place for a bug.
    """
    counts = Counter() if counts is None else counts
    found: list[Preference] = []
    for function in functions:
        made = 0
        for kind in sorted(kinds, key=lambda k: stable_hash(seed, function.id, k)):
            if made == per_function:
                break
            rejected = inject_bug(function, kind, seed)
            if rejected is not None:
                made += 1
                counts[kind] += 1
                name = f"{function.id}:{kind}"
                found.append(Preference(function.header, function.body, rejected, function.file, name))
        counts["none"] += not made
    return found


def _syntax(whole: str, tree: ast.AST, pieces: list[_BodyToken], begins: int) -> list[Edit]:
    edits = []
    for piece in pieces:
        if piece.kind == token.OP and (piece.text in BRACKETS or piece.text == ":"):
            edits.append(Edit(piece.start, piece.stop, ""))
        elif piece.kind == token.STRING:
            edits.append(Edit(piece.stop - 1, piece.stop, ""))
        elif piece.kind == token.INDENT and piece.start > begins:
            edits.append(Edit(piece.start, piece.stop, ""))
    return edits


def _operator(whole: str, tree: ast.AST, pieces: list[_BodyToken], begins: int) -> list[Edit]:
    return [Edit(p.start, p.stop, OPERATOR_SWAPS[p.text]) for p in pieces if p.text in OPERATOR_SWAPS]


def _variable(whole: str, tree: ast.AST, pieces: list[_BodyToken], begins: int) -> list[Edit]:
    own = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    own |= {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    starts = _line_starts(whole)
    edits = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in own:
            line = whole[starts[node.lineno - 1] :].split("\n", 1)[0]
            start = starts[node.lineno - 1] + len(line.encode()[: node.col_offset].decode())
            if start >= begins and whole.startswith(
                node.id, start
            ):  # in an f-string, Python 3.11 gives no position
                edits += [Edit(start, start + len(node.id), other) for other in sorted(own - {node.id})]
    return edits


def _constant(whole: str, tree: ast.AST, pieces: list[_BodyToken], begins: int) -> list[Edit]:
    flip = {"True": "False", "False": "True"}
    edits = []
    for piece in pieces:
        if piece.kind == token.NUMBER and piece.text.isdecimal() and len(piece.text) < 10:
            edits.append(Edit(piece.start, piece.stop, str(int(piece.text) + 1)))
        elif piece.text in flip and piece.kind == token.NAME:
            edits.append(Edit(piece.start, piece.stop, flip[piece.text]))
    return edits


def _return(whole: str, tree: ast.AST, pieces: list[_BodyToken], begins: int) -> list[Edit]:
    return [
        Edit(piece.start, after.start, "")
        for piece, after in pairwise(pieces)
        if piece.text == "return" and piece.kind == token.NAME and after.text != "None"
    ]


BUG_KINDS: dict[str, Callable[[str, ast.AST, list[_BodyToken], int], list[Edit]]] = {
    "syntax": _syntax,
    "operator": _operator,
    "variable": _variable,
    "constant": _constant,
    "return": _return,
}


def _body_tokens(whole: str, begins: int) -> list[_BodyToken]:
    """Return the tokens of the body; none if tokenizer and parser disagree."""
    starts = _line_starts(whole)
    try:
        found = list(tokenize.generate_tokens(io.StringIO(whole).readline))
    except (tokenize.TokenError, SyntaxError):
        return []
    pieces = [
        _BodyToken(t.type, t.string, starts[t.start[0] - 1] + t.start[1], starts[t.end[0] - 1] + t.end[1])
        for t in found
        if t.start[0] <= len(starts) and t.end[0] <= len(starts)
    ]
    return [p for p in pieces if p.start >= begins]


def _line_starts(text: str) -> list[int]:
    """Return the start of each line, and one past the last."""
    starts = [0]
    for line in text.split("\n"):
        starts.append(starts[-1] + len(line) + 1)
    return starts
