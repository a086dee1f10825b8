"""`whorl loop` as processes that are killed, and the views in PostgreSQL."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter

import pytest
from tests.support.cli import refuse, start_whorl, succeed
from tests.support.corpus.postgres import postgres_programs, postgres_server

from whorl.log import open_log
from whorl.log.groups import FencedError, GroupState
from whorl.loop.counter import VIEWS
from whorl.loop.counter.cache import LocalCache
from whorl.loop.counter.counts import Counts
from whorl.loop.events import FEEDBACK, FeedbackGiven, create_topics
from whorl.loop.streams.store import ViewStore, ViewsUnavailableError
from whorl.loop.streams.worker import ViewWorker

ANSWERS = [f"c{n}/0" for n in range(3)]


def expire_members(log) -> None:
    """End the sessions of dead members, as ten seconds would."""
    for name in log.document_names("group/"):
        content, version = log.document(name)
        state = GroupState.decode(content)
        state.members = dict.fromkeys(state.members, 0.0)
        log.put_document(name, state.encode(), version)


def clicks(start: int, n: int) -> list:
    draw = random.Random(start)
    return [
        FeedbackGiven(
            f"actor {draw.randrange(20)}", f"c{draw.randrange(3)}", draw.choice(("like", "dislike", "none"))
        ).event(f"click {start + i}", 1e9)
        for i in range(n)
    ]


def brute_force(events) -> dict[str, dict[str, int]]:
    last = {(e.key, e.data["completion"]): e.data["kind"] for e in events}
    totals = Counter((completion, kind) for (_, completion), kind in last.items())
    return {a: {"likes": totals[a[:-2], "like"], "dislikes": totals[a[:-2], "dislike"]} for a in ANSWERS}


def rows(store: ViewStore) -> list:
    return store.execute("SELECT view, name, key, value FROM view_rows ORDER BY view, name, key")


@pytest.fixture
def urls(tmp_path):
    return {"--log": f"sqlite:{tmp_path / 'events.db'}", "--views": f"sqlite:{tmp_path / 'views.db'}"}


def words(urls) -> list[str]:
    return ["loop", *(word for pair in urls.items() for word in pair)]


def test_counts_are_exact_after_two_loops_were_killed(urls, tmp_path):
    sent = []
    with open_log(urls["--log"]) as log:
        create_topics(log)
        for round_ in range(2):
            children = [start_whorl(*words(urls)) for _ in range(2)]
            for part in range(8):
                events = clicks(1000 * round_ + 100 * part, 60)
                log.append(FEEDBACK, *events)
                sent += events
                time.sleep(0.15)
            for child in children:
                child.kill()
                child.communicate()
            expire_members(log)
        succeed(tmp_path, *words(urls), "--once")
        assert log.lags(FEEDBACK) == {"view/likes": 0, "view/answers": 0}
    with ViewStore(urls["--views"]) as store:
        assert Counts(store, LocalCache()).get(ANSWERS) == brute_force(sent)
        before = rows(store)
        succeed(tmp_path, *words(urls), "--once", "--rebuild", "likes", "--rebuild", "answers")
        assert rows(store) == before


def test_a_loop_ends_at_sigterm_and_leaves_its_groups(urls, tmp_path):
    with open_log(urls["--log"]) as log:
        create_topics(log)
        log.append(FEEDBACK, *clicks(0, 10))
        child = start_whorl(*words(urls))
        while log.lags(FEEDBACK).get("view/likes") != 0:
            time.sleep(0.05)
        child.send_signal(signal.SIGTERM)
        _, errors = child.communicate(timeout=30)
        assert child.returncode == 0 and "behind: likes" in errors
        assert all(not GroupState.decode(log.document(n)[0]).members for n in log.document_names("group/"))


def test_options_do_what_they_name(urls, tmp_path):
    with open_log(urls["--log"]) as log:
        create_topics(log)
        log.append(FEEDBACK, *clicks(0, 10))
    succeed(tmp_path, *words(urls), "--once", "--warehouse", tmp_path / "warehouse")
    assert list((tmp_path / "warehouse" / "feedback").glob("date=2001-09-09/*.parquet"))
    assert "3 counts, 0 repaired" in succeed(tmp_path, *words(urls), "--reconcile").stdout
    assert "likes, answers" in refuse(tmp_path, *words(urls), "--rebuild", "likse")
    assert "redis://HOST" in refuse(tmp_path, *words(urls), "--cache", "memcached://here")
    assert "sqlite:FILE" in refuse(tmp_path, *words(urls | {"--views": "mysql://here"}))
    (tmp_path / "events.db").unlink()
    with open_log(urls["--log"]) as log:
        create_topics(log)
    assert "--rebuild" in refuse(tmp_path, *words(urls), "--once", code=1)


@pytest.fixture(scope="module")
def postgres():
    if (programs := postgres_programs()) is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    with postgres_server(programs) as url:
        yield url


def test_rows_in_postgresql_are_those_of_sqlite(postgres, urls):
    with open_log(urls["--log"]) as log:
        create_topics(log)
        log.append(FEEDBACK, *clicks(0, 300), FeedbackGiven("nul", "c\0", "like").event("nul", 1.0))
        found = []
        for url, limit in ((postgres, 7), (urls["--views"], 1000)):
            with ViewStore(url) as store:
                for view in VIEWS:
                    worker = ViewWorker(view, log, store, limit=limit)
                    for point in worker.steps():
                        if point == "idle":
                            break
                    worker.close()
                found.append(rows(store))
        assert sorted(found[0]) == sorted(found[1])


def test_postgresql_fences_and_survives_a_lost_connection(postgres):
    places = {("t", 0): 0}
    with ViewStore(postgres) as one, ViewStore(postgres) as two:
        assert one.take("v", places) == {("t", 0): (0, 1)}
        assert two.take("v", places) == {("t", 0): (0, 2)}
        with pytest.raises(FencedError), one.batch("v", {("t", 0): (0, 5)}, {("t", 0): 1}) as state:
            state.put("x", "k", 1)
        ((pid,),) = two.execute("SELECT pg_backend_pid()")
        with pytest.raises(ViewsUnavailableError), two.batch("v", {("t", 0): (0, 5)}, {("t", 0): 2}) as state:
            one.execute("SELECT pg_terminate_backend(%s)", [pid])
            time.sleep(0.1)
            state.put("x", "k", 2)
        with two.batch("v", {("t", 0): (0, 5)}, {("t", 0): 2}) as state:
            state.put("x", "k", 3)
        assert one.load("v", "x", ["k"]) == {"k": 3} and one.offsets("v") == {("t", 0): (5, 2)}
        two.reset("v", places)
        assert one.load("v", "x", ["k"]) == {} and one.offsets("v") == {("t", 0): (0, 3)}
