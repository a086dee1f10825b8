"""Verdicts in replies, longer copies, length-controlled win rates, kappa."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whorl.evals.judge import REMINDER, cohen_kappa, control_length, lengthen, parse_verdict


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ("Reasons.\n[[A]]", "A"), ("[[ b ]]", "B"), ("[[C]]", "tie"), ("[[Tie]]", "tie"), ("A", "A"), ("**B**.", "B"),
        ("Verdict: tie", "tie"), ("The better answer is A.", "A"), ("Both are fine.\n\nWinner: Assistant B", "B"),
        ("Not [[A]], since it is wrong.\n[[B]]", "B"), ("[[B]]\nThat is all.", "B"),
        ("I like A more than B.", None), ("", None), ("A tie between a rock and a hard place", None),
        (REMINDER, None), ("[[A]] or [[B]]", None), ("[[D]]", None), ("Answer B is great, and so is Answer A", None),
    ],
)  # fmt: skip
def test_verdicts_are_read_and_prose_is_not(reply: str, verdict: str | None) -> None:
    assert parse_verdict(reply) == verdict


@given(st.text(), st.integers(0, 300))
def test_longer_copy_begins_with_the_text(text: str, characters: int) -> None:
    copy = lengthen(text, characters)
    if not any(map(str.isalnum, text)):
        assert copy == text
    else:
        assert copy.startswith(text.rstrip()) and len(copy) > len(text.rstrip())
        assert set(copy) <= {*text, *"In other words:\n"}
        assert len(copy) >= characters - 1  # the space after a sentence


@given(
    st.lists(st.tuples(st.sampled_from([0, 0.5, 1]), st.sampled_from([-1, 0, 1])), min_size=1, max_size=30)
)
def test_values_of_items_have_the_mean_of_the_formula(pairs: list[tuple[float, int]]) -> None:
    wins, longer = np.array([w for w, _ in pairs]), np.array([s for _, s in pairs])
    found = control_length(list(wins), list(longer), [])
    up, down, equal = (wins[longer == s] for s in (1, -1, 0))
    if found.values is None:
        assert not len(up) or not len(down)
    elif len(up):
        expected = (len(up) + len(down)) * (up.mean() + down.mean()) / 2 + equal.sum()
        assert found.values.mean() == pytest.approx(expected / len(wins))
        assert found.bias == pytest.approx((up.mean() - down.mean()) / 2)


def test_standard_error_includes_that_of_the_bias() -> None:
    rng = np.random.default_rng(0)
    means, errors = [], []
    for _ in range(400):
        n = 200
        longer = np.where(rng.random(n) < 0.8, 1, -1)
        wins = (rng.random(n) < 0.5 + 0.3 * longer).astype(float)
        probes = (rng.random(n) < 0.8).astype(float)
        values = control_length(wins, longer, probes).values
        assert values is not None
        means.append(values.mean())
        errors.append(values.std(ddof=1) / math.sqrt(n))
    assert np.mean(means) == pytest.approx(0.5, abs=0.01)
    assert np.mean(errors) == pytest.approx(np.std(means), rel=0.1)


def test_no_items_and_equal_lengths() -> None:
    assert math.isnan(control_length([], [], []).bias)
    found = control_length([1, 0, 1], [0, 0, 0], [])
    assert found.values is not None and found.values.tolist() == [1, 0, 1]


def test_kappa_matches_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(1)
    a, b = (rng.choice(["answer", "baseline", "tie"], 50).tolist() for _ in range(2))
    assert cohen_kappa(a, b) == pytest.approx(metrics.cohen_kappa_score(a, b))
    assert math.isnan(cohen_kappa(["tie"], ["tie"])) and math.isnan(cohen_kappa([], []))
