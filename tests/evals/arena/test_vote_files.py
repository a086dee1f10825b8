"""Votes in files: the records of Chatbot Arena there and back, votes that are twice, pairs for preference training."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.evals.fake_endpoint import FakeEndpoint

from whorl.align.data.formats import to_preference
from whorl.errors import ConfigError, DataError
from whorl.evals.arena.arena_log import ArenaLog, Battle, BattleTurn
from whorl.evals.arena.battles import CHOICES
from whorl.evals.arena.contestants import open_contestant, open_contestants, parse_contestant, read_prompts
from whorl.evals.arena.vote_files import (
    load_votes,
    parse_votes,
    preference_records,
    vote_records,
    write_records,
)
from whorl.evals.model.endpoint_backend import EndpointBackend
from whorl.evals.model.options import ModelOptions

RECORD = {
    "question_id": "q", "model_a": "a", "model_b": "b", "winner": "model_a", "judge": "j", "tstamp": 5.0,
}  # fmt: skip


@given(st.lists(st.tuples(st.sampled_from(CHOICES), st.text(), st.text(), st.floats(0.1, 5)), max_size=5))
def test_records_come_back_as_the_same_votes(battles: list[tuple[Any, str, str, float]]) -> None:
    with TemporaryDirectory() as folder, ArenaLog(Path(folder) / "log.sqlite") as log:
        for number, (choice, left, right, weight) in enumerate(battles):
            log.add_battle(Battle(str(number), "x", "y", weight, turns=(BattleTurn("p", left, right),) * 2))
            log.add_vote(str(number), choice, "me")
        records = json.loads(json.dumps(list(vote_records(log.battles()))))
        assert parse_votes(records, "records") == (log.votes(), 0)


def test_log_and_its_export_have_the_same_votes(tmp_path: Path) -> None:
    with ArenaLog(tmp_path / "log.sqlite") as log:
        log.add_battle(Battle("1", "x", "y", turns=(BattleTurn("p", "one", "three"),)))
        log.add_battle(Battle("2", "x", "y", turns=(BattleTurn("p", "l", "r"),)))
        log.add_vote("1", "both bad")
        assert write_records(vote_records(log.battles()), tmp_path / "votes.jsonl") == 1
    assert load_votes(tmp_path / "votes.jsonl") == load_votes(tmp_path / "log.sqlite")


def test_votes_that_are_twice_count_once() -> None:
    votes, repeated = parse_votes([RECORD, {**RECORD, "question_id": "r"}, RECORD], "file")
    assert ([v.battle for v in votes], repeated) == (["q", "r"], 1)
    without = {name: value for name, value in RECORD.items() if name != "question_id"}
    assert len(parse_votes([without, without], "file")[0]) == 2  # nothing says that they are one
    assert len(parse_votes([without, {**RECORD, "question_id": "1"}], "file")[0]) == 2  # a number is no id
    assert parse_votes([{**RECORD, "weight": 0}], "file")[0][0].weight == 0  # which `read_votes` refuses


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"winner": "a"}, "record 2: the winner is 'a'"),
        ({"winner": "tie"}, "record 2: the battle 'q' has another vote before"),
        ({"model_b": None}, "record 2 has no models"),
        ({"tstamp": "noon"}, "record 2: could not convert"),
    ],
)
def test_bad_records_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_votes([RECORD, {**RECORD, **change}], "file")


def test_preferences_are_those_of_decisive_votes(tmp_path: Path) -> None:
    turn, settings = BattleTurn("p", "l", "r"), {"system": "s"}
    one = Battle("1", "x", "y", settings=settings, turns=(turn,))
    with ArenaLog(tmp_path / "log.sqlite") as log:
        for k, (battle, choice) in enumerate((
            (one, "right"), (one, "tie"), (replace(one, turns=(turn, turn)), "left"),
            (replace(one, turns=(BattleTurn("p", "same", "same"),)), "left"),
            (replace(one, settings={"complete": True}), "left"),
        )):  # fmt: skip
            log.add_battle(replace(battle, id=str(k)))
            log.add_vote(str(k), choice)  # type: ignore[arg-type]
        chat, text = map(to_preference, preference_records(log.battles()))
    assert chat.prompt == ({"role": "system", "content": "s"}, {"role": "user", "content": "p"})
    assert (chat.chosen, chat.rejected) == tuple(({"role": "assistant", "content": c},) for c in "rl")
    assert (text.prompt, text.chosen, text.rejected) == ("p", "l", "r")


def test_contestants_have_names_and_share_back_ends() -> None:
    options = ModelOptions()
    assert parse_contestant("quickstart/sft", options)[:2] == ("quickstart/sft", "quickstart/sft")
    name, ref, own = parse_contestant("big=https://host/v1?a=b#org/model", options)
    assert (name, ref, own.model_name) == ("big", "https://host/v1?a=b", "org/model")
    with pytest.raises(ConfigError, match="has no model"):
        parse_contestant("http://host/v1", options)
    with FakeEndpoint() as fake:
        found = open_contestants([f"a={fake.url}#fake", f"b={fake.url}#fake"])
        assert list(found) == ["a", "b"] and found["a"] is found["b"]
        with pytest.raises(ConfigError, match="two models have the name 'fake'"):
            open_contestants([f"{fake.url}#fake"] * 2)
        with pytest.raises(ConfigError, match="an arena of 1 models"):
            open_contestants([f"{fake.url}#fake"])
        judge, backend = open_contestant(f"{fake.url}#fake", timeout=7.0)
        assert isinstance(backend, EndpointBackend)
        assert judge == "fake" and backend.client.timeout == 7.0
        with pytest.raises(ValueError, match="greater than 0"):
            open_contestant(f"{fake.url}#fake", timeout=-1.0)


def test_prompts_are_lines_or_fields(tmp_path: Path) -> None:
    text, records = tmp_path / "p.txt", tmp_path / "p.jsonl"
    text.write_text("One\n\n Two\n")
    records.write_text('{"prompt": "One"}\n{"question": "Two"}\n')
    assert read_prompts(text) == ["One", " Two"]
    with pytest.raises(
        DataError, match=r"record 2: the field 'prompt' is None[\s\S]*fields question[\s\S]*--field"
    ):
        read_prompts(records)
    text.write_text("\n")
    with pytest.raises(DataError, match="has no prompt"):
        read_prompts(text)
    with pytest.raises(DataError, match="cannot be read"):
        read_prompts(tmp_path / "none.txt")
