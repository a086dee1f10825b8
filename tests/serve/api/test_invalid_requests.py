"""Invalid requests: errors in OpenAI's format with the parameter's name; none reaches the engine."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from tests.support.serve.live_server import make_state, running

from whorl.serve.api.response_formatting import StreamDecoder
from whorl.tokens.tokenizer import Tokenizer

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
TEXT: dict[str, Any] = {"model": "tiny", "prompt": "hi", "max_tokens": 2}
INPUT: dict[str, Any] = {"model": "tiny", "input": "x"}


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.json().keys() == {"error"}
    error: dict[str, Any] = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["message"]
    return error


# Path, field, and values of which each is an error of this field.
INVALID_VALUES: list[tuple[str, str, list[Any]]] = [
    ("chat/completions", "temperature", [-0.1, "warm", "1"]),
    ("chat/completions", "top_p", [0]),
    ("chat/completions", "n", [0, 10**6, 1.5, True]),
    ("chat/completions", "max_tokens", [0, 10**6, 10**30]),
    ("chat/completions", "logit_bias", [{"x": 1}, {"5000": 1}, {"5": 101}]),
    ("chat/completions", "stop", [""]),
    ("chat/completions", "seed", ["x"]),
    ("chat/completions", "frequency_penalty", [3]),
    ("chat/completions", "messages", [[]]),
    ("chat/completions", "functions", [[]]),
    ("chat/completions", "store", [True, "yes"]),
    ("completions", "store", [True]),
    ("chat/completions", "chat_template_kwargs", [{"messages": []}]),
    ("completions", "prompt", [[], [[]], [10**6], "word " * 1000]),
    ("completions", "suffix", ["x"]),
    ("completions", "max_tokens", [0]),
    ("responses", "previous_response_id", ["resp_1"]),
    ("responses", "input", ["word " * 1000]),
    ("embeddings", "input", [[], ["a", ""], [10**6]]),
    ("embeddings", "dimensions", [0, "8", 1 << 20]),
]
# Path, changed fields, and the parameter that the error names (None: any).
INVALID_FIELDS: list[tuple[str, dict[str, Any], str | None]] = [
    ("chat/completions", {"stop": ["a", ""]}, "stop.1"),
    ("chat/completions", {"top_logprobs": 50, "logprobs": True}, "top_logprobs"),
    ("chat/completions", {"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages.0.content",
    ),
    ("chat/completions", {"response_format": {"type": "xml"}}, "response_format.type"),
    ("chat/completions", {"max_completion_tokens": 3}, "max_tokens"),
    ("completions", {"prompt": ["a", 1]}, None),
    ("completions", {"best_of": 1, "n": 2}, "best_of"),
    ("completions", {"best_of": 3, "stream": True}, "best_of"),
    ("completions", {"prompt": ["a"] * 100, "n": 2}, "n"),
    ("completions", {"stream_options": {"include_usage": True}}, None),
    ("responses", {"input": []}, None),
]
INVALID_FIELDS += [(path, {name: value}, name) for path, name, values in INVALID_VALUES for value in values]
VALID = {"chat/completions": CHAT, "completions": TEXT, "responses": INPUT, "embeddings": INPUT}


KINDS = [("image_url", "images"), ("input_image", "images"), ("input_audio", "audio")]
POST_ROUTES = [*(f"/v1/{path}" for path in VALID), "/tokenize", "/detokenize"]
FORM = "application/x-www-form-urlencoded"


@pytest.mark.parametrize(("kind", "word"), KINDS)
def test_image_in_a_message_names_the_message(server: Any, kind: str, word: str) -> None:
    part = {"type": kind, kind: {"url": "data:image/png;base64,AA"}}
    message = {"role": "user", "content": [{"type": "text", "text": "what is it?"}, part]}
    for path, name in (("chat/completions", "messages"), ("responses", "input")):
        change = {name: [{"role": "user", "content": "a"}, message]}
        error = error_of(server.post(f"/v1/{path}", json=VALID[path] | change), 400)
        assert error["param"] == f"{name}.1.content" and f"this model reads no {word}" in error["message"]


@pytest.mark.parametrize("path", POST_ROUTES)
@pytest.mark.parametrize("kind", [FORM, "text/plain; charset=utf-8"])
def test_body_without_json_content_type_names_the_header(server: Any, path: str, kind: str) -> None:
    """`curl -d` sends the content type of a form."""
    headers = {"content-type": kind}
    error = error_of(server.post(path, content=json.dumps(CHAT), headers=headers), 400)
    assert "content-type: application/json" in error["message"] and kind.partition(";")[0] in error["message"]
    assert "content-type" not in error_of(server.post(path, json=[]), 400)["message"]


@pytest.mark.parametrize(("path", "change", "param"), INVALID_FIELDS)
def test_error_names_the_parameter(server: Any, path: str, change: Any, param: str | None) -> None:
    error = error_of(server.post(f"/v1/{path}", json=VALID[path] | change), 400)
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] == param


NOT_AN_OBJECT = [b"", b"{", b"null", b"[1]", b'"text"', b"\x00", b"[" * 100_000]
NESTED = b"[" * 500 + b"]" * 500
PROMPTS = [b'"\xff\xfe"', b'"\\ud800"', b'"x", "temperature": NaN', b'"x", "n": 1e400', NESTED]
BODIES = [*NOT_AN_OBJECT, *(b'{"model": "tiny", "prompt": ' + prompt + b"}" for prompt in PROMPTS)]


@pytest.mark.parametrize("body", BODIES)
def test_invalid_json_is_rejected(server: Any, body: bytes) -> None:
    answer = server.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    error_of(answer, 400)


# Path and changed fields, for a value of the client.
ECHOES: list[tuple[str, Callable[[str], dict[str, Any]]]] = [
    ("completions", lambda x: {"model": x}),
    ("completions", lambda x: {x: 1}),
    ("completions", lambda x: {"stop": [x, {x: x}]}),
    ("completions", lambda x: {"logit_bias": {x: 1}}),
    ("completions", lambda x: {"regex": f"({x}"}),
    ("completions", lambda x: {"grammar": f"start: {x}"}),
    ("chat/completions", lambda x: {"tools": [], "tool_choice": {"type": "function", "function": {"name": x}}}),
    ("chat/completions", lambda x: {"messages": [{"role": x, "content": x}]}),
    (
        "chat/completions",
        lambda x: {"response_format": {"type": "json_schema", "json_schema": {"name": x, "schema": {"type": x}}}},
    ),
    ("responses", lambda x: {"text": {"format": {"type": "json_schema", "name": x, "schema": {"$ref": x}}}}),
    ("embeddings", lambda x: {"model": x}),
]  # fmt: skip


@pytest.mark.parametrize("length", [250, 5000])
def test_errors_echo_at_most_200_characters(server: Any, length: int) -> None:
    value = "x" * length
    requests = [server.post(f"/v1/{path}", json=VALID[path] | change(value)) for path, change in ECHOES]
    for path in (f"/v1/models/{value}", f"/static/{value}", f"/{value}"):
        requests.append(server.get(path))
    requests.append(server.get("/v1/models", headers={"host": value}))
    for answer in requests:
        assert 400 <= answer.status_code < 500 and "x" * 201 not in answer.text, answer.text[:500]


def test_grammar_that_fails_during_generation_is_a_400(server: Any) -> None:
    """Its state grows with the text, beyond the limits; only the request is at fault, so clients must not retry."""
    likely = str(server.api.models[0].tokenizer.token_bytes.index(b"x"))
    fields = {"regex": "((x{1,100}y?){1,100}z?){1,100}", "max_tokens": 40, "logit_bias": {likely: 100}}
    error = error_of(server.post("/v1/completions", json=TEXT | fields), 400)
    assert error["param"] == "regex" and error["code"] == "grammar_failed"


def test_json_requires_its_content_type(server: Any) -> None:
    """A cross-origin page can send text without a preflight request, but not JSON."""
    answer = server.post("/v1/completions", content=json.dumps(TEXT), headers={"content-type": "text/plain"})
    error_of(answer, 400)
    assert "access-control-allow-origin" not in answer.headers


def test_unknown_paths_and_methods_are_rejected(server: Any) -> None:
    error_of(server.get("/v1/nothing"), 404)
    error_of(server.get("/static/../app.py"), 404)  # the client sends /app.py
    error_of(server.get(f"/static/{'x' * 5000}.js"), 404)
    for path in ("/static/%2e%2e/app.py", "/static/x%00.js", "/health/%2e%2e/metrics", "//v1/models"):
        assert error_of(server.get(path), 400)["code"] == "invalid_path"
    error_of(httpx.delete(f"{server.url}/v1/completions"), 405)


def test_head_is_answered_as_get_without_a_body(server: Any) -> None:
    for path in ("/", "/health", "/v1/models", "/metrics", "/engine"):
        head, get = httpx.head(server.url + path), server.get(path)
        assert (head.status_code, head.content) == (200, b""), path
        assert head.headers["content-type"] == get.headers["content-type"]
    assert httpx.head(f"{server.url}/v1/completions").status_code == 405
    assert server.get("/health").status_code == 200


def test_compressed_body_is_refused(server: Any) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    content = gzip.compress(json.dumps(TEXT).encode())
    answer = server.post("/v1/completions", content=content, headers=headers)
    assert error_of(answer, 415)["code"] == "unsupported_encoding"


@pytest.mark.parametrize("target", ["http://localhost/v1/models", "*", "/health/../v1/models"])
def test_target_of_another_form_is_refused(server: Any, target: str) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as s:
        s.sendall(f"GET {target} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        assert s.recv(100).startswith(b"HTTP/1.1 400 ")


class Panic(BaseException):
    """As pyo3's PanicException, which is no Exception."""


