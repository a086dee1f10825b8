"""Simulated raters against a server in memory: error rates, the favour of the left answer, retries."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter

import httpx
import pytest

from whorl.errors import ConfigError
from whorl.loop.known_preferences import faults, known_preference
from whorl.loop.simulated_raters import RaterConfig, ServerRefusedError, Simulation, compare_answers


class Server:
    """Answers with right or wrong brackets by the parity of the seed; the first attempt at each vote fails."""

    def __init__(self, keeps: bool = True) -> None:
        self.keeps, self.answers, self.votes, self.attempts = keeps, {}, {}, Counter()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        body = json.loads(request.content)
        if request.url.path == "/v1/feedback":
            self.attempts[body["id"]] += 1
            if self.attempts[body["id"]] == 1:
                return httpx.Response(503, headers={"retry-after": "0"})
            self.votes[body["id"]] = body
            return httpx.Response(202)
        assert body["store"] is True and request.headers["x-whorl-actor"].startswith("simulated-")
        good = body["prompt"][::-1].translate(str.maketrans("([{<", ")]}>"))
        token = f"t{len(self.answers)}"
        self.answers[token] = "good" if body["seed"] % 2 else "bad"
        made = {"choices": [{"text": good if body["seed"] % 2 else "x"}]}
        return httpx.Response(
            200, json=made | ({"feedback": {"token": token, "expires": 0}} if self.keeps else {})
        )


def simulate(monkeypatch, server: Server, **options) -> Simulation:
    client = httpx.AsyncClient
    transport = httpx.MockTransport(server)
    monkeypatch.setattr(
        httpx, "AsyncClient", lambda **given: client(transport=transport, base_url=given["base_url"])
    )
    session = Simulation("http://test/", RaterConfig("brackets", **options), lambda n: None)
    asyncio.run(session.run())
    return session


def test_votes_follow_the_preference_with_errors_and_are_retried(monkeypatch):
    server = Server()
    session = simulate(monkeypatch, server, raters=30, votes=400, seed=1)
    right = [server.answers[v["token"]] == "good" for v in server.votes.values() if v["kind"] == "better"]
    assert len(server.votes) == 400 and session.counts["retried"] == 400
    assert 0.74 < sum(right) / len(right) < 0.9 and len(right) > 150


def test_thumbs_alone(monkeypatch):
    server = Server()
    simulate(monkeypatch, server, votes=200, thumbs=True, wrong=0.0, random=0.0)
    kinds = {(v["kind"], server.answers[v["token"]]) for v in server.votes.values()}
    assert kinds == {("like", "good"), ("dislike", "bad")} and len(server.votes) == 200


def test_a_server_without_a_log_is_refused(monkeypatch):
    with pytest.raises(ServerRefusedError, match="without a feedback token"):
        simulate(monkeypatch, Server(keeps=False), votes=3)


def test_errors_favour_the_left_answer():
    rng, config = random.Random(0), RaterConfig("brackets")
    left = [compare_answers([1.0, 0.0], False, config, rng) for _ in range(4000)]
    right = [compare_answers([0.0, 1.0], False, config, rng) for _ in range(4000)]
    assert 0.10 < sum(left) / 4000 < 0.14 and 0.16 < 1 - sum(right) / 4000 < 0.20
    assert compare_answers([1.0, 1.0], False, config, rng) == 2


def test_known_preferences():
    assert (
        faults("([", "])") == 0
        and faults("([", ")]") == 2
        and faults("(", "") == 1
        and faults("(", "))") == 1
    )
    header = 'def f(x):\n    """Return x."""\n'
    assert known_preference("compiles").scores([header] * 2, ["    return x\n", "    return (\n"]) == [
        1.0,
        0.0,
    ]
    with pytest.raises(ConfigError, match="'longer'"):
        known_preference("longer")
