"""Curriculum: draws follow weights, weights follow pass rates, and a restored state continues identically."""

from __future__ import annotations

import json
import math
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whorl.align.data.curriculum import Curriculum, CurriculumRule, resample
from whorl.errors import ConfigError, DataError

RULES: tuple[CurriculumRule, ...] = get_args(CurriculumRule)


def test_weights_match_formula_of_each_rule() -> None:
    def with_rule(rule: CurriculumRule) -> list[float]:
        curriculum = Curriculum([0.0] * 4, rule=rule, min_weight=0.1)
        for task, passed in ((0, 8), (1, 0), (2, 4)):  # task 3 is unseen
            curriculum.update(task, passed / 8)
        return curriculum.weights().tolist()

    extreme = 4 * (8.5 / 9) * (0.5 / 9)
    assert with_rule("variance") == pytest.approx([extreme, extreme, 1, 1])
    assert with_rule("filter") == [0.1, 0.1, 1, 1]
    assert with_rule("uniform") == [1, 1, 1, 1]


def test_old_attempts_decay_to_zero() -> None:
    curriculum = Curriculum([0.0], rule="filter", decay=0.5, min_weight=0.01)
    curriculum.update(0, 0.0, 4)
    assert curriculum.weights()[0] == 0.01
    curriculum.update(0, 1.0, 4)  # failed has decayed to 2
    assert curriculum.pass_rates()[0] == pytest.approx(4.5 / 7) and curriculum.weights()[0] == 1
    for _ in range(6):  # 2 / 2**6 is below MIN_COUNT
        curriculum.update(0, 1.0, 4)
    assert curriculum.weights()[0] == 0.01
    lasting = Curriculum([0.0], rule="filter", decay=1.0)
    lasting.update(0, 0.0, 4)
    for _ in range(50):
        lasting.update(0, 1.0, 4)
    assert lasting.weights()[0] == 1 and lasting.pass_rates()[0] == pytest.approx(200.5 / 205)


def test_draw_frequency_matches_probabilities() -> None:
    curriculum, rng = Curriculum([0.0] * 5), np.random.default_rng(3)
    for task, passed in enumerate((0, 2, 8, 14, 16)):
        curriculum.update(task, passed / 16, 16)
    first = np.bincount([curriculum.draw(2, rng)[0] for _ in range(6000)], minlength=5) / 6000
    assert np.abs(first - curriculum.probabilities()).max() < 4 * math.sqrt(0.25 / 6000)
    pair = curriculum.draw(2, rng)
    assert len(set(pair)) == 2


def test_easy_first_opens_levels() -> None:
    """A level opens when half of its tasks were tried and `advance_rate` of the attempts passed; it stays open."""
    curriculum = Curriculum([2, 0, 1, 0, 1], rule="easy_first", advance_rate=0.75)
    assert curriculum.is_open().tolist() == [False, True, False, True, False]
    assert set(curriculum.draw(4, np.random.default_rng(0))) == {1, 3}  # each twice
    for task, passed, n_open in ((1, 8, 2), (2, 2, 2), (4, 8, 2), (2, 8, 3), (2, 0, 3)):
        curriculum.update(task, passed / 8)
        assert curriculum.n_open_levels == n_open
    assert curriculum.is_open().all()
    assert Curriculum([2, 0, 1]).is_open().all()


Records = list[
    tuple[int, int, int]
]  # a task and two counts; the smaller one passed, the larger one was tried
RECORDS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 8), st.integers(0, 8)), max_size=40)


