"""Gold answers in the forms that records have: an index, a letter, a text, or a list of one of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from whorl.errors import DataError, shorten
from whorl.evals.tasks.records import LETTERS


def one_gold(gold: Any, where: str) -> Any:
    """Return the only gold answer.

    Args:
        where: task and item, for messages.

    Raises:
        DataError: no gold answer, or several.
    """
    if isinstance(gold, Sequence) and not isinstance(gold, str):
        if len(gold) > 1:
            raise DataError(
                f"{where} has {len(gold)} gold answers: {shorten(repr(list(gold)), 80)}",
                expected="one", do="select one with the expression `gold`, or remove the record",
            )  # fmt: skip
        gold = gold[0] if gold else None
    if gold is None or (isinstance(gold, str) and not gold.strip()):
        raise DataError(
            f"{where} has no gold answer", expected="a value of the expression `gold`",
            do="set `gold`, or keep records with an answer by data.where",
        )  # fmt: skip
    return gold


def gold_index(gold: Any, choices: Sequence[str], where: str) -> int:
    """Return the index of the right choice.

    Args:
        gold: an index from 0, the text of one choice, or its letter.

    Raises:
        DataError: no gold answer, several of them, or it is none of the choices.
    """
    gold = one_gold(gold, where)
    if isinstance(gold, float) and gold.is_integer():
        gold = int(gold)
    if isinstance(gold, int) and not isinstance(gold, bool) and 0 <= gold < len(choices):
        return gold
    if isinstance(gold, str):
        if gold in choices:
            return choices.index(gold)
        letter = gold.strip().strip("().").upper()
        if len(letter) == 1 and letter in LETTERS[: len(choices)]:
            return LETTERS.index(letter)
    raise DataError(
        f"{where}: the gold answer {shorten(repr(gold), 60)} is none of the {len(choices)} choices",
        expected=f"an index from 0 to {len(choices) - 1}, a letter from A to {LETTERS[: len(choices)][-1:]}, "
        "or the text of a choice",
        do="correct the expression `gold`",
    )  # fmt: skip


def shuffled_order(task: str, item: str, n: int) -> list[int]:
    """Return a permutation that depends on task and item alone, for records whose right choice is always the first."""

    def key(i: int) -> bytes:
        return hashlib.sha256(f"{task}\0{item}\0{i}".encode()).digest()

    return sorted(range(n), key=key)
