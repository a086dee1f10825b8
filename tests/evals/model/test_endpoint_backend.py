"""Responses of endpoints: whole, retried, or missing with their reason; never a silent zero."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.evals.fake_endpoint import FakeEndpoint
from tests.support.evals.hf_folders import sentences, write_tokenizer

from whorl.errors import ConfigError
from whorl.evals.model import endpoint_client
from whorl.evals.model.endpoint_backend import EndpointBackend
from whorl.evals.model.endpoint_client import DEAD_AFTER
from whorl.evals.model.requests import (
    Completion,
    GenerateRequest,
    Missing,
    Request,
    Response,
    Score,
    ScoreRequest,
    TextRequest,
)
from whorl.evals.model.response_cache import CachedBackend, ResponseCache
from whorl.evals.model.windows import strided_windows
from whorl.tokens.hf_tokenizer import load_tokenizer
from whorl.tokens.token_encoder import TokenEncoder

COMPLETIONS = "/v1/completions"
FAST: dict[str, Any] = {"timeout": 0.3, "backoff": 0.01, "max_retries": 2}


@pytest.fixture
def fake() -> Iterator[FakeEndpoint]:
    with FakeEndpoint() as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path, "gpt2", sentences(100))
    return path


def answers(backend: Any, requests: Sequence[Request]) -> list[Response]:
    found: dict[int, Response] = {}
    backend.respond(requests, found.__setitem__)
    return [found[n] for n in range(len(requests))]


def open_fake(fake: FakeEndpoint, **fields: Any) -> EndpointBackend:
    return EndpointBackend.open(fake.url, "fake", **{**FAST, **fields})


def test_list_of_models_as_a_stream_is_ignored(fake: FakeEndpoint) -> None:
    fake.always = "GET is a stream"
    assert open_fake(fake).client.get("/models") is None


def test_streams_of_both_routes_are_read(fake: FakeEndpoint) -> None:
    chat = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "say yes"})
    backend = open_fake(fake, extra={"top_k": 5, "seed": None})
    requests = [GenerateRequest(f"word {n}", stop=("\n",), temperature=0.5) for n in range(40)]
    made = answers(backend, [*requests, GenerateRequest(chat, max_tokens=7)])
    assert made[:-1] == [Completion(str(n)) for n in range(40)] and made[-1] == Completion("yes")
    sent = dict(fake.bodies)
    plain, chat_body = sent[COMPLETIONS], sent["/v1/chat/completions"]
    assert (
        plain["stop"] == ["\n"]
        and plain["temperature"] == 0.5
        and plain["top_k"] == 5
        and "seed" not in plain
    )
    assert chat_body["messages"] == list(chat) and chat_body["max_tokens"] == 7 and "stop" not in chat_body


def test_page_as_error_is_shown_as_its_text() -> None:
    page = "<html><style>a {}</style>\n <h1>Not\n permitted</h1></html>"
    assert "status 401: Not permitted" in str(endpoint_client._status_fault(401, {}, page))
    with pytest.raises(endpoint_client.Fault, match="reports: no room"):  # json.loads reads UTF-16, too
        endpoint_client._parse_object('{"error": {"message": "no room"}}'.encode("utf-16"))


def test_refused_key_states_its_variable(fake: FakeEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, words in (("", "no key was sent: set SOME_KEY"), ("x", "the key of SOME_KEY was sent")):
        monkeypatch.setenv("SOME_KEY", key)
        fake.faults[COMPLETIONS] = ["no key"]
        [response] = answers(open_fake(fake, api_key_env="SOME_KEY"), [GenerateRequest("a")])
        assert response == Missing(f"status 401: no access ({words})")


def test_fewer_tokens_than_the_endpoint_counts_are_missing(fake: FakeEndpoint) -> None:
    fake.always = "few tokens"
    [response] = answers(open_fake(fake), [ScoreRequest("The red dog", " runs")])
    assert isinstance(response, Missing) and "do not spell the continuation" in response.reason


@pytest.mark.parametrize(
    "fault",
    ["busy", "down", "hangs", "prose", "truncated", "half", "no finish", "error event", "other model"],
)
def test_passing_fault_is_retried(fake: FakeEndpoint, fault: str) -> None:
    fake.faults[COMPLETIONS] = [fault, fault]
    assert answers(open_fake(fake), [GenerateRequest("say yes")]) == [Completion("yes")]
    assert len(fake.bodies) == 3


@pytest.mark.parametrize(
    ("fault", "reason", "attempts"),
    [
        ("busy", "status 429: too many requests; 3 attempts", 3),
        ("down", "status 503: overloaded; 3 attempts", 3),
        ("hangs", "timed out after 0.3 s without a byte (ReadTimeout); 3 attempts", 3),
        ("prose", "the answer is no JSON: '<html>welcome</html>'; 3 attempts", 3),
        ("truncated", "the answer ended early", 3),
        ("half", "the stream ended without [DONE]; 3 attempts", 3),
        ("no finish", "the answer ended without a finish reason; 3 attempts", 3),
        ("error event", "the endpoint reports: engine failed; 3 attempts", 3),
        ("other model", "answered as the model 'other', not 'fake'; 3 attempts", 3),
        ("unknown model", "status 404: no model 'fake'", 1),
        ("too long", "status 400: the context is 5 tokens", 1),
        ("filtered", "content filter withheld", 1),
    ],
)
def test_lasting_fault_is_missing_with_reason(
    fake: FakeEndpoint, fault: str, reason: str, attempts: int
) -> None:
    fake.always = fault
    [response] = answers(open_fake(fake), [GenerateRequest("say yes")])
    assert isinstance(response, Missing) and reason in response.reason
    assert len(fake.bodies) == attempts


def test_limit_of_tokens_is_kept_as_finish(fake: FakeEndpoint) -> None:
    fake.always = "limit"
    assert answers(open_fake(fake), [GenerateRequest("say yes")]) == [Completion("yes", finish="length")]


def test_dead_endpoint_is_given_up(fake: FakeEndpoint) -> None:
    fake.always = "down"
    made = answers(open_fake(fake, concurrency=2), [GenerateRequest(f"word {n}") for n in range(200)])
    assert all(isinstance(response, Missing) for response in made)
    assert len(fake.bodies) <= 3 * (DEAD_AFTER + 2)
    given_up = [r for r in made if isinstance(r, Missing) and "not requested" in r.reason]
    assert len(given_up) >= 200 - DEAD_AFTER - 2 and "status 503" in given_up[0].reason


def test_no_connection_is_missing() -> None:
    with FakeEndpoint() as fake:
        url = fake.url
    [response] = answers(EndpointBackend.open(url, "fake", **FAST), [GenerateRequest("say yes")])
    assert isinstance(response, Missing) and "no answer" in response.reason


def test_missing_responses_are_requested_again(fake: FakeEndpoint, tmp_path: Path) -> None:
    requests = [GenerateRequest(f"word {n}") for n in range(10)]
    fake.faults[COMPLETIONS] = ["too long"] * 3
    for expected in (10, 3, 0):
        before = len(fake.bodies)
        with ResponseCache(tmp_path / "cache.sqlite") as cache:
            made = answers(CachedBackend(open_fake(fake, concurrency=1), cache), requests)
        assert len(fake.bodies) - before == expected
    assert made == [Completion(str(n)) for n in range(10)]


def test_scores_by_ids_are_those_of_the_encoder(fake: FakeEndpoint, tokenizer: Path) -> None:
    fake.max_model_len = 24
    backend = open_fake(fake, tokenizer=tokenizer)
    assert backend.max_length == 24
    long = " ".join(sentences(9))
    pairs = [("The red dog ", "runs"), ("", "The cat"), (long, " the dog")]
    made = answers(backend, [ScoreRequest(*pair) for pair in pairs])
    for pair, response in zip(TokenEncoder(load_tokenizer(tokenizer)).encode_pairs(pairs), made, strict=True):
        assert isinstance(response, Score) and response.ids == tuple(pair.continuation)
        assert response.log_probs == tuple(-1 / (1 + i) for i in pair.continuation)
        n = min(len(pair.context), 23 - len(pair.continuation))
        assert (response.n_context, response.n_cut) == (n, len(pair.context) - n)
    assert all(len(body["prompt"]) <= 23 for _, body in fake.bodies)
    [missing, empty] = answers(backend, [ScoreRequest("a", long), ScoreRequest("a", "")])
    assert isinstance(missing, Missing) and "reads 23" in missing.reason
    assert isinstance(empty, Missing) and "no ids" in empty.reason


def test_text_is_scored_in_windows(fake: FakeEndpoint, tokenizer: Path) -> None:
    fake.max_model_len = 20
    backend, text = open_fake(fake, tokenizer=tokenizer), " ".join(sentences(9))
    [response] = answers(backend, [TextRequest(text, window=12, stride=5)])
    assert backend.encoder is not None and isinstance(response, Score)
    ids = backend.encoder.encode_document(text)
    assert response.ids == tuple(ids[1:]) and response.log_probs == tuple(-1 / (1 + i) for i in ids[1:])
    assert len(fake.bodies) == len(list(strided_windows(len(ids), 12, 5)))
    [whole] = answers(backend, [TextRequest(text)])
    assert isinstance(whole, Score) and whole.ids == response.ids
    assert max(len(body["prompt"]) for _, body in fake.bodies) == 19


def test_scores_without_tokenizer_use_the_endpoints_tokens(fake: FakeEndpoint) -> None:
    made = answers(
        open_fake(fake),
        [
            ScoreRequest("The red dog ", "runs far."),
            ScoreRequest("The red do", "g runs"),
            ScoreRequest("", "The cat"),
        ],
    )
    sizes = [(len(" runs"), len(" far"), 1), (len(" dog"), len(" runs")), (len("The"), len(" cat"))]
    for response, lengths in zip(made, sizes, strict=True):
        assert isinstance(response, Score) and response.ids == (-1,) * len(lengths)
        assert response.log_probs == tuple(-1 / (1 + n) for n in lengths)
    fake.bos = ""
    [first] = answers(open_fake(fake), [TextRequest("The cat")])
    assert isinstance(first, Missing) and "give the model's tokenizer" in first.reason


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("nan", "NaN"),
        ("no logprobs", "does not return the prompt's"),
        ("no top", "does not return the prompt's"),
        ("other form", "does not have the form of the API: AttributeError"),
    ],
)
def test_unusable_scores_are_missing(fake: FakeEndpoint, tokenizer: Path, fault: str, reason: str) -> None:
    fake.always = fault
    for backend in (open_fake(fake), open_fake(fake, tokenizer=tokenizer)):
        [response] = answers(backend, [ScoreRequest("The red dog", " runs")])
        assert isinstance(response, Missing) and reason in response.reason


def test_greedy_needs_the_most_likely_token(fake: FakeEndpoint) -> None:
    one, two = answers(open_fake(fake), [ScoreRequest("a", " b"), ScoreRequest("a b", " c")])
    assert isinstance(one, Score) and isinstance(two, Score) and one.greedy and not two.greedy


def test_address_follows_url_model_and_tokenizer(fake: FakeEndpoint, tokenizer: Path) -> None:
    address = open_fake(fake).address
    assert open_fake(fake, concurrency=3, timeout=1.0).address == address
    assert EndpointBackend.open(fake.url + "/", "fake", **FAST).address == address
    others = [
        EndpointBackend.open(fake.url, "fake-2", **FAST),
        open_fake(fake, tokenizer=tokenizer),
        open_fake(fake, extra={"top_k": 1}),
    ]
    assert len({address, *(other.address for other in others)}) == 4


def test_key_is_sent_and_url_is_checked(fake: FakeEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "secret")
    backend = open_fake(fake, api_key_env="SOME_KEY")
    assert (
        backend.client._client.headers["authorization"] == "Bearer secret" and "secret" not in backend.address
    )
    with pytest.raises(ConfigError, match="is not a URL"):
        EndpointBackend.open("localhost:8000", "fake")
