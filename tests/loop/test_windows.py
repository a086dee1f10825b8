"""Windows, watermarks and joins of views, over any batches."""

from __future__ import annotations

import random

import pytest

from whorl.log.event import LogRecord
from whorl.loop.streams.store import ViewStore
from whorl.loop.streams.view import ViewItem, ViewState
from whorl.loop.streams.windows import StreamJoin, TumblingWindow, is_late, watermark

PLACES = [("a", 0), ("a", 1), ("b", 0)]


@pytest.fixture
def state():
    with ViewStore("sqlite::memory:") as store:
        yield ViewState(store, "v", PLACES)


def item(place, time, offset=0) -> ViewItem:
    return ViewItem(LogRecord(*place, offset, "k", time, b""), time, None)


def test_late_items_are_counted_by_the_watermark_of_their_partition(state):
    times = [(0, 100.0), (0, 95.0), (1, 50.0), (0, 80.0), (0, 90.0), (1, 55.0), (0, 89.9)]
    assert [is_late(state, item(PLACES[p], t), 10.0) for p, t in times] == [
        False,
        False,
        False,
        True,
        False,
        False,
        True,
    ]
    assert state.get("stats", "late") == 2
    assert watermark(state, 10.0) == float("-inf")  # nothing of the third partition
    is_late(state, item(PLACES[2], 70.0), 10.0)
    assert watermark(state, 10.0) == 45.0


def test_windows_close_when_the_watermark_has_passed_their_end(state):
    days = TumblingWindow("days", 10)
    for time, key in ((0, "x"), (9.99, "x"), (10, "x"), (11, "y"), (25, "x")):
        days.add(state, time, key)
    assert days.closed(state, 9.99) == {}
    assert days.closed(state, 10.0) == {"000000000000 x": 2}
    assert days.closed(state, 29.0) == {"000000000000 x": 2, "000000000010 x": 1, "000000000010 y": 1}
    assert len(days.closed(state, 30.0)) == 4


def test_a_join_gives_the_same_pairs_in_any_order(state):
    join = StreamJoin("near", within=5.0)
    sides = [
        ("left", "k", 0.0),
        ("left", "k", 10.0),
        ("left", "j", 3.0),
        ("right", "k", 5.0),
        ("right", "k", 16.0),
    ]
    records = [(s, k, t, item(PLACES[2 * (s == "right")], t, n)) for n, (s, k, t) in enumerate(sides)]
    for seed in range(10):
        random.Random(seed).shuffle(records)
        fresh = ViewState(state._store, "v", PLACES)
        pairs = [pair for side, key, t, it in records for pair in join.add(fresh, it, side, key, t)]
        assert sorted(pairs) == [(0.0, 5.0), (10.0, 5.0)]
    assert join.drop_old(fresh, 4.0) == 0 and join.drop_old(fresh, 11.0) == 3
    assert [row[1] for row in fresh.scan("near", "", "z").values()] == [10.0, 16.0]
    table = StreamJoin("table")
    assert table.add(fresh, records[0][3], "left", "m", 1) == []
    assert table.add(fresh, item(PLACES[2], 1e9, 9), "right", "m", "row") == [(1, "row")]
