"""A hostile endpoint costs its items and no more: each is missing with a reason, in bounded time and memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.evals.fake_endpoint import FakeEndpoint

from whorl.errors import ConfigError
from whorl.evals.model import endpoint_client
from whorl.evals.model.endpoint_backend import EndpointBackend
from whorl.evals.model.requests import Completion, GenerateRequest, Missing, Response
from whorl.http.answers import MAX_ANSWER_BYTES
from whorl.loadtest.runs import LoadTest, run_load_test_sync
from whorl.loadtest.workload import LoadConfig

FAST: dict[str, Any] = {"timeout": 0.4, "deadline": 0.8, "backoff": 0.01, "max_retries": 1}
REASONS = {
    "deep": "lists and objects; at most", "deep in a few bytes": "no JSON", "deep and valid": "not accepted",
    "deep error": "status 400", "many lists": "lists and objects; at most",
    "surrogate": "surrogates not allowed", "huge number": "not accepted",
    "compressed": "compressed, although none was requested", "redirect": "status 307", "cookie": "status 400",
    "negative wait": "status 429", "nan wait": "status 429", "huge wait": "status 429",
    "worded wait": "status 503", "repeats the key": "unknown key ***",
    "large header": "the answer ended early", "slow header": "did not end in 0.8 s",
    "slow body": "did not end in 0.8 s", "slow stream": "did not end in 0.8 s",
    "endless body": "larger than 65,536 KiB", "endless line": "larger than 65,536 KiB",
}  # fmt: skip


@pytest.fixture
def fake() -> Iterator[FakeEndpoint]:
    with FakeEndpoint() as endpoint:
        yield endpoint


def answer(backend: EndpointBackend) -> Response:
    found: dict[int, Response] = {}
    backend.respond([GenerateRequest("say yes")], found.__setitem__)
    return found[0]


@pytest.mark.parametrize("fault", REASONS)
def test_hostile_answer_is_missing_and_the_run_goes_on(
    fake: FakeEndpoint, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret-key")
    monkeypatch.setattr(endpoint_client, "MAX_WAIT", 0.01)
    fields = FAST | ({"deadline": 20.0} if fault.startswith("endless") else {})
    backend = EndpointBackend.open(fake.url, "fake", **fields)
    fake.always = fault
    found = answer(backend)
    assert isinstance(found, Missing) and REASONS[fault] in found.reason and "secret" not in found.reason
    fake.always = ""
    assert answer(backend) == Completion("yes")
    assert not list(backend.client._client.cookies.jar)
    backend.client.close()


def test_deadline_is_of_all_attempts_together(fake: FakeEndpoint) -> None:
    backend = EndpointBackend.open(fake.url, "fake", timeout=0.2, deadline=1.0, backoff=0.01, max_retries=4)
    fake.always = "slow body"
    assert answer(backend) == Missing("timed out: the answer did not end in 1 s")
    patient = EndpointBackend.open(fake.url, "fake", timeout=0.4, deadline=0.1, max_retries=4)
    assert patient.client.deadline == 2.0, "each attempt of a silent endpoint has its timeout"


def test_memory_of_an_endless_answer_is_bounded(fake: FakeEndpoint) -> None:
    backend = EndpointBackend.open(fake.url, "fake", **FAST | {"deadline": 30.0})
    fake.always = "endless line"
    tracemalloc.start()
    assert isinstance(answer(backend), Missing)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * MAX_ANSWER_BYTES


@pytest.mark.parametrize("length", [-5, 0, True, 10**12, "many", None])
def test_stated_length_must_be_possible(fake: FakeEndpoint, length: Any) -> None:
    fake.max_model_len = length
    assert EndpointBackend.open(fake.url, "fake", **FAST).max_length is None


def test_endpoint_with_a_password_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"http://\*\*\*@host/v1 has a password"):
        EndpointBackend.open("http://me:hunter2@host/v1", "fake")


@pytest.mark.parametrize(
    "fault", ["deep", "many lists", "compressed", "slow header", "slow stream", "large header"]
)
def test_hostile_answer_is_an_error_of_a_load_test(fake: FakeEndpoint, fault: str) -> None:
    fake.always = fault
    loads = [LoadConfig(requests=2, concurrency=2, rate=None)]
    url = fake.url.removesuffix("/v1")
    test = LoadTest(url, [("say yes", 4)], loads, model="fake", timeout_seconds=0.5, warmup_requests=0)
    [result] = run_load_test_sync(test)
    assert [r.error in ("unreadable", "timeout", "broken") for r in result.records] == [True, True]
    fake.always = ""
    assert run_load_test_sync(test)[0].summary.finished == 2
