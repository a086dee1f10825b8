"""`whorl forget`: text becomes unreadable, counts lose the actor, models of the events are named."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from whorl.cli import build_app
from whorl.log import open_log
from whorl.loop.actor_keys import ActorKeys
from whorl.loop.counter import VIEWS
from whorl.loop.counter.counts import Counts
from whorl.loop.events import (
    COMPLETIONS,
    FEEDBACK,
    CompletionMade,
    FeedbackGiven,
    LoggedAnswer,
    create_topics,
)
from whorl.loop.streams.runner import run_views
from whorl.loop.streams.store import default_views
from whorl.store import Artifact, Build, Store


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A store with completions and likes of two actors, and a chain events -> preferences -> model of each."""
    store = Store(tmp_path)
    store.make_folders()
    with open_log(f"sqlite:{tmp_path / 'log' / 'events.db'}") as log:
        create_topics(log)
        keys = ActorKeys(tmp_path / "log" / "keys.db")
        for actor in ("ada", "bob"):
            made = CompletionMade(f"c-{actor}", "m", "d", actor, "secret", [1], [LoggedAnswer("secret", [2])])
            log.append(COMPLETIONS, keys.seal(made.event(1.0)))
            log.append(FEEDBACK, FeedbackGiven(actor, "c-bob", "like").event(f"like {actor}", 2.0))
        keys.close()
    for actor in ("ada", "bob"):
        parents = dict[str, Artifact]()
        for kind in ("events", "preferences", "model"):
            name = f"{actor}/{kind}"
            with Build(store, kind=kind, name=name, parents=parents, config={"n": name}, version=1) as build:
                (build.path / "actors.txt").write_text(f"{actor}\nkäthe {actor}\n")
            parents = {kind: store.open(name)}
    store.set_name("served/chat", store.open("ada/model"))
    return tmp_path


def run(home: Path, actor: str) -> str:
    done = CliRunner().invoke(build_app(), ["forget", actor, "--store", str(home)])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_an_actor_is_erased_and_the_models_are_named(home: Path) -> None:
    text = run(home, "ada")
    assert "the key is destroyed" in text and "ada/events" in text and "ada/preferences" in text
    assert "served/chat" in text and "bob/" not in text and "whorl gc" in text
    keys = ActorKeys(home / "log" / "keys.db")
    with open_log(f"sqlite:{home / 'log' / 'events.db'}") as log:
        opened = {event.key: keys.open(event) for r in log.replay(COMPLETIONS) if (event := r.event())}
        assert opened["c-ada"] is None and opened["c-bob"] is not None
        run_views(
            VIEWS, log.url, default_views(home), perform=lambda _: None, stop=threading.Event(), once=True
        )
    counts = Counts.open(default_views(home))
    assert counts.get(["c-bob/0"]) == {"c-bob/0": {"likes": 1, "dislikes": 0}}
    counts.close()
    keys.close()
    assert "there was no key" in run(home, "ada")  # again: nothing more happens


def test_an_unknown_actor_has_no_artifacts(home: Path) -> None:
    text = run(home, "käthe")  # "käthe ada" is another actor
    assert "there was no key" in text and "no artifact" in text
