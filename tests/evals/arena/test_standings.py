"""Standings: ranks, meetings, provisional ratings, and the fewest votes that change first place."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.evals.votes import votes

from whorl.errors import DataError
from whorl.evals.arena.battles import Battles, Vote, read_votes
from whorl.evals.arena.bradley_terry import solve
from whorl.evals.arena.first_place import PENALTY, fewest_votes
from whorl.evals.arena.standings import standings

MODELS = ("m0", "m1", "m2", "m3")


def test_standings_order_ranks_and_meetings() -> None:
    found = standings(votes(np.random.default_rng(0), 2000), MODELS, draws=200)
    assert [r.model for r in found.rows] == ["m3", "m2", "m1", "m0"]
    assert [(r.rank_low, r.rank_high) for r in found.rows] == [(1, 1), (2, 2), (3, 3), (4, 4)]
    for row in found.rows:
        assert row.low < row.points < row.high
        assert row.bootstrap_low is not None and row.bootstrap_low < row.points
        assert row.wins + row.losses + row.ties + row.both_bad == row.votes
    assert sum(r.votes for r in found.rows) == 2 * found.votes == 4000
    first = next(m for m in found.meetings if (m.a, m.b) == ("m0", "m3"))
    assert first.low < first.expected < first.high < 0.5 and first.p_value < 1e-6
    assert sum(m.wins + m.losses + m.ties + m.both_bad for m in found.meetings) == 2000
    assert found.text.startswith("m3 is first with ") and "Better than m2, m1, m0." in found.text
    assert found.remove is not None and found.reverse is not None
    assert found.reverse.votes < found.remove.votes
    assert asdict(found)["rows"][0]["model"] == "m3"


def test_few_votes_give_provisional_ratings_that_move() -> None:
    one = [Vote("1", "a", "b", "left")]
    found = standings(one, ["a", "b", "c"])
    assert found.text.startswith("Provisional, with a prior: no finite rating")
    a, c, b = found.rows
    assert (
        (a.model, c.model, b.model) == ("a", "c", "b") and a.points > 1020 and c.points == pytest.approx(1000)
    )
    assert a.bootstrap_low is None and (a.rank_low, a.rank_high) == (1, 3)
    more = standings([*one, Vote("2", "b", "a", "right")], ["a", "b", "c"])
    assert more.rows[0].points > a.points


def test_equal_models_are_not_distinguishable() -> None:
    tied = [Vote(str(i), "ab"[i % 2], "ba"[i % 2], ("left", "tie", "right")[i % 3]) for i in range(120)]  # type: ignore[arg-type]
    found = standings(tied, ["a", "b"], draws=50)
    assert "Not distinguishable from" in found.text
    assert [(r.rank_low, r.rank_high) for r in found.rows] == [(1, 2), (1, 2)]


def test_votes_that_are_all_ties_have_wide_intervals() -> None:
    found = standings([Vote(str(i), "a", "b", "tie") for i in range(3)], ["a", "b"], draws=20)
    assert found.provisional == "no votes but ties: a, b"
    assert found.rows[0].high - found.rows[0].low > 100 and found.rows[0].bootstrap_low is None


def test_equal_points_share_first_place() -> None:
    found = standings(
        [Vote(str(i), "a", "b", "left" if i % 2 else "right") for i in range(10)], ["a", "b"], draws=0
    )
    assert (
        found.text.endswith("b has as many points, so first place is shared.")
        and "0 votes removed" not in found.text
    )


def test_position_bias_is_named() -> None:
    biased = [Vote(str(i), "ab"[i % 2], "ba"[i % 2], "left" if i % 5 else "right") for i in range(200)]
    found = standings(biased, ["a", "b"], draws=0)
    assert "Position bias: the left answer won 80% of decided votes." in found.text


def test_length_control_reports_its_effect() -> None:
    found = standings(votes(np.random.default_rng(1), 1500, length=2.0), MODELS, length=True, draws=50)
    assert found.effects[0].name == "length" and found.effects[0].low > 0


def test_two_models_need_the_lead_in_votes() -> None:
    # 60 to 40: level after 20 wins are removed, or 10 reversed.
    drawn = [Vote(str(i), "a", "b", "left" if i < 60 else "right") for i in range(100)]
    battles = read_votes(drawn)
    for change, n in (("remove", 20), ("reverse", 10)):
        found = fewest_votes(battles, change)  # type: ignore[arg-type]
        assert found is not None
        assert (found.leader, found.challenger, found.votes, found.share) == ("a", "b", n, n / 100)


@settings(max_examples=25)
@given(st.lists(st.integers(0, 4), min_size=6, max_size=6))
def test_removed_votes_are_few_against_all_subsets(counts: list[int]) -> None:
    rows = list(product([(0, 1), (0, 2), (1, 2)], [0.0, 1.0]))
    first, second = (np.array([pair[k] for pair, _ in rows]) for k in (0, 1))
    count = np.array(counts, float)
    if not count.sum():
        return
    battles = Battles(
        tuple("abc"), first, second, np.array([s for _, s in rows]), np.ones(6), count, np.zeros((6, 0))
    )
    found = fewest_votes(battles)
    left = np.array(list(product(*(range(n + 1) for n in counts))), float)
    ratings = solve(battles, left, PENALTY)
    leader = int(np.argsort(-solve(battles, count[None, :], PENALTY)[0], kind="stable")[0])
    changed = (np.delete(ratings, leader, 1) >= ratings[:, leader : leader + 1] - 1e-9).any(1)
    smallest = int((count.sum() - left.sum(1))[changed].min())  # removing all leaves them level
    assert found is not None and smallest <= found.votes <= smallest + 1


def test_first_place_refuses_covariates() -> None:
    with pytest.raises(DataError, match="without covariates"):
        fewest_votes(read_votes(votes(np.random.default_rng(2), 50), length=True))


def test_weights_and_unknown_models_are_respected() -> None:
    drawn = votes(np.random.default_rng(3), 400)
    extra = [replace(drawn[0], battle="x", left="other")]
    assert standings([*drawn, *extra], MODELS, draws=0).votes == 400
