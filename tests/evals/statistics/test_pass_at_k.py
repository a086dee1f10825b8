"""pass@n, best of n and majority against all subsets."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import numpy as np
import pytest

from whorl.errors import ConfigError
from whorl.evals.statistics.pass_at_k import best_of_n, majority_at_k, pass_at_k


def samples(rng: np.random.Generator, tasks: int, total: int) -> tuple[np.ndarray, list[list[str]]]:
    answers = [[str(rng.integers(4)) for _ in range(total)] for _ in range(tasks)]
    return np.array([[a == "0" for a in row] for row in answers]), answers


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_pass_at_k_matches_subsets(n: int) -> None:
    right, _ = samples(np.random.default_rng(0), 6, 7)
    right[0], right[1] = False, True
    counted = [np.mean([row[list(s)].any() for s in combinations(range(7), n)]) for row in right]
    np.testing.assert_allclose(pass_at_k(right, n), counted, atol=1e-12)


@pytest.mark.parametrize("n", [1, 3, 6])
def test_best_of_n_matches_subsets_and_ties(n: int) -> None:
    rng = np.random.default_rng(1)
    right, _ = samples(rng, 8, 6)
    scores = rng.integers(3, size=right.shape).astype(float)  # many ties

    def one(good: np.ndarray, score: np.ndarray) -> float:
        chosen = [np.array(s) for s in combinations(range(6), n)]
        return float(np.mean([good[s][score[s] == score[s].max()].mean() for s in chosen]))

    want = [one(g, s) for g, s in zip(right, scores, strict=True)]
    np.testing.assert_allclose(best_of_n(right, scores, n), want, atol=1e-12)


def test_majority_at_k_matches_subsets() -> None:
    right, answers = samples(np.random.default_rng(3), 5, 7)
    answers[0] = ["", "", "0", "1", "", "1", ""]  # empty answers do not vote
    right[0] = [a == "0" for a in answers[0]]

    def one(row: list[str], n: int) -> float:
        found = []
        for s in combinations(row, n):
            votes = Counter(a for a in s if a)
            top = [a for a, k in votes.items() if k == max(votes.values())]
            found.append(top.count("0") / len(top) if top else 0.0)
        return float(np.mean(found))

    found = majority_at_k(right, answers, [1, 3, 7], np.random.default_rng(0), subsets=20_000)
    for n, values in found.items():
        np.testing.assert_allclose(values, [one(row, n) for row in answers], atol=0.015)


def test_pass_at_k_rejects_invalid_arguments() -> None:
    right = np.ones((2, 3), np.bool_)
    with pytest.raises(ConfigError, match="n is 4"):
        pass_at_k(right, 4)
    with pytest.raises(ConfigError, match="1 of them NaN"):
        best_of_n(right, np.array([[0, 1, np.nan], [0, 1, 2]]), 2)
    with pytest.raises(ConfigError, match="n is 0"):
        majority_at_k(right, [["a"] * 3] * 2, [0], np.random.default_rng(0))
