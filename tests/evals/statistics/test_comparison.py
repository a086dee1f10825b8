"""Paired comparisons: false findings, power, verdicts, and items that are missing or unmatched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from whorl.errors import ConfigError, DataError
from whorl.evals.results import ItemResult
from whorl.evals.statistics.comparison import compare, describe, paired_difference, ranked_apart, verdict_of
from whorl.evals.statistics.power import detectable_by, detectable_difference


def results(values: list[float | None], clusters: list[str] | None = None) -> list[ItemResult]:
    return [
        ItemResult(
            f"i{k}",
            {} if v is None else {"acc": v},
            "missing" if v is None else ("right" if v else "wrong"),
            cluster=clusters[k] if clusters else "",
        )
        for k, v in enumerate(values)
    ]


def model_pair(
    rng: np.random.Generator, rows: np.ndarray, shared: float, binary: bool, shift: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Scores of two models on items of clusters `rows`, with a cluster effect in their difference."""
    ease = rng.normal(size=len(rows))
    a, b = (
        ease + shared * rng.normal(size=rows.max() + 1)[rows] + 0.8 * rng.normal(size=len(rows)) + s
        for s in (shift, 0.0)
    )
    return ((a > 0.3).astype(float), (b > 0.3).astype(float)) if binary else (a, b)


@pytest.mark.parametrize(
    ("size", "shared", "binary"), [(1, 0, False), (1, 0, True), (6, 0.8, False), (6, 0.8, True)]
)
def test_equal_models_are_rarely_called_different(size: int, shared: float, binary: bool) -> None:
    rng, found, naive, runs = np.random.default_rng(2), 0, 0, 800
    rows = np.repeat(np.arange(600 // size), size)
    names = [str(r) for r in rows]
    for _ in range(runs):
        a, b = model_pair(rng, rows, shared, binary)
        found += paired_difference(a, b, names).p_value < 0.05
        naive += paired_difference(a, b).p_value < 0.05
    assert 0.03 <= found / runs <= 0.07
    assert size == 1 or naive / runs > 0.1


def test_planted_difference_is_found_at_the_planned_power() -> None:
    rng, found, runs = np.random.default_rng(2), 0, 800
    n, sd = 250, np.sqrt(2) * 0.8
    shift = detectable_difference(sd, n, power=0.8)
    for _ in range(runs):
        a, b = model_pair(rng, np.arange(n), 0.0, False, shift)
        found += paired_difference(a, b).low > 0
    assert 0.76 <= found / runs <= 0.84
    assert detectable_difference(sd, 3 * n, power=0.8, design_effect=3) == pytest.approx(shift)


def test_pairing_removes_the_shared_variance() -> None:
    rng = np.random.default_rng(3)
    a, b = model_pair(rng, np.arange(4000), 0.0, False)
    got = paired_difference(a, b)
    unpaired = (a.var() + b.var()) / 4000
    assert 1 - got.se**2 / unpaired == pytest.approx(1 / 1.64, abs=0.05)
    assert detectable_by(got, n=1000) == pytest.approx(2 * detectable_by(got))


def test_verdicts_follow_the_interval() -> None:
    cases = {
        (0.1, 0.2, 0.0): "better", (-0.2, -0.1, 0.5): "worse", (-0.01, 0.05, 0.02): "no worse",
        (-0.01, 0.015, 0.02): "equivalent", (-0.01, 0.05, 0.0): "not distinguishable",
        (-0.03, 0.05, 0.02): "not distinguishable",
    }  # fmt: skip
    for (low, high, margin), want in cases.items():
        assert verdict_of(low, high, margin) == want
    with pytest.raises(ConfigError, match="margin is -1"):
        verdict_of(0, 1, -1)


def test_equal_scores_on_few_items_are_no_proof() -> None:
    got = compare(results([1, 0, 1, 1]), results([1, 0, 1, 1]), "acc", margin=0.01)
    assert got.verdict == "not distinguishable" and got.paired.low < -0.3 and got.paired.p_value == 1
    halves = compare(
        results([0.5] * 3), results([0.0] * 3), "acc"
    )  # scores between 0 and 1, equal differences
    assert halves.verdict == "not distinguishable" and halves.paired.p_value > 0.1
    four_to_none = compare(results([1] * 50), results([0] * 4 + [1] * 46), "acc")
    assert four_to_none.verdict == "not distinguishable"  # McNemar's exact test: p = 0.125


def test_missing_items_bound_the_difference() -> None:
    rng = np.random.default_rng(4)
    a: list[float | None] = [float(x) for x in rng.random(200) < 0.9]
    b: list[float | None] = [float(x) for x in rng.random(200) < 0.6]
    a[:100], b[199] = [None] * 100, None
    got = compare(results(a), results(b), "acc")
    assert (got.missing_a, got.missing_b, got.paired.n) == (100, 1, 99)
    x, y = np.array([0 if v is None else v for v in a]), np.array([1 if v is None else v for v in b])
    assert got.lowest == pytest.approx((x - y).mean())
    assert got.highest == pytest.approx(got.lowest + 101 / 200)
    assert got.verdict == "better" and "could reverse the sign" in describe(got)


def test_join_ignores_order_and_rejects_unmatched() -> None:
    a, b = results([1, 0, 1, 0], ["x", "x", "y", ""]), results([0, 0, 1, 1], ["x", "x", "y", ""])
    forward, shuffled = compare(a, b, "acc"), compare(a, b[::-1], "acc")
    assert forward == shuffled and forward.paired.clusters == 3
    with pytest.raises(DataError, match=r"2 items of A and 1 of B are unmatched, such as 'i0'"):
        compare(a[:3], b[2:], "acc")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a, b: (a + a[:1], b), "'i0' has 2 results"),
        (lambda a, b: ([], b), "no results"),
        (
            lambda a, b: (a, [ItemResult(r.item, {"bleu": 1.0}, "right") for r in b]),
            "no item has the metric 'acc'",
        ),
        (
            lambda a, b: (a, [ItemResult(r.item, {"acc": float("nan")}, "right") for r in b]),
            "'i0': acc is nan",
        ),
        (lambda a, b: (a, results([1, 0], ["t", ""])), "cluster '' for A and 't' for B"),
        (lambda a, b: (results([None, 1]), results([1, None])), "no item has a value of acc from both"),
    ],
)
def test_invalid_results_are_refused(change: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        compare(*change(results([1, 0]), results([0, 1])), "acc")


def test_planning_rejects_impossible_arguments() -> None:
    for bad in ({"power": 0.4}, {"design_effect": 0}):
        with pytest.raises(ConfigError, match="is 0"):
            detectable_difference(1, 10, **bad)
    assert detectable_difference(1, 1) == float("inf")


def test_samples_ranked_apart_have_the_variance_of_both():
    """The standard error is that of repeated draws, and samples that do not overlap are not certain when they are small."""
    rng = np.random.default_rng(0)
    drawn = [ranked_apart(rng.normal(0.5, 1, 40), rng.normal(0, 1, 60)) for _ in range(1000)]
    assert np.mean([d.difference for d in drawn]) == pytest.approx(
        0.1382, abs=0.005
    )  # Phi(0.5 / sqrt 2) - 1/2
    assert np.mean([d.se for d in drawn]) == pytest.approx(np.std([d.difference for d in drawn]), rel=0.07)
    assert 0.93 < np.mean([d.low < 0.1382 < d.high for d in drawn]) < 0.97
    assert [ranked_apart(range(10, 10 + k), range(k)).low > 0 for k in (2, 3, 4)] == [False, False, True]
    assert ranked_apart([1, 1], [1, 1]).difference == 0
