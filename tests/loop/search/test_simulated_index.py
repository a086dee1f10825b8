"""Histories with crashes, stalls and late writes: the index equals the rows, and each planted fault is found."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.support.loop.search_world import FAULTS, SearchWorld


def test_no_history_leaves_another_index():
    points = Counter()
    for seed in range(40):
        world = SearchWorld(seed)
        assert world.run() == [], f"seed {seed}"
        points.update(world.points)
    expected = {"crash", "late", "taken", "folded", "fenced"}
    assert expected <= points.keys() and min(points[name] for name in expected) >= 10, points


@pytest.mark.parametrize("world", FAULTS)
def test_each_planted_fault_of_an_index_is_found(world):
    assert any(world(seed).run() for seed in range(100))
