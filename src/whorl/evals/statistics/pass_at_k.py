"""Estimators from N >= n samples per task: pass@n, majority vote, and best of n by a score.

c of N samples are correct. Drawing n of them without replacement is equivalent to sampling n times. So each estimate
is the mean over all subsets of size n. It needs no further samples and is unbiased:

    pass       1 - C(N - c, n) / C(N, n)                       pass@n (Chen et al. 2021, arXiv:2107.03374, eq. 1)
    best       sum_i correct_(i) C(i - 1, n - 1) / C(N, n)     in rising order of score; sample i is the best of a
                                                               subset if the others rank below it
    majority   whether the most frequent answer is correct     self-consistency (Wang et al. 2022, arXiv:2203.11171);
                                                               ties are drawn; random subsets, no closed form

The plain estimate of pass@n, 1 - (1 - c / N)^n, is biased, because it draws with replacement.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

import numpy as np
from numpy.typing import NDArray

from whorl.errors import ConfigError

SUBSETS = 256  # random subsets per task for a vote


def pass_at_k(correct: NDArray[np.bool_], n: int) -> NDArray[np.float64]:
    """Return [tasks] probability that one of n is correct.

    correct: [tasks, N]. Raises ConfigError: n is not in 1 to N.
    """
    total = _check_n(correct.shape[1], n)
    wrong = total - correct.sum(1)
    return np.array([1.0 - comb(int(w), n) / comb(total, n) for w in wrong])


def best_of_n(correct: NDArray[np.bool_], scores: NDArray[np.float64], n: int) -> NDArray[np.float64]:
    """Return [tasks] probability that the best of n by score is correct; equal scores are drawn.

    Args:
        correct, scores: [tasks, N]; higher scores are better.

    Raises:
        ConfigError: n is not in 1 to N, or a score is NaN.
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
    """Return n -> [tasks] probability that the most frequent answer among n is correct.

    Args:
        correct: [tasks, N]. sampled_answers: answer of each sample; an empty one does not vote.
        subsets: approximate number of orders per task, whose first n are a subset.

    Raises:
        ConfigError: an n is not in 1 to N.
    """
    total = correct.shape[1]
    for n in ns:
        _check_n(total, n)
    found: dict[int, list[float]] = {n: [] for n in ns}
    rotations = (
        np.arange(total)[:, None] + np.arange(total)
    ) % total  # each order from every start: exact for n = 1
    for good, answers in zip(correct, sampled_answers, strict=True):
        names = sorted({a for a in answers if a})
        place = {name: k for k, name in enumerate(names)}
        ballots = np.zeros((total, len(names)))
        is_correct = np.zeros(len(names))
        for i, answer in enumerate(answers):
            if answer:
                ballots[i, place[answer]] = 1.0
                is_correct[place[answer]] = max(is_correct[place[answer]], float(good[i]))
        if not names or not is_correct.any():
            for n in ns:
                found[n].append(0.0)
            continue
        orders = rng.permuted(np.tile(np.arange(total), (-(-subsets // total), 1)), axis=1)[:, rotations]
        orders = orders.reshape(-1, total)
        counts = ballots[orders].cumsum(1)  # [subsets, N, names]
        for n in ns:
            votes = counts[:, n - 1]
            top = (votes == votes.max(1, keepdims=True)) & (votes > 0)
            ties = top.sum(1)
            share = np.divide(top @ is_correct, ties, out=np.zeros(len(orders)), where=ties > 0)
            found[n].append(float(share.mean()))
    return {n: np.array(each) for n, each in found.items()}


def _check_n(total: int, n: int) -> int:
    if not 1 <= n <= total:
        raise ConfigError(f"n is {n}", expected=f"1 to {total}, the samples per task")
    return total
