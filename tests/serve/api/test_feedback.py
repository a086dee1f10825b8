"""A server with a log: completions that are kept, and feedback on them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tests.support.serve.live_server import Running, make_state, running

from whorl.log import open_log
from whorl.log.port import LogUnavailableError
from whorl.loop.actor_keys import ActorKeys
from whorl.loop.events import COMPLETIONS, FEEDBACK, CompletionMade
from whorl.loop.feedback_token import issue_token
from whorl.serve.api.feedback import MAX_EDIT, feedback_app
from whorl.serve.completion_log import CompletionLog

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hello é"}], "max_tokens": 8, "seed": 1}
TEXT = {"model": "tiny", "prompt": "def add(a, b):\n    ret", "max_tokens": 8, "seed": 1}


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    events = CompletionLog.open(tmp_path_factory.mktemp("store"))
    with running(make_state(events=events)) as server:
        yield server


def events_of(server: Running, topic: str) -> list[Any]:
    assert server.api.events is not None
    found = [record.event() for record in server.api.events.log.replay(topic)]
    return sorted(found, key=lambda event: event.id)


def opened(server: Running, id: str) -> CompletionMade:
    assert server.api.events is not None
    event = next(event for event in events_of(server, COMPLETIONS) if event.id == id)
    assert "Hello" not in str(event.data) and "prompt" not in event.data
    data = server.api.events.keys.open(event)
    assert data is not None
    return CompletionMade.from_data(data)


def give(server: Running, token: str, kind: str = "like", **fields: Any) -> Any:
    return server.post("/v1/feedback", json={"token": token, "kind": kind, **fields})


def test_stored_completion_has_the_ids_of_the_engine(logged: Running) -> None:
    seen = dict[str, tuple[list[int], list[int]]]()
    engine = logged.api.worker.engine
    add, step = engine.add, engine.step

    def spy_add(request: Any) -> None:
        seen[request.id] = list(request.ids), []
        add(request)

    def spy_step() -> Any:
        deltas = step()
        for delta in deltas:
            seen[delta.request_id][1].extend(token.id for token in delta.tokens)
        return deltas

    engine.add, engine.step = spy_add, spy_step
    try:
        for path, body in (("chat/completions", CHAT), ("completions", TEXT)):
            seen.clear()
            answer = logged.post(f"/v1/{path}", json=body | {"store": True, "n": 2, "user": "ada"}).json()
            made = opened(logged, answer["id"])
            assert [(made.prompt_ids, choice.ids) for choice in made.choices] == list(seen.values())
            texts = [c["message"]["content"] if "message" in c else c["text"] for c in answer["choices"]]
            assert [choice.text for choice in made.choices] == texts
            assert (made.actor, made.model, made.settings["max_tokens"]) == ("ada", "tiny", 8)
            assert made.prompt == (
                [{"role": "user", "content": "Hello é"}] if path[:2] == "ch" else TEXT["prompt"]
            )
    finally:
        engine.add, engine.step = add, step


def test_a_stream_ends_with_the_token_of_its_completion(logged: Running) -> None:
    client = logged.client()
    for n in (1, 2):
        extra = {"store": True, "n": n, "stream": True, "extra_headers": {"x-whorl-actor": "phone"}}
        *before, last = client.chat.completions.create(**CHAT, **extra)
        assert not any(hasattr(chunk, "feedback") for chunk in before)
        made = opened(logged, last.id)
        texts = [
            "".join(c.choices[0].delta.content or "" for c in (*before, last) if c.choices[0].index == i)
            for i in range(n)
        ]
        assert [choice.text for choice in made.choices] == texts and made.actor == "phone"
        assert give(logged, last.feedback["token"], choice=n - 1).status_code == 202


def test_responses_are_kept_in_both_forms(logged: Running) -> None:
    client = logged.client()
    given = {"model": "tiny", "input": "Hello", "max_output_tokens": 8, "store": True}
    whole = client.responses.create(**given)
    *_, last = client.responses.create(**given, stream=True)
    for response in (whole, last.response):
        made = opened(logged, response.id)
        assert made.choices[0].text == response.output_text and made.actor == "anonymous"
        assert give(logged, response.feedback["token"]).status_code == 202


def test_without_consent_nothing_is_logged(logged: Running) -> None:
    before = events_of(logged, COMPLETIONS)
    for fields in ({}, {"store": False}):
        assert "feedback" not in logged.post("/v1/chat/completions", json=CHAT | fields).json()
    assert events_of(logged, COMPLETIONS) == before


def test_without_a_log_store_is_refused(server: Running) -> None:
    for path, body in (
        ("chat/completions", CHAT), ("completions", TEXT), ("responses", {"model": "tiny", "input": "Hi"})
    ):  # fmt: skip
        error = server.post(f"/v1/{path}", json=body | {"store": True})
        assert error.status_code == 400 and "--log" in error.json()["error"]["message"]
    assert server.post("/v1/feedback", json={}).status_code == 404


def test_a_click_is_one_event_however_often_it_is_sent(logged: Running) -> None:
    answer = logged.post("/v1/chat/completions", json=CHAT | {"store": True, "user": "bob"}).json()
    token, before = answer["feedback"]["token"], len(events_of(logged, FEEDBACK))
    found = [give(logged, token, id="click 1", time=time.time() - 3600).json() for _ in range(3)]
    found.append(give(logged, token, "edit", text="Better.", via="page").json())
    events = {event.id: event for event in events_of(logged, FEEDBACK)}
    assert len(events) == before + 2 and found[0] == found[1] == found[2]
    like, edit = events[found[0]["id"]], events[found[3]["id"]]
    assert (like.data["kind"], like.data["completion"], like.key) == ("like", answer["id"], "bob")
    assert 3590 < time.time() - like.time < 3700
    assert "Better" not in str(edit.data) and edit.data["via"] == "page"
    assert logged.api.events is not None
    assert (logged.api.events.keys.open(edit) or {})["text"] == "Better."


def test_two_answers_are_compared_by_their_tokens(logged: Running) -> None:
    tokens = [
        logged.post("/v1/chat/completions", json=CHAT | {
            "store": True, "user": "eve", "metadata": {"pair": "p1", "side": side},
        }).json()
        for side in ("left", "right")
    ]  # fmt: skip
    left, right = (answer["feedback"]["token"] for answer in tokens)
    assert [opened(logged, answer["id"]).side for answer in tokens] == ["left", "right"]
    assert give(logged, left, "better", over=right).status_code == 202
    stranger = issue_token(logged.api.events.secret, "c", 1, "stranger")  # type: ignore[union-attr]
    for fields, name in (
        ({"over": left}, "over"), ({}, "over"), ({"over": stranger}, "over"), ({"over": "x"}, "over"),
        ({"over": right, "over_choice": 1}, "over_choice"), ({"over": right, "text": "t"}, "text"),
    ):  # fmt: skip
        error = give(logged, left, "better", **fields)
        assert 400 <= error.status_code < 500 and error.json()["error"]["param"] == name, fields


def bad_clicks(secret: bytes) -> dict[str, tuple[dict[str, Any], int, str]]:
    good = issue_token(secret, "chatcmpl-1", 1, "ada")
    old, forged = issue_token(secret, "c", 1, "ada", expires=1), issue_token(bytes(32), "c", 1, "ada")
    year = 365 * 86400
    return {
        "forged": ({"token": forged}, 403, "token"),
        "expired": ({"token": old}, 410, "token"),
        "unknown": ({"token": "chatcmpl-1"}, 404, "token"),
        "kind": ({"token": good, "kind": "love"}, 400, "kind"),
        "choice": ({"token": good, "choice": 1}, 400, "choice"),
        "future": ({"token": good, "time": time.time() + 2 * year}, 400, "time"),
        "past": ({"token": good, "time": time.time() - 2 * year}, 400, "time"),
        "infinite": ({"token": good, "time": 1e300}, 400, "time"),
        "large": ({"token": good, "kind": "edit", "text": "x" * (MAX_EDIT + 1)}, 413, "text"),
        "wide": ({"token": good, "kind": "edit", "text": "語" * MAX_EDIT}, 413, "text"),
        "empty": ({"token": good, "kind": "edit"}, 400, "text"),
        "field": ({"token": good, "stars": 5}, 400, "stars"),
    }


def test_bad_clicks_are_refused_with_their_field(logged: Running) -> None:
    assert logged.api.events is not None
    before = events_of(logged, FEEDBACK)
    for name, (body, status, field) in bad_clicks(logged.api.events.secret).items():
        answer = logged.post("/v1/feedback", json={"kind": "like"} | body, timeout=60)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, field), name
    assert logged.post("/v1/feedback", content=b"x" * (5 << 20), timeout=60).status_code == 413
    assert events_of(logged, FEEDBACK) == before


def test_a_log_that_is_away_costs_no_answer(logged: Running) -> None:
    events = logged.api.events
    assert events is not None
    token, submit = issue_token(events.secret, "chatcmpl-1", 1, "ada"), events.log.submit

    problems = [LogUnavailableError("the disk is full"), LogUnavailableError("gone"), RuntimeError("a bug")]

    def away(topic: str, batch: Any) -> Future[Any]:
        failed: Future[Any] = Future()
        failed.set_exception(problems.pop(0))
        return failed

    events.log.submit = away  # type: ignore[method-assign]
    try:
        refused = give(logged, token, id="once")
        answers = [logged.post("/v1/chat/completions", json=CHAT | {"store": True}) for _ in range(2)]
    finally:
        events.log.submit = submit  # type: ignore[method-assign]
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    for answer in answers:
        assert answer.status_code == 200 and answer.json()["choices"] and "feedback" not in answer.json()
    assert "whorl_completions_unlogged_total 2.0" in logged.get("/metrics").text
    before = len(events_of(logged, FEEDBACK))
    assert give(logged, token, id="once").status_code == 202
    assert len(events_of(logged, FEEDBACK)) == before + 1


def test_feedback_needs_no_engine(tmp_path: Path) -> None:
    log, secret = open_log(f"sqlite:{tmp_path / 'events.db'}"), bytes(range(32))
    with TestClient(feedback_app(log, ActorKeys(tmp_path / "keys.db"), secret)) as client:
        body = {"token": issue_token(secret, "c", 1, "ada"), "kind": "like", "id": "x"}
        first = client.post("/v1/feedback", json=body)
        assert first.status_code == 202 and first.json() == client.post("/v1/feedback", json=body).json()
    assert [record.event().id for record in log.replay(FEEDBACK)] == [first.json()["id"]]
    log.close()
    code = "import sys, whorl.serve.api.feedback; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_an_api_key_names_the_actor(tmp_path: Path) -> None:
    from whorl.serve.middleware.auth import KeyFile

    key = KeyFile(tmp_path / "keys.json").add("alice", requests_per_minute=3)
    header = {"authorization": f"Bearer {key}"}
    events = CompletionLog.open(tmp_path)
    with running(make_state(events=events, key_file=tmp_path / "keys.json")) as server:
        for user, actor in ((None, "alice"), ("bob", "alice/bob")):
            body = CHAT | {"store": True} | ({"user": user} if user else {})
            answer = server.post("/v1/chat/completions", json=body, headers=header).json()
            assert opened(server, answer["id"]).actor == actor
        click = {"token": answer["feedback"]["token"], "kind": "like"}
        found = [server.post("/v1/feedback", json=click, headers=h).status_code for h in ({}, header, header)]
        assert found == [401, 202, 429]


def test_fields_of_other_uses_are_ignored_without_store(logged: Running) -> None:
    fields = {"user": "x" * 1000, "metadata": {"pair": "of shoes"}}
    assert logged.post("/v1/chat/completions", json=CHAT | fields).status_code == 200
    for field, value in fields.items():
        error = logged.post("/v1/chat/completions", json=CHAT | {"store": True, field: value})
        assert (error.status_code, error.json()["error"]["param"]) == (400, field)
