"""Votes as arrays: one row for each distinct outcome of a pair of models.

    score       1 if the first model won, 0 if the second did, 1/2 for a tie and for "both bad"
    weight      1 / (P * probability that the pair was drawn), P pairs; 1 for pairs drawn uniformly
    length      (l_first - l_second) / (l_first + l_second), divided by its standard deviation over the votes

The covariate of length is that of the style control of Chatbot Arena (LMSYS 2024). Votes of one voter may be correlated,
so their rows carry the voter; otherwise votes of equal pair, score and weight are one row with a count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from whorl.errors import DataError, shorten

Choice = Literal["left", "right", "tie", "both bad"]
CHOICES: tuple[Choice, ...] = ("left", "right", "tie", "both bad")
SCORES: dict[str, float] = {"left": 1.0, "right": 0.0, "tie": 0.5, "both bad": 0.5}


@dataclass(frozen=True)
class Vote:
    """One vote.

    Attributes:
        battle: id of the battle; each has one vote.
        left, right: models.
        weight: see the top of this file.
        voter: session of a person, or name of a judge; "" if unknown.
        left_length, right_length: characters of the answers; 0 if unknown.
        time: seconds since 1970.
    """

    battle: str
    left: str
    right: str
    choice: Choice
    weight: float = 1.0
    voter: str = ""
    left_length: int = 0
    right_length: int = 0
    time: float = 0.0


@dataclass(frozen=True)
class Battles:
    """Outcomes of R rows.

    Attributes:
        first, second: [R] numbers of models.
        score: [R], in 0 to 1, of the first model.
        weight: [R] weight of one vote. count: [R] votes of the row.
        covariates: [R, C] features of the first answer minus those of the second. names: of the C features.
        voter: [R] numbers of voters whose votes are correlated, or None.
    """

    models: tuple[str, ...]
    first: NDArray[np.intp]
    second: NDArray[np.intp]
    score: NDArray[np.float64]
    weight: NDArray[np.float64]
    count: NDArray[np.float64]
    covariates: NDArray[np.float64]
    names: tuple[str, ...] = ()
    voter: NDArray[np.intp] | None = None

    @property
    def n_votes(self) -> int:
        return int(self.count.sum())

    def design(self) -> NDArray[np.float64]:
        """Return [R, M + C]: +1 for the first model, -1 for the second, then the covariates."""
        rows = np.arange(len(self.first))
        x = np.zeros((len(rows), len(self.models) + self.covariates.shape[1]))
        x[rows, self.first] = 1.0
        x[rows, self.second] = -1.0
        x[:, len(self.models) :] = self.covariates
        return x


def read_votes(
    votes: Sequence[Vote], models: Sequence[str] = (), *, length: bool = False, by_voter: bool = False
) -> Battles:
    """Return votes as arrays.

    Args:
        models: all models, in order; by default those of the votes, sorted. Votes of other models are left out.
        length: with the covariate of length.
        by_voter: votes of one voter are correlated; a vote without one is independent.

    Raises:
        DataError: a battle has two votes, a model meets itself, a choice is unknown, a weight is not positive, or a
            length is missing.
    """
    names = tuple(models) or tuple(sorted({m for v in votes for m in (v.left, v.right)}))
    place = {name: k for k, name in enumerate(names)}
    used = [v for v in votes if v.left in place and v.right in place]
    _check(used, length)
    first = np.array([place[v.left] for v in used], np.intp)
    second = np.array([place[v.right] for v in used], np.intp)
    score = np.array([SCORES[v.choice] for v in used], np.float64)
    weight = np.array([v.weight for v in used], np.float64)
    covariates = np.zeros((len(used), int(length)))
    if length and used:
        covariates[:, 0] = _length_difference(used)
    voter = None
    if by_voter:
        numbers: dict[str, int] = {}
        keys = [v.voter or f"\0{i}" for i, v in enumerate(used)]
        voter = np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.intp)
    battles = Battles(
        names, first, second, score, weight, np.ones(len(used)), covariates, ("length",) * length, voter
    )
    return battles if length or by_voter else group_rows(battles)[0]


def group_rows(battles: Battles) -> tuple[Battles, NDArray[np.intp]]:
    """Return battles with one row for each pair, score and weight, without covariates and voters; and each new row [R]."""
    swap = battles.first > battles.second
    first = np.where(swap, battles.second, battles.first)
    second = np.where(swap, battles.first, battles.second)
    score = np.where(swap, 1 - battles.score, battles.score)
    keys = np.stack([first.astype(np.float64), second.astype(np.float64), score, battles.weight], 1)
    rows, index = np.unique(keys, axis=0, return_inverse=True)
    index = index.reshape(-1)
    count = np.bincount(index, battles.count, minlength=len(rows)).astype(np.float64)
    grouped = Battles(
        battles.models, rows[:, 0].astype(np.intp), rows[:, 1].astype(np.intp), rows[:, 2], rows[:, 3], count,
        np.zeros((len(rows), 0)),
    )  # fmt: skip
    return grouped, index


def _length_difference(votes: Sequence[Vote]) -> NDArray[np.float64]:
    lengths = np.array([(v.left_length, v.right_length) for v in votes], np.float64)
    total = lengths.sum(1)
    found = np.divide(lengths[:, 0] - lengths[:, 1], total, out=np.zeros(len(total)), where=total > 0)
    spread = float(np.sqrt((found**2).mean()))  # about 0, because the sides are drawn
    return np.asarray(found / spread if spread > 0 else found)


def _check(votes: Sequence[Vote], length: bool) -> None:
    seen: set[str] = set()
    for vote in votes:
        at = f"the vote of battle {shorten(vote.battle)!r}"
        if vote.battle in seen:
            raise DataError(f"{at} is there twice", expected="one vote per battle")
        seen.add(vote.battle)
        if vote.left == vote.right:
            raise DataError(f"{at} compares {shorten(vote.left)!r} with itself", expected="two models")
        if vote.choice not in SCORES:
            raise DataError(f"{at} is {shorten(vote.choice)!r}", expected=f"one of: {', '.join(CHOICES)}")
        if not 0 < vote.weight < np.inf:
            raise DataError(f"{at} has the weight {vote.weight}", expected="a positive number")
        if min(vote.left_length, vote.right_length) < 0:
            raise DataError(f"{at} has a negative length", expected="characters of both answers")
    if length and votes and not any(v.left_length or v.right_length for v in votes):
        raise DataError("no vote has the lengths of its answers", expected="characters of both answers")