def test_panic_of_a_library_is_a_json_error(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def panic(*_: Any) -> Any:
        raise Panic("retry limit")

    monkeypatch.setattr(Tokenizer, "encode_to_list", panic)
    monkeypatch.setattr(Tokenizer, "encode_prompt", panic)
    for n in (1, 20_000):  # in the event loop, and in a thread
        for path, field in (("/tokenize", "prompt"), ("/v1/embeddings", "input")):
            answer = server.post(path, json={"model": "tiny", field: "x" * n})
            assert error_of(answer, 500)["code"] == "internal_error"
            assert "retry limit" not in answer.text
    monkeypatch.undo()
    monkeypatch.setattr(StreamDecoder, "next", panic)
    answer = server.post("/v1/completions", json=TEXT | {"stream": True})
    assert answer.status_code == 200 and '"internal_error"' in answer.text
    monkeypatch.undo()
    assert server.post("/v1/completions", json=TEXT).status_code == 200


def test_completion_accepts_emoji_and_unicode_stop(server: Any) -> None:
    answer = server.post("/v1/completions", json=TEXT | {"prompt": "\U0001f642 ok", "stop": "\u00e9"})
    assert answer.status_code == 200


def test_body_over_limit_is_rejected_full_and_chunked() -> None:
    with running(make_state(max_body=2048)) as server:
        error_of(server.post("/v1/completions", json=TEXT | {"prompt": "x" * 3000}), 413)
        chunks, headers = (b"x" * 100 for _ in range(30)), {"content-type": "application/json"}
        error_of(server.post("/v1/completions", content=chunks, headers=headers), 413)
        assert server.post("/v1/completions", json=TEXT).status_code == 200


def test_body_timeout_returns_408() -> None:
    with running(make_state(body_seconds=0.05)) as server:
        s = socket.create_connection(("127.0.0.1", server.port), timeout=30)
        s.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
        assert b" 408 " in s.recv(100)
        s.close()


def test_local_server_rejects_foreign_host_header(server: Any) -> None:
    """DNS rebinding: evil.example resolves to 127.0.0.1."""
    error_of(server.get("/v1/models", headers={"host": "evil.example"}), 403)
    assert server.get("/v1/models", headers={"host": "localhost:1"}).status_code == 200


def test_full_queue_returns_503_with_retry_after() -> None:
    with running(make_state(max_queue=4)) as server:
        answer = server.post("/v1/completions", json=TEXT | {"prompt": ["a", "b"], "n": 3})
        assert answer.status_code == 200  # a single request may exceed the queue limit
        worker = server.api.worker
        worker.submit = Mock(side_effect=AssertionError("the engine got a request"))  # type: ignore[method-assign]
        waiting = {str(i): Mock(first_token_time=0.0) for i in range(4)}
        server.in_loop(lambda: worker.streams.update(waiting))
        error = error_of(full := server.post("/v1/completions", json=TEXT), 503)
        assert error["code"] == "queue_full" and int(full.headers["retry-after"]) >= 1
        server.in_loop(worker.streams.clear)
