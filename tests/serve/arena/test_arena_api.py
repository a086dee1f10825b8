"""The API of the arena: blind answers, votes that arrive twice, errors, keys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.serve.arena_server import ANSWERS, NAMES, RunningArena, arena_server

from whorl.evals.arena.arena_log import ArenaLog
from whorl.evals.model.requests import Missing
from whorl.serve.arena import MAX_BATTLES
from whorl.serve.middleware.auth import KeyFile


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningArena]:
    with arena_server(tmp_path, prompts=["Drawn prompt"]) as running:
        yield running


def test_nothing_names_a_model_before_its_vote(server: RunningArena) -> None:
    about = server.get("/v1/arena")
    assert about.json() == {"models": 2, "votes": 0, "prompts": 1, "complete": False}
    started = server.post("/v1/arena/battles", {"prompt": "Hi"})
    more = server.post(f"/v1/arena/battles/{started.json()['battle']}/turns", {"prompt": "Go on"})
    for response in (about, started, more):
        assert response.status_code == 200
        assert not any(name in response.text + str(response.headers) for name in (*NAMES, "fake"))
    assert [t["prompt"] for t in more.json()["turns"]] == ["Hi", "Go on"]
    answers = more.json()["turns"][1]
    voted = server.post(
        f"/v1/arena/battles/{started.json()['battle']}/vote", {"choice": "left", "voter": "x"}
    )
    sides = voted.json()
    for side in ("left", "right"):
        assert answers[side] == f"answer {NAMES.index(sides[side]['model'])} to Go on"
    assert sides["left"]["after"] > sides["left"]["before"] == 1000


def test_vote_that_arrives_twice_counts_once(server: RunningArena) -> None:
    battle = server.post("/v1/arena/battles", {}).json()
    assert battle["turns"][0]["prompt"] == "Drawn prompt"
    path = f"/v1/arena/battles/{battle['battle']}/vote"
    first, second = (server.post(path, {"choice": "both bad", "voter": "x"}) for _ in range(2))
    assert first.json()["counted"] is True and second.json()["counted"] is False
    other = server.post(path, {"choice": "left", "voter": "x"})
    assert other.status_code == 409 and other.json()["error"]["code"] == "vote_conflict"
    standings = server.get("/v1/arena/standings").json()
    assert standings["votes"] == 1 and standings["rows"][0]["both_bad"] == 1


def test_votes_are_on_disk_with_conversations(server: RunningArena, tmp_path: Path) -> None:
    battle = server.post("/v1/arena/battles", {"prompt": "Hi"}).json()
    server.post(f"/v1/arena/battles/{battle['battle']}/vote", {"choice": "tie", "voter": "someone"})
    with ArenaLog(tmp_path / "arena.sqlite") as log:  # while the server runs
        [stored] = log.battles()
    assert stored.vote is not None and (stored.vote.choice, stored.vote.voter) == ("tie", "someone")
    assert stored.turns[0].left == battle["turns"][0]["left"] and stored.settings["temperature"] == 0.7


def test_bad_requests_have_clear_errors(server: RunningArena) -> None:
    battle = server.post("/v1/arena/battles", {"prompt": "Hi"}).json()["battle"]
    for path, content, status, text in (
        ("battles", {"prompt": "  "}, 400, "the prompt is empty"),
        ("battles", {"prompt": "x" * 100_001}, 400, "prompt"),
        ("battles", {"prompt": "x", "model": "y"}, 400, "Unknown parameter: 'model'"),
        ("battles/nothing/vote", {"choice": "left"}, 404, "there is no battle 'nothing'"),
        ("battles/nothing/turns", {"prompt": "x"}, 404, "there is no battle 'nothing'"),
        (f"battles/{battle}/vote", {"choice": "first"}, 400, "choice"),
        (f"battles/{battle}/vote", {"choice": "left", "voter": "v" * 65}, 400, "voter"),
    ):
        response = server.post(f"/v1/arena/{path}", content)
        assert (response.status_code, text in response.json()["error"]["message"]) == (status, True), (
            response.text
        )
    assert server.get("/v1/arena/standings").json() == {"votes": 0, "models": sorted(NAMES)}
    foreign = server.get("/v1/arena", headers={"host": "example.org"})
    assert foreign.status_code == 403


def test_missing_answer_names_no_model(tmp_path: Path) -> None:
    answers = {**ANSWERS, NAMES[0]: lambda text: Missing(f"{NAMES[0]} timed out")}
    with arena_server(tmp_path, answers) as server:
        response = server.post("/v1/arena/battles", {"prompt": "Hi"})
        assert response.status_code == 503 and NAMES[0] not in response.text
        assert server.arena.log.missing() == {NAMES[0]: 1}
        drawn = server.post("/v1/arena/battles", {})
        assert drawn.status_code == 400 and "no prompts to draw" in drawn.text


def test_keys_are_required_and_name_the_voter(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    key = keys.add("alice")
    with arena_server(tmp_path, key_file=keys.path) as server:
        assert server.get("/").status_code == 200
        assert server.get("/v1/arena").status_code == 401
        headers = {"authorization": f"Bearer {key}"}
        battle = server.post("/v1/arena/battles", {"prompt": "Hi"}, headers=headers).json()["battle"]
        vote = {"choice": "left", "voter": "another"}
        assert server.post(f"/v1/arena/battles/{battle}/vote", vote).status_code == 401
        server.post(f"/v1/arena/battles/{battle}/vote", vote, headers=headers)
        assert [v.voter for v in server.arena.log.votes()] == [f"key:{keys.read()[0].id}"]


def test_limits_and_places_of_a_key_hold(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    few, many = keys.add("few", requests_per_minute=5), keys.add("many")
    with arena_server(tmp_path, key_file=keys.path) as server:
        few_key, key = ({"authorization": f"Bearer {one}"} for one in (few, many))
        found = [server.post("/v1/arena/battles", {"prompt": "Hi"}, headers=few_key) for _ in range(8)]
        assert [one.status_code for one in found] == [200] * 5 + [429] * 3
        assert (
            int(found[-1].headers["retry-after"]) >= 1 and "x-ratelimit-limit-requests" in found[-1].headers
        )
        places, ids = server.state._places, {one.name: one.id for one in keys.read()}
        assert all(places.take(ids["many"]) for _ in range(MAX_BATTLES // 2)) and not places.take(ids["many"])
        refused = server.post("/v1/arena/battles", {"prompt": "Hi"}, headers=key)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "queue_full"
        assert places.take(ids["few"])  # the other half
        places.give_back(ids["many"])
        assert server.post("/v1/arena/battles", {"prompt": "Hi"}, headers=key).status_code == 200
