"""The like counter against a count by brute force, over batches, duplicates, erasures, replays and owners."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whorl.log.event import Event
from whorl.log.memory import MemoryLog
from whorl.log.port import OffsetRemovedError
from whorl.loop.counter.cache import LocalCache
from whorl.loop.counter.counts import Counts
from whorl.loop.counter.likes import LikesView
from whorl.loop.events import FEEDBACK, QUARANTINE, FeedbackGiven, create_topics
from whorl.loop.streams.store import ViewStore
from whorl.loop.streams.worker import ViewWorker

clicks = st.lists(
    st.tuples(
        st.sampled_from(["ada", 'a"da', "bob"]), st.sampled_from(["c1", "c2"]),
        st.sampled_from(["like", "dislike", "none", "edit", "erased"]), st.integers(0, 3),
    ),
    max_size=40,
)  # fmt: skip


def event_of(actor: str, completion: str, kind: str, number: int) -> Event:
    id = f"{actor} {completion} {kind} {number}"
    if kind == "erased":
        return Event("actor.erased", actor, {}, id=f"erased {actor}", time=1.0)
    return FeedbackGiven(actor, completion, kind).event(id, 1.0)


def new_log(events=()) -> MemoryLog:
    log = MemoryLog()
    create_topics(log)
    for event in events:
        log.append(FEEDBACK, event)
    return log


def fold(log, store, limit=10_000) -> None:
    worker = ViewWorker(LikesView(), log, store, limit=limit)
    for point in worker.steps():
        if point == "idle":
            break
    worker.close()


def brute_force(events) -> dict[str, Counter]:
    last, seen, erased = {}, set(), set()
    for event in events:
        if event.type == "actor.erased":
            erased.add(event.key)
        elif event.data["kind"] in ("like", "dislike", "none") and event.id not in seen:
            last[event.key, event.data["completion"]] = event.data["kind"]
            seen.add(event.id)
    counts = {"c1/0": Counter(), "c2/0": Counter()}
    for (actor, completion), kind in last.items():
        if actor not in erased:
            counts[f"{completion}/0"][f"{kind}s"] += 1
    return counts


def rows(store) -> list:
    return store.execute("SELECT name, key, value FROM view_rows ORDER BY name, key")


@settings(max_examples=60, deadline=None)
@given(clicks, st.integers(1, 7), st.booleans())
def test_counts_equal_brute_force_whatever_the_batches(made, limit, unique):
    events = [event_of(*click) for click in made]
    log = new_log()
    for event in events:
        if not unique:
            log._places.clear()  # a log that recognises no duplicates
        log.append(FEEDBACK, event)
    first, second = ViewStore("sqlite::memory:"), ViewStore("sqlite::memory:")
    fold(log, first, limit)
    counts = Counts(first, LocalCache()).get(["c1/0", "c2/0"])
    for answer, expected in brute_force(events).items():
        assert counts[answer] == {"likes": expected["likes"], "dislikes": expected["dislikes"]}
    fold(log, second)
    assert rows(first) == rows(second)


def test_an_owner_that_was_replaced_changes_nothing():
    log, store = new_log([event_of("ada", "c1", "like", 0)]), ViewStore("sqlite::memory:")
    now = [1000.0]
    log.clock = lambda: now[0]
    slow = ViewWorker(LikesView(), log, store)
    steps = slow.steps()
    assert [next(steps), next(steps)] == ["taken", "read"]  # and sleeps
    now[0] += 60
    fold(log, store)
    before = rows(store)
    assert next(steps) == "fenced" and rows(store) == before
    assert [next(steps), next(steps)] == ["taken", "idle"] and rows(store) == before


def test_what_is_no_feedback_is_quarantined_once_and_counted():
    log, store = new_log(), ViewStore("sqlite::memory:")
    log.append(FEEDBACK, Event("feedback.given", "a", {"kind": "like"}), event_of("a", "c1", "like", 1))
    log.append(FEEDBACK, Event("feedback.given", "a", {"kind": "like"}, version=9))
    fold(log, store)
    store.reset("likes", {(FEEDBACK, p): 0 for p in range(4)})
    fold(log, store)
    assert [record.event().data["offset"] for record in log.replay(QUARANTINE)] == [0, 2]
    assert store.load("likes", "stats", ["rejected"]) == {"rejected": 2}
    assert Counts(store, LocalCache()).get(["c1/0"]) == {"c1/0": {"likes": 1, "dislikes": 0}}


def test_records_that_retention_removed_are_an_error():
    log, store = new_log([event_of("a", "c1", "like", n) for n in range(9)]), ViewStore("sqlite::memory:")
    fold(log, store)
    log.append(FEEDBACK, *(event_of("a", "c1", "like", n) for n in range(10, 20)))
    for partition in range(4):
        log.trim(FEEDBACK, partition, 12)
    with pytest.raises(OffsetRemovedError, match="records 9 to 11"):
        fold(log, store)


def test_an_actor_reads_only_its_own_memberships():
    log, store = (
        new_log([event_of("a", "c1", "like", 0), event_of('a"', "c1", "dislike", 0)]),
        ViewStore("sqlite::memory:"),
    )
    fold(log, store)
    counts = Counts(store, LocalCache())
    assert counts.mine("a", ["c1/0", "c2/0"]) == {"c1/0": "like", "c2/0": "none"}
    assert counts.mine('a"', ["c1/0"]) == {"c1/0": "dislike"}
