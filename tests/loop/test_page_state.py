"""Contents of the pages /feed and /loop."""

from __future__ import annotations

import json
import threading
from pathlib import Path

from whorl.log import open_log
from whorl.loop.actor_keys import ActorKeys
from whorl.loop.counter import VIEWS
from whorl.loop.events import (
    COMPLETIONS,
    FEEDBACK,
    CompletionMade,
    FeedbackGiven,
    LoggedAnswer,
    create_topics,
)
from whorl.loop.feedback_token import FeedbackClaim
from whorl.loop.gate import gate_state
from whorl.loop.page_state import PageState
from whorl.loop.streams.runner import run_views
from whorl.loop.streams.store import default_views
from whorl.store import Build, Store

SECRET = bytes(32)


def test_the_pages_show_the_log_and_the_store(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.make_folders()
    log, keys = open_log(f"sqlite:{tmp_path / 'log' / 'events.db'}"), ActorKeys(tmp_path / "log" / "keys.db")
    create_topics(log)
    pages = PageState(store, log, keys, SECRET)
    assert pages.feed("eve", None, 2) == {"answers": [], "next": None}
    assert pages.loop()["gate"]["tests"] == [] and pages.loop()["comparison"] is None

    def add(n: int) -> None:
        """Add a pair of answers and a vote for the right one, which is the challenger's."""
        for side, arm in (("left", "champion"), ("right", "challenger")):
            made = CompletionMade(
                f"{side}-{n}", "m", arm, f"user {n}", [{"role": "user", "content": f"prompt {n}"}], [1],
                [LoggedAnswer(f"answer {n} {side}", [2])], {}, f"pair {n}", side, arm,
            )  # fmt: skip
            log.append(COMPLETIONS, keys.seal(made.event(n + (side == "right") / 2)))
        vote = FeedbackGiven(f"user {n}", f"right-{n}", "better", over=f"left-{n}")
        log.append(
            FEEDBACK,
            vote.event(f"vote {n}", n),
            FeedbackGiven("eve", f"right-{n}", "like").event(f"like {n}", n),
        )

    for n in range(3):
        add(n)
        assert pages.loop()["gate"] == gate_state(log)  # a fold that continues equals a fold of everything
    assert pages.loop()["gate"]["tests"][0]["wins"] == 3

    run_views(
        VIEWS, log.url, default_views(tmp_path), perform=lambda _: None, stop=threading.Event(), once=True
    )
    keys.erase("user 1")
    first = pages.feed("eve", None, 2)
    rest = pages.feed("eve", first["next"], 100)
    texts = [answer["text"] for answer in (*first["answers"], *rest["answers"])]
    assert texts == [
        "answer 2 right",
        "answer 2 left",
        "answer 0 right",
        "answer 0 left",
    ]  # without the erased actor
    newest = first["answers"][0]
    assert (newest["prompt"], newest["likes"], newest["mine"], rest["next"]) == ("prompt 2", 1, "like", None)
    assert FeedbackClaim.read(SECRET, newest["token"]).actor == "eve"

    with Build(store, kind="comparison", name="f/compare", parents={}, config={}, version=1) as build:
        (build.path / "comparison.json").write_text(json.dumps({"verdict": "better"}))
    state = pages.loop()
    assert state["comparison"] == {"verdict": "better"} and state["lags"] == {view.name: 0 for view in VIEWS}
    assert (
        state["raters"]["n"] == 4 and state["raters"]["lorenz"][0] == 0 and state["raters"]["lorenz"][-1] == 1
    )
    assert json.dumps(state)
    pages.close()
    log.close()