@given(RECORDS, RECORDS, st.sampled_from(RULES), st.sampled_from([0.5, 1.0]), st.integers(1, 20))
def test_state_dict_roundtrip_continues_identically(
    before: Records, after: Records, rule: CurriculumRule, move_on: float, n: int
) -> None:
    def play(curriculum: Curriculum, records: Records) -> list[list[int]]:
        drawn = []
        for i, (task, a, b) in enumerate(records):
            rng = np.random.default_rng(i)
            drawn.append(curriculum.draw(n, rng))
            curriculum.update(task, min(a, b) / max(a, b, 1), max(a, b))
            weight, open_ = curriculum.weights(), curriculum.is_open()
            assert np.isfinite(weight).all() and weight.max() <= 1
            assert (weight[open_] >= curriculum.min_weight).all() and (weight[~open_] == 0).all()
            assert ((curriculum.pass_rates() > 0) & (curriculum.pass_rates() < 1)).all()
            assert curriculum.probabilities().sum() == pytest.approx(1)
            times = np.bincount(curriculum.draw(n, rng), minlength=7)
            assert times.sum() == times[open_].sum() == n
            assert np.ptp(times[open_]) <= 1  # no task twice before all came once
        return drawn

    whole, other = (Curriculum([0, 0, 1, 2, 2, 2, 5], rule=rule, advance_rate=move_on) for _ in range(2))
    play(whole, before)
    saved, kept = json.loads(json.dumps(whole.state_dict())), whole.copy()
    other.load_state_dict(saved)
    assert play(whole, after) == play(other, after)
    assert whole.state_dict() == other.state_dict()
    assert kept.state_dict() == saved  # a copy is independent


def test_curriculum_rejects_invalid_input() -> None:
    curriculum = Curriculum([0.0, 1.0])
    good = curriculum.state_dict()
    counts = ({"passed": [1.0]}, {"passed": [-1.0, 0.0]}, {"failed": [math.nan, 0.0]})
    for state in ({}, *({**good, **change} for change in (*counts, {"reach": 9}, {"reach": "x"}))):
        with pytest.raises(DataError, match="curriculum's state"):
            curriculum.load_state_dict(state)
    assert curriculum.state_dict() == good
    for difficulty in ([], [math.nan]):
        with pytest.raises(ConfigError):
            Curriculum(difficulty)
    for name, value in (("rule", "hard"), ("decay", 0), ("min_weight", 2), ("advance_rate", 0.0)):
        with pytest.raises(ConfigError):
            Curriculum([0], **{name: value})
    for task, rate, tried in ((2, 0, 1), (-1, 0, 1), (0, 2, 1), (0, -1, 1), (0, math.nan, 1), (0, 0, -1)):
        with pytest.raises(ValueError, match="pass rate"):
            curriculum.update(task, rate, tried)


def test_resample_fills_up_and_stops_at_max_rounds() -> None:
    curriculum = Curriculum([0.0] * 40, rule="uniform")
    rewards = {0: [1.0, 1.0], 1: [0.0, 0.0], 2: [1.0, 0.0], 3: [0.5, 0.5]}
    rolled: list[int] = []

    def roll(tasks: list[int]) -> list[tuple[int, list[float]]]:
        rolled.extend(tasks)
        return [(t, rewards[t % 4]) for t in tasks]

    rng = np.random.default_rng(1)
    found = resample(curriculum, roll, 8, rng, max_rounds=50)
    assert len(found.informative) == 8 and all(t % 4 == 2 for t in found.informative)
    assert sorted([*found.informative, *found.uninformative]) == sorted(rolled)
    kinds = np.bincount([t % 4 for t in rolled], minlength=4).tolist()
    assert kinds == [found.all_passed, found.all_failed, 8, found.all_equal]
    assert (curriculum.passed + curriculum.failed > 0).sum() == len(set(rolled))
    never = resample(curriculum, lambda tasks: [(t, [1.0, 1.0]) for t in tasks], 4, rng, max_rounds=3)
    assert never.informative == [] and len(never.uninformative) == never.all_passed == 12
    empty = resample(curriculum, lambda tasks: [(t, []) for t in tasks], 2, rng, max_rounds=1)
    assert empty.all_failed == 2


def test_variance_rule_finds_more_informative_groups() -> None:
    """Skill rises by 0.01 with every informative group; difficulties extend far beyond it on both sides."""

    def learn(rule: CurriculumRule) -> int:
        rng = np.random.default_rng(0)
        difficulty = np.linspace(-6, 14, 200)
        curriculum = Curriculum(difficulty.tolist(), rule=rule)
        taught = 0
        for _ in range(150):
            for task in curriculum.draw(8, rng):
                passed = int(rng.binomial(8, 1 / (1 + math.exp(difficulty[task] - 0.01 * taught))))
                curriculum.update(task, passed / 8)
                taught += 0 < passed < 8
        return taught

    plain, soft, hard = learn("uniform"), learn("variance"), learn("filter")
    assert soft > max(1.5 * plain, plain + 100) and hard > max(1.3 * plain, plain + 100)
