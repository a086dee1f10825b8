"""Reconciliation, the caches, the warehouse, the feed, and what they do after failures."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time

import pytest
import redis

from whorl.log.event import Event
from whorl.log.memory import MemoryLog
from whorl.log.port import OffsetRemovedError
from whorl.loop.counter import VIEWS
from whorl.loop.counter.answers import clicks_per_day, newest_answers, votes_per_rater
from whorl.loop.counter.cache import HOT, LocalCache, RedisCache
from whorl.loop.counter.counts import Counts
from whorl.loop.counter.reconciliation import reconcile_counts
from whorl.loop.counter.warehouse import export_events, likes_per_day
from whorl.loop.events import (
    COMPLETIONS,
    FEEDBACK,
    CompletionMade,
    FeedbackGiven,
    LoggedAnswer,
    create_topics,
)
from whorl.loop.streams.store import ViewStore
from whorl.loop.streams.view import ViewEffect
from whorl.loop.streams.worker import ViewWorker

DAY = 86400.0


def click(log, actor: str, completion: str, kind: str, n: int, at: float = 10.0) -> None:
    log.append(FEEDBACK, FeedbackGiven(actor, completion, kind).event(f"{actor} {completion} {n}", at))


@pytest.fixture
def log():
    with MemoryLog() as log:
        create_topics(log)
        for completion, model in (("c2", "large"), ("c1", "small")):
            made = CompletionMade(completion, model, "abc", "zoe", "p", [1], [LoggedAnswer("a", [2])])
            log.append(COMPLETIONS, made.event(100.0 + (model == "small")))
        for n, kind in enumerate(("like", "none", "like")):
            click(log, "ada", "c1", kind, n, at=DAY + n)
        click(log, "bob", "c1", "dislike", 0, at=2 * DAY)
        click(log, "bob", "c2", "like", 0, at=2 * DAY)
        yield log


@pytest.fixture
def store():
    with ViewStore("sqlite::memory:") as store:
        yield store


def fold(log, store, perform=lambda effects: None) -> None:
    for view in VIEWS:
        worker = ViewWorker(view, log, store, perform)
        for point in worker.steps():
            if point == "idle":
                break
        worker.close()


def test_reconciliation_repairs_counts_and_the_cache(log, store):
    fold(log, store)
    cache = LocalCache()
    right = Counts(store, LocalCache()).get(["c1/0", "c2/0"])
    wrong = '{"likes":9,"dislikes":9,"cells":{"0":[1,9,9]}}'
    store.execute("UPDATE view_rows SET value = %s WHERE name = 'counts' AND key = 'c1/0'", [wrong])
    store.execute("DELETE FROM view_rows WHERE name = 'counts' AND key = 'c2/0'")
    Counts(store, cache).get(["c1/0", "c2/0"])
    found = reconcile_counts(store, cache)
    assert found.wrong == {
        "c1/0": ({"likes": 9, "dislikes": 9}, {"likes": 1, "dislikes": 1}),
        "c2/0": ({"likes": 0, "dislikes": 0}, {"likes": 1, "dislikes": 0}),
    }  # fmt: skip
    assert found.stale == ["c1/0", "c2/0"] and Counts(store, cache).get(["c1/0", "c2/0"]) == right
    assert reconcile_counts(store, cache).wrong == {}
    click(log, "eve", "c1", "like", 0)
    fold(log, store)
    assert Counts(store, LocalCache()).get(["c1/0"]) == {"c1/0": {"likes": 2, "dislikes": 1}}
    assert reconcile_counts(store).wrong == {}


def test_the_feed_has_counts_raters_and_clicks_by_day(log, store):
    fold(log, store)
    feed = newest_answers(Counts(store, LocalCache()))
    assert [(row["id"], row["likes"], row["dislikes"]) for row in feed] == [("c1", 1, 1), ("c2", 1, 0)]
    assert newest_answers(Counts(store, LocalCache()), before=feed[0]["time"])[0]["id"] == feed[1]["id"]
    assert votes_per_rater(store) == {"ada": 1, "bob": 2}
    assert {(row["day"], row["model"], row["kind"]): row["clicks"] for row in clicks_per_day(store)} == {
        (DAY, "small", "like"): 2, (DAY, "small", "none"): 1,
        (2 * DAY, "small", "dislike"): 1, (2 * DAY, "large", "like"): 1,
    }  # fmt: skip
    log.append(FEEDBACK, Event("actor.erased", "bob", {}), Event("actor.erased", "zoe", {}))
    fold(log, store)
    assert votes_per_rater(store) == {"ada": 1}
    assert newest_answers(Counts(store, LocalCache())) == []
    assert Counts(store, LocalCache()).get(["c1/0", "c2/0"])["c1/0"] == {"likes": 1, "dislikes": 0}


def test_an_export_that_was_killed_leaves_nothing_twice(log, tmp_path, monkeypatch):
    monkeypatch.setattr("whorl.loop.counter.warehouse.RANGE", 4)
    expected = [("1970-01-02", "small", 1, 0), ("1970-01-03", "large", 1, 0), ("1970-01-03", "small", 0, 1)]
    for _ in range(2):
        export_events(log, tmp_path)
        assert likes_per_day(tmp_path) == expected
    (tmp_path / "offsets.json").write_text("{}")  # killed before the offsets moved
    export_events(log, tmp_path)
    assert likes_per_day(tmp_path) == expected
    for n in range(10):
        click(log, "ada", "c1", ("dislike", "like")[n % 2], 10 + n, at=DAY)
        export_events(log, tmp_path)
    assert likes_per_day(tmp_path) == expected
    for partition, (_, end) in enumerate(log.bounds(FEEDBACK)):
        log.trim(FEEDBACK, partition, end)
    click(log, "ada", "c1", "like", 99, at=DAY)
    export_events(log, tmp_path)
    assert likes_per_day(tmp_path) == expected
    click(log, "ada", "c1", "like", 100, at=DAY)
    for partition, (_, end) in enumerate(log.bounds(FEEDBACK)):
        log.trim(FEEDBACK, partition, end)
    with pytest.raises(OffsetRemovedError):
        export_events(log, tmp_path)


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory):
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server: apt-get install redis-server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tmp_path_factory.mktemp("redis")
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    client = redis.Redis(port=port)
    for _ in range(100):
        try:
            client.ping()
            break
        except redis.ConnectionError:
            time.sleep(0.05)
    yield f"redis://127.0.0.1:{port}"
    server.kill()
    server.wait()


@pytest.fixture(params=["process", "redis"])
def cache(request):
    if request.param == "process":
        return LocalCache(seconds=1.5)
    found = RedisCache(request.getfixturevalue("redis_url"), seconds=1.5)
    found._redis.flushall()
    return found


def change(partition: str, *cell: int) -> list[ViewEffect]:
    return [ViewEffect("count", "a", {"partition": partition, "cell": list(cell)})]


def test_a_cold_entry_is_dropped_and_a_hot_one_takes_newer_cells(cache):
    assert cache.get(["a", "b"]) == {}
    cache.perform(change("0", 1, 1, 0))
    assert cache.get(["a"]) == {}  # an effect makes no entry
    cache.fill({"a": {"0": [1, 1, 0]}, "b": {}})
    assert cache.get(["a", "b"]) == {"a": {"0": [1, 1, 0]}, "b": {}}
    cache.perform(change("0", 2, 2, 0))
    assert cache.get(["a", "b"]) == {"b": {}}
    cache.fill({"a": {"0": [2, 2, 0]}})
    for _ in range(HOT):
        cache.get(["a"])
    for effect in (change("1", 5, 0, 3), change("0", 3, 1, 0), change("0", 3, 1, 0), change("0", 1, 1, 0)):
        cache.perform(effect)
    assert cache.get(["a"]) == {"a": {"0": [3, 1, 0], "1": [5, 0, 3]}}
    time.sleep(1.6)
    assert cache.get(["a", "b"]) == {}


def test_counts_are_right_through_a_cache_that_took_effects(cache, log, store):
    counts = Counts(store, cache)
    for n in range(HOT + 5):
        click(log, f"actor {n}", "c1", "like", 0)
        fold(log, store, cache.perform)
        assert counts.get(["c1/0"])["c1/0"] == {"likes": n + 2, "dislikes": 1}


def test_counts_are_read_while_the_cache_is_away(log, store):
    fold(log, store)
    away = RedisCache("redis://127.0.0.1:1")
    away.perform(change("0", 1, 1, 0))
    assert Counts(store, away).get(["c1/0"]) == {"c1/0": {"likes": 1, "dislikes": 1}}
