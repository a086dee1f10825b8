"""What n answers are worth, from N >= n samples to each task: any of them right, the vote, the best by a score.

Of N samples c are right. To draw n of them without replacement is as good as to sample n anew, so each figure is its mean
over all subsets of n, which needs no further sample and has no bias:

    any        1 - C(N - c, n) / C(N, n)                       pass@n (Chen et al. 2021, arXiv:2107.03374, eq. 1)
    best       sum_i right_(i) C(i - 1, n - 1) / C(N, n)       in rising order of their score, sample i is the best of a
                                                               subset if the others come from those below it
    majority   whether the commonest answer is right           self-consistency (Wang et al. 2022, arXiv:2203.11171); ties
                                                               are drawn; random subsets, since there is no short sum

The obvious estimate of pass@n, 1 - (1 - c / N)^n, is biased: it draws with replacement.

The subtle part is the interval. The samples of one task are alike, so it is tasks that are counted, not samples: the spread
is that of the tasks' own figures, and Wilson's interval is taken with as many tasks as would spread like that. With one
sample a task it is Wilson's own, and where all are right, or none, it does not shrink to a point as a normal interval does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, sqrt

import numpy as np
from numpy.typing import NDArray

from whorl.errors import ConfigError

Z95 = 1.959964  # two-sided 95 %
SUBSETS = 256  # random ones a task, of a vote


@dataclass(frozen=True)
class Estimate:
    """A mean over tasks with its 95 % interval."""

    mean: float
    low: float
    high: float


def pass_at_k(correct: NDArray[np.bool_], n: int) -> NDArray[np.float64]:
    """[tasks] chance that one of n is right, of right [tasks, N]. Raises ConfigError: n is not in 1 to N."""
    total = _check_n(correct.shape[1], n)
    wrong = total - correct.sum(1)
    return np.array([1.0 - comb(int(w), n) / comb(total, n) for w in wrong])


def best_of_n(correct: NDArray[np.bool_], scores: NDArray[np.float64], n: int) -> NDArray[np.float64]:
    """[tasks] chance that the best of n by its score is right; among equal scores it is drawn.

    Args:
        right, scores: [tasks, N], higher scores are better.

    Raises:
        ConfigError: n is not in 1 to N; a score is not a number.
    """
    total = _check_n(correct.shape[1], n)
    if correct.shape != scores.shape or np.isnan(scores).any():
        raise ConfigError(
            f"scores {list(scores.shape)}, {int(np.isnan(scores).sum())} of them NaN",
            expected=f"a number for each of {list(correct.shape)} samples",
        )
    weights = np.array([comb(i, n - 1) / comb(total, n) for i in range(total)])  # of rank i from 0
    found = []
    for good, score in zip(correct, scores, strict=True):
        order = np.argsort(score, kind="stable")
        _, first, alike = np.unique(score[order], return_index=True, return_counts=True)
        tied = np.add.reduceat(good[order].astype(float), first) / alike
        found.append(float((np.repeat(tied, alike) * weights).sum()))
    return np.array(found)


def majority_at_k(
    correct: NDArray[np.bool_],
    sampled_answers: Sequence[Sequence[str]],
    ns: Sequence[int],
    rng: np.random.Generator,
    subsets: int = SUBSETS,
) -> dict[int, NDArray[np.float64]]:
    """n -> [tasks] chance that what is said most often among n is right.

    Args:
        right: [tasks, N]; said: what each sample answers; an empty one does not vote.
        subsets: orders a task, about, whose first n are a subset.

    Raises:
        ConfigError: an n is not in 1 to N.
    """
    total = correct.shape[1]
    for n in ns:
        _check_n(total, n)
    found: dict[int, list[float]] = {n: [] for n in ns}
    turned = (
        np.arange(total)[:, None] + np.arange(total)
    ) % total  # each order from each of its places: fair for n = 1
    for good, answers in zip(correct, sampled_answers, strict=True):
        names = sorted({a for a in answers if a})
        place = {name: k for k, name in enumerate(names)}
        ballots = np.zeros((total, len(names)))
        worth = np.zeros(len(names))
        for i, answer in enumerate(answers):
            if answer:
                ballots[i, place[answer]] = 1.0
                worth[place[answer]] = max(worth[place[answer]], float(good[i]))
        if not names or not worth.any():
            for n in ns:
                found[n].append(0.0)
            continue
        orders = rng.permuted(np.tile(np.arange(total), (-(-subsets // total), 1)), axis=1)[:, turned]
        orders = orders.reshape(-1, total)
        counts = ballots[orders].cumsum(1)  # [subsets, N, names]
        for n in ns:
            votes = counts[:, n - 1]
            top = (votes == votes.max(1, keepdims=True)) & (votes > 0)
            ties = top.sum(1)
            share = np.divide(top @ worth, ties, out=np.zeros(len(orders)), where=ties > 0)
            found[n].append(float(share.mean()))
    return {n: np.array(each) for n, each in found.items()}


def estimate(values: NDArray[np.float64], draws: int = 1) -> Estimate:
    """The mean of the tasks' figures [tasks] in 0 to 1, with its 95 % interval (see the top of this file).

    draws: behind each figure, with no sample in two of them: N // n for n out of N. More than all of these nobody knows.

    Raises:
        ConfigError: there is none.
    """
    tasks = len(values)
    if not tasks:
        raise ConfigError("there is no task to take a mean of", expected="one at least")
    mean = float(np.clip(values.mean(), 0.0, 1.0))
    spread = float(values.var())
    most = float(tasks * draws)
    binomial = mean * (1 - mean)
    known = min(most, binomial * tasks / spread) if spread > 0 else (most if binomial > 0 else float(tasks))
    middle = (mean + Z95**2 / (2 * known)) / (1 + Z95**2 / known)
    half = Z95 / (1 + Z95**2 / known) * sqrt(binomial / known + Z95**2 / (4 * known**2))
    return Estimate(mean, max(0.0, min(mean, middle - half)), min(1.0, max(mean, middle + half)))


def _check_n(total: int, n: int) -> int:
    if not 1 <= n <= total:
        raise ConfigError(f"n is {n}", expected=f"1 to {total}, as many samples as a task has")
    return total
