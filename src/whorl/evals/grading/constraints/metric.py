"""Constraints of an answer, strict and loose (arXiv:2311.07911, section 2.2).

    strict    the answer satisfies the constraint
    loose     the answer satisfies it, or one of seven variants does: without asterisks, without its first line, without its
              last line, and combinations

    constraints_strict, constraints_loose      1 if all constraints of the item are satisfied
    instructions_strict, instructions_loose    share of them; weighted with their number, the mean over items is the
                                               paper's accuracy by instruction

An answer without text satisfies nothing. The reference implementation replaces invalid arguments by random ones. Here an
unknown kind, an unknown or missing argument and an invalid value are errors, raised before anything is scored.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from whorl.errors import DataError, one_of
from whorl.evals.grading.constraints.checks import CHECKS
from whorl.evals.grading.constraints.languages import LANGUAGES
from whorl.evals.grading.grade import Grade
from whorl.evals.grading.refusal import is_refusal

RELATIONS = ("less than", "at least")


@dataclass(frozen=True)
class Constraint:
    """One constraint of an item. arguments: as in IFEval's field `kwargs`, without null values."""

    kind: str
    arguments: Mapping[str, Any]

    @cached_property
    def check(self) -> Callable[[str], bool]:
        """The function of a text."""
        return partial(CHECKS[self.kind], **self.arguments)


def constraints(gold: Any, text: str, *, finish: str = "stop") -> Grade:
    """Return the scores at the top of this file.

    Args:
        gold: as for `read_constraints`.
        finish: "length" if the limit of tokens cut the text.

    Raises:
        DataError: as `read_constraints`.
    """
    each = read_constraints(gold)
    strict = [satisfies(one, text) for one in each]
    loose = [held or satisfies(one, text, loose=True) for one, held in zip(each, strict, strict=True)]
    scores = {
        "constraints_strict": float(all(strict)),
        "constraints_loose": float(all(loose)),
        "instructions_strict": sum(strict) / len(each),
        "instructions_loose": sum(loose) / len(each),
    }
    weights = {"instructions_strict": float(len(each)), "instructions_loose": float(len(each))}
    failed = [one.kind for one, held in zip(each, strict, strict=True) if not held]
    reason = f"not satisfied: {', '.join(failed)}" if failed else "all constraints are satisfied"
    if not failed:
        return Grade.of(scores, "right", reason, weights=weights)
    if not text.strip():
        return Grade.of(scores, "not_found", "the answer is empty", weights=weights)
    if is_refusal(text):
        return Grade.of(scores, "refused", reason, weights=weights)
    return Grade.of(scores, "truncated" if finish == "length" else "wrong", reason, weights=weights)


def satisfies(constraint: Constraint, text: str, *, loose: bool = False) -> bool:
    """Return whether a text satisfies a constraint; `loose`: or one of its variants does."""
    texts = _variants(text) if loose else [text]
    return any(bool(each.strip()) and constraint.check(each) for each in texts)


def read_constraints(gold: Any) -> list[Constraint]:
    """Return the checked constraints of an item.

    Args:
        gold: a record of IFEval with `instruction_id_list` and `kwargs`, or a list of objects with "kind" (or "id") and
            the arguments.

    Raises:
        DataError: there are none, a kind is unknown, an argument is unknown, missing or invalid.
    """
    if isinstance(gold, Mapping):
        kinds: Any = gold.get("instruction_id_list")
        arguments: Any = gold.get("kwargs")
        if not _is_list(kinds) or not _is_list(arguments) or len(kinds) != len(arguments):
            raise DataError(
                "the record has no list of constraints with one set of arguments each",
                expected="instruction_id_list and kwargs, two lists of the same length",
            )
        pairs = list(zip(kinds, arguments, strict=True))
    elif _is_list(gold) and all(isinstance(one, Mapping) for one in gold):
        pairs = [
            (one.get("kind", one.get("id")), {k: v for k, v in one.items() if k not in ("kind", "id")})
            for one in gold
        ]
    else:
        raise DataError(
            f"constraints are {type(gold).__name__}", expected="a record of IFEval, or a list of objects"
        )
    if not pairs:
        raise DataError("the item has no constraint", expected="at least one")
    return [_constraint(str(kind), given or {}) for kind, given in pairs]


def _constraint(kind: str, given: Mapping[str, Any]) -> Constraint:
    if kind not in CHECKS:
        raise DataError(
            f"unknown kind of constraint {kind!r}", expected=one_of(kind, list(CHECKS)),
            do="correct the record, or remove it: a constraint that is not checked would count as satisfied",
        )  # fmt: skip
    wanted = list(inspect.signature(CHECKS[kind]).parameters)[1:]
    present = {name: value for name, value in given.items() if value is not None}
    for name in present:
        if name not in wanted:
            raise DataError(f"{kind} has no argument {name!r}", expected=one_of(name, wanted))
    for name in wanted:
        if name not in present:
            raise DataError(f"{kind} lacks the argument {name!r}", expected=f"arguments {', '.join(wanted)}")
    arguments = {name: _checked(kind, name, present[name]) for name in wanted}
    if "nth_paragraph" in arguments and not 1 <= arguments["nth_paragraph"] <= arguments["num_paragraphs"]:
        raise DataError(
            f"{kind}: paragraph {arguments['nth_paragraph']} of {arguments['num_paragraphs']}",
            expected="nth_paragraph from 1 to num_paragraphs",
        )
    return Constraint(kind, arguments)


def _checked(kind: str, name: str, value: Any) -> Any:
    if name.startswith("num_") or name.endswith("frequency") or name == "nth_paragraph":
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
            raise DataError(f"{kind}: {name} is {value!r}", expected="a whole number of 0 or more")
        return int(value)
    if name.endswith("relation"):
        if value not in RELATIONS:
            raise DataError(f"{kind}: {name} is {value!r}", expected=one_of(str(value), list(RELATIONS)))
        return value
    if name in ("keywords", "forbidden_words"):
        if not _is_list(value) or not value or not all(isinstance(v, str) and v.strip() for v in value):
            raise DataError(f"{kind}: {name} is {value!r}", expected="a list of words")
        return [each.strip() for each in value]
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{kind}: {name} is {value!r}", expected="a text")
    if name == "letter" and len(value.strip()) != 1:
        raise DataError(f"{kind}: {name} is {value!r}", expected="one character")
    if name == "language" and value not in LANGUAGES:
        raise DataError(
            f"{kind}: the language {value!r} cannot be checked",
            expected=one_of(value, sorted(LANGUAGES)),
        )
    return value.strip()


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _variants(text: str) -> list[str]:
    lines = text.split("\n")
    cut = [text, *("\n".join(some).strip() for some in (lines[1:], lines[:-1], lines[1:-1]))]
    return [*cut, *(each.replace("*", "") for each in cut)]
