"""Bradley-Terry ratings: logistic regression, ties, covariates, sandwich and bootstrap, graphs without estimates."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.evals.votes import TRUTH, votes

from whorl.errors import DataError
from whorl.evals.arena.battles import Battles, Vote, read_votes
from whorl.evals.arena.bootstrap import bootstrap
from whorl.evals.arena.bradley_terry import ELO, fit, unrated
from whorl.evals.arena.pair_sampling import draw_pair, pair_probabilities


@pytest.mark.parametrize("penalty", [0.0, 0.5])
@pytest.mark.parametrize("length", [False, True])
def test_ratings_equal_logistic_regression(length: bool, penalty: float) -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    rng = np.random.default_rng(1)
    drawn = [replace(v, weight=float(rng.uniform(0.5, 2))) for v in votes(rng, 600, length=0.5)]
    battles = read_votes(drawn, length=length)
    ours, x, m = fit(battles, penalty), battles.design(), len(battles.models)
    basis = np.eye(x.shape[1]) if penalty else np.delete(np.eye(x.shape[1]), 0, 1)
    total = battles.count * battles.weight
    y, weight = (
        np.repeat([1.0, 0.0], len(x)),
        np.concatenate([total * battles.score, total * (1 - battles.score)]),
    )
    model = linear_model.LogisticRegression(
        C=1 / penalty if penalty else np.inf,
        fit_intercept=False,
        tol=1e-12,
        max_iter=10_000,
        solver="newton-cholesky",
    )
    model.fit((np.concatenate([x, x]) @ basis)[weight > 0], y[weight > 0], sample_weight=weight[weight > 0])
    theirs = basis @ model.coef_[0]
    theirs[:m] -= theirs[:m].mean()
    assert np.abs(np.concatenate([ours.ratings, ours.effects]) - theirs).max() < 1e-6


def test_two_models_have_closed_form() -> None:
    # 30 wins, 10 losses, 8 ties: log odds of (30 + 4) to (10 + 4).
    outcomes = ["left"] * 30 + ["right"] * 10 + ["tie"] * 5 + ["both bad"] * 3
    battles = read_votes([Vote(str(i), "a", "b", c) for i, c in enumerate(outcomes)])  # type: ignore[arg-type]
    r = fit(battles)
    assert r.ratings[0] - r.ratings[1] == pytest.approx(np.log(34 / 14), abs=1e-9)
    assert r.points.mean() == pytest.approx(1000) and ELO * np.log(10) == pytest.approx(400)


def test_sandwich_is_jackknife_of_a_mean() -> None:
    outcomes = ["left"] * 60 + ["right"] * 40
    r = fit(read_votes([Vote(str(i), "a", "b", c) for i, c in enumerate(outcomes)]))  # type: ignore[arg-type]
    # Delta method: se(p) / (p (1 - p)) with HC3's factor 1 / (1 - 1 / n).
    p, n = 0.6, 100
    assert r.difference_se()[0, 1] == pytest.approx(
        np.sqrt(p * (1 - p) / n) / (p * (1 - p)) / (1 - 1 / n), rel=1e-9
    )


def test_bootstrap_agrees_with_sandwich_with_and_without_voters() -> None:
    rng = np.random.default_rng(2)
    drawn = votes(rng, 800)
    plain = read_votes(drawn)
    sandwich = np.sqrt(np.diag(fit(plain).covariance))
    assert bootstrap(plain, rng, 400).draws.std(0) == pytest.approx(sandwich, rel=0.15)
    # Each vote four times: the same estimate with twice the error of 3,200 independent votes.
    copies = [replace(v, battle=f"{v.battle}-{k}", voter=v.battle) for v in drawn for k in range(4)]
    by_voter = read_votes(copies, by_voter=True)
    r = fit(by_voter)
    assert r.ratings == pytest.approx(fit(plain).ratings, abs=1e-8)
    assert np.sqrt(np.diag(r.covariance)) == pytest.approx(sandwich, rel=0.02)
    assert np.sqrt(np.diag(fit(read_votes(copies)).covariance)) == pytest.approx(sandwich / 2, rel=0.02)
    assert bootstrap(by_voter, rng, 400).draws.std(0) == pytest.approx(sandwich, rel=0.15)


def test_length_covariate_removes_its_effect() -> None:
    # Model 0 writes long answers; voters prefer long ones and nothing else.
    rng = np.random.default_rng(3)
    drawn = []
    for i in range(3000):
        a, b = (int(k) for k in rng.permutation(3)[:2])
        la, lb = (int(rng.integers(50, 400) + 150 * (k == 0)) for k in (a, b))
        won = rng.random() < 1 / (1 + np.exp(-3 * (la - lb) / (la + lb)))
        drawn.append(
            Vote(str(i), f"m{a}", f"m{b}", "left" if won else "right", left_length=la, right_length=lb)
        )
    plain, controlled = fit(read_votes(drawn)), fit(read_votes(drawn, length=True))
    assert plain.ratings[0] > 0.3
    assert np.abs(controlled.ratings).max() < 3 * np.sqrt(np.diag(controlled.covariance)[:3]).max()
    assert controlled.effects[0] > 0.5


def test_models_without_losses_or_votes_are_named() -> None:
    drawn = [Vote("1", "a", "b", "left"), Vote("2", "b", "a", "left"), Vote("3", "c", "a", "left")]
    with pytest.raises(DataError, match=r"no finite ratings: c, d won all or lost all"):
        fit(read_votes(drawn, ["a", "b", "c", "d"]))
    provisional = fit(read_votes(drawn, ["a", "b", "c", "d"]), penalty=1.0)
    assert provisional.ratings[2] == provisional.ratings.max() and provisional.ratings[2] > 0.1
    assert unrated(read_votes([*drawn, Vote("4", "a", "c", "tie")], ["a", "b", "c"])) == []


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from([0, 0.5, 1])), min_size=1, max_size=60
    )
)
def test_finite_exactly_where_the_graph_is_connected(rows: list[tuple[int, int, float]]) -> None:
    rows = [row for row in rows if row[0] != row[1]] or [(0, 1, 0.5)]
    first, second, score = (np.array(column) for column in zip(*rows, strict=True))
    ones = np.ones(len(rows))
    battles = Battles(tuple("abcd"), first, second, score.astype(float), ones, ones, np.zeros((len(rows), 0)))
    if unrated(battles):
        with pytest.raises(DataError, match="no finite ratings"):
            fit(battles)
        return
    r = fit(battles)
    p = 1 / (1 + np.exp(r.ratings[second] - r.ratings[first]))
    for model in range(4):  # the expected score of each model equals its score
        own = np.where(first == model, score - p, 0) + np.where(second == model, p - score, 0)
        assert abs(own.sum()) < 1e-7


def test_information_weights_restore_uniform_ratings() -> None:
    # Preferences that are not transitive: the ratings depend on how often pairs meet.
    beats = {("a", "b"): 0.9, ("b", "c"): 0.9, ("a", "c"): 0.3}
    names, rng = ("a", "b", "c"), np.random.default_rng(4)
    exact = [
        Vote(f"{p}{i}", *p, "left" if i < 1000 * s else "right")
        for p, s in beats.items()
        for i in range(1000)
    ]
    truth = fit(read_votes(exact)).ratings
    drawn: list[Vote] = []
    battles = read_votes([], names)
    for k in range(6000):
        if k % 100 == 0:
            battles = read_votes(drawn, names)
        pair = draw_pair(battles, rng, "information", floor=0.1)
        p = beats.get((pair.left, pair.right), 1 - beats.get((pair.right, pair.left), 0.0))
        drawn.append(
            Vote(str(k), pair.left, pair.right, "left" if rng.random() < p else "right", weight=pair.weight)
        )
    weighted = fit(read_votes(drawn))
    unweighted = fit(read_votes([replace(v, weight=1.0) for v in drawn]))
    error = np.abs(weighted.ratings - truth).max()
    assert error < 3 * np.sqrt(np.diag(weighted.covariance)).max()
    assert np.abs(unweighted.ratings - truth).max() > 2 * error


def test_information_prefers_uncertain_pairs_and_keeps_a_floor() -> None:
    drawn = [Vote(f"x{i}", "a", "b", ("left", "right")[i % 2]) for i in range(100)]  # type: ignore[arg-type]
    drawn += [Vote(f"y{i}", "a", "c", ("left", "right")[i % 2]) for i in range(4)]  # type: ignore[arg-type]
    p = pair_probabilities(read_votes(drawn, ["a", "b", "c"]), "information", floor=0.3)
    assert p.sum() == pytest.approx(1) and p[2] > p[1] > p[0] >= 0.1


def test_bad_votes_are_refused() -> None:
    one = Vote("1", "a", "b", "left")
    for bad, message in (
        ([one, one], "battle '1' is there twice"),
        ([replace(one, right="a")], "compares 'a' with itself"),
        ([replace(one, choice="?")], "is '\\?'"),  # type: ignore[arg-type]
        ([replace(one, weight=0.0)], "weight 0.0"),
        ([replace(one, left_length=-1)], "negative length"),
    ):
        with pytest.raises(DataError, match=message):
            read_votes(bad)
    with pytest.raises(DataError, match="no vote has the lengths"):
        read_votes([one], length=True)
    with pytest.raises(DataError, match="0 votes for 2 models"):
        fit(read_votes([], ["a", "b"]))


def test_covariate_that_separates_is_reported() -> None:
    drawn = [
        Vote(str(i), "ab"[i % 2], "ba"[i % 2], "left", left_length=20, right_length=10) for i in range(20)
    ]
    with pytest.raises(DataError, match="covariate separates"):
        fit(read_votes(drawn, length=True))


def test_simulated_ratings_are_recovered() -> None:
    r = fit(read_votes(votes(np.random.default_rng(5), 4000)))
    assert np.abs(r.ratings - TRUTH).max() < 4 * np.sqrt(np.diag(r.covariance)).max()
