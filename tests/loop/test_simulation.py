"""Histories with crashes, stalls, losses and copies: none has a violation, and each planted fault is found."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.support.loop.faults import FAULTS

from whorl.loop.simulation import SimulatedWorld


def test_no_history_has_a_violation():
    points = Counter()
    for seed in range(200):
        world = SimulatedWorld(seed)
        assert world.run() == [], f"seed {seed}"
        points.update(world.points)
    expected = {"crash", "fenced", "surfaced", "taken", "folded", "performed"}
    assert expected <= points.keys() and min(points[name] for name in expected) >= 20, points


def test_a_seed_gives_one_history():
    one, two = SimulatedWorld(7), SimulatedWorld(7)
    one.run(), two.run()
    assert (one.points, one.log.history) == (two.points, two.log.history)


@pytest.mark.parametrize("world", FAULTS)
def test_each_planted_fault_is_found(world):
    assert any(world(seed).run() for seed in range(100))
