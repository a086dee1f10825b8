"""What an actor wrote is sealed, and unreadable once the actor is erased."""

from __future__ import annotations

import pytest

from whorl.errors import DataError
from whorl.loop.actor_keys import ActorKeys
from whorl.loop.events import CompletionMade, FeedbackGiven, LoggedAnswer


def made() -> CompletionMade:
    return CompletionMade(
        "cmpl-1", "m", "abc", "ada", "secret prompt", [1, 2], [LoggedAnswer("secret answer", [3])]
    )


def test_a_sealed_event_shows_no_text_and_opens_to_what_it_was(tmp_path):
    keys = ActorKeys(tmp_path / "keys.db")
    sealed = keys.seal(made().event(0.0))
    assert b"secret" not in sealed.encode()
    assert CompletionMade.from_data(ActorKeys(tmp_path / "keys.db").open(sealed)) == made()
    like = FeedbackGiven("ada", "cmpl-1", "like").event("click", 0.0)
    assert keys.seal(like) is like  # nothing to hide


def test_an_erased_actor_cannot_be_read_or_written_again(tmp_path):
    keys = ActorKeys(tmp_path / "keys.db")
    sealed = keys.seal(made().event(0.0))
    server = ActorKeys(tmp_path / "keys.db")  # of a process that runs
    assert server.open(sealed) is not None
    assert keys.erase("ada") and not keys.erase("ada")
    assert keys.open(sealed) is None and server.open(sealed) is None
    assert ActorKeys(tmp_path / "keys.db").open(sealed) is None
    with pytest.raises(DataError, match="'ada' is erased"):
        keys.seal(made().event(0.0))


def test_a_seal_belongs_to_its_event(tmp_path):
    keys = ActorKeys(tmp_path / "keys.db")
    sealed = keys.seal(made().event(0.0))
    other = CompletionMade("cmpl-2", "m", "abc", "ada", "p", [1], []).event(0.0)
    moved = type(other)(other.type, other.key, sealed.data, id=other.id)
    with pytest.raises(DataError, match="does not open"):
        keys.open(moved)
