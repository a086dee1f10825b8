"""Invalid requests: errors in OpenAI's format with the parameter's name; none reaches the engine."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import pytest
from tests.support.serve.live_server import make_state, running

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
TEXT: dict[str, Any] = {"model": "tiny", "prompt": "hi", "max_tokens": 2}


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    (only,) = answer.json().items()
    name, error = only
    assert name == "error" and error.keys() == {"message", "type", "param", "code"} and error["message"]
    return dict(error)


CHAT_ERRORS: list[tuple[dict[str, Any], str | None]] = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "warm"}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 10**6}, "n"),
    ({"n": 1.5}, "n"),
    ({"n": True}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 10**6}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"5000": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop.1"),
    ({"seed": "x"}, "seed"),
    ({"frequency_penalty": 3}, "frequency_penalty"),
    ({"top_logprobs": 50, "logprobs": True}, "top_logprobs"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None),
    ({"functions": []}, "functions"),
    ({"store": True}, "store"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"max_completion_tokens": 3}, "max_tokens"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
]
COMPLETION_ERRORS: list[tuple[dict[str, Any], str | None]] = [
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [10**6]}, "prompt"),
    ({"prompt": ["a", 1]}, None),
    ({"prompt": "word " * 1000}, "prompt"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"best_of": 3, "stream": True}, "best_of"),
    ({"prompt": ["a"] * 100, "n": 2}, "n"),
    ({"suffix": "x"}, "suffix"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"stream_options": {"include_usage": True}}, None),
]
OTHER_ERRORS: list[tuple[str, dict[str, Any], str | None]] = [
    ("responses", {"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
    ("responses", {"input": []}, None),
    ("responses", {"input": "word " * 1000}, "input"),
    ("embeddings", {"input": []}, "input"),
    ("embeddings", {"input": ["a", ""]}, "input"),
    ("embeddings", {"input": [10**6]}, "input"),
    ("embeddings", {"input": "a", "dimensions": 8}, "dimensions"),
]
CASES = [
    *(("chat/completions", CHAT | change, param) for change, param in CHAT_ERRORS),
    *(("completions", TEXT | change, param) for change, param in COMPLETION_ERRORS),
    *((path, {"model": "tiny", **body}, param) for path, body, param in OTHER_ERRORS),
]


@pytest.mark.parametrize(("path", "body", "param"), CASES)
def test_error_names_the_parameter(server: Any, path: str, body: dict[str, Any], param: str | None) -> None:
    error = error_of(server.post(f"/v1/{path}", json=body), 400)
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] == param


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[1]",
        b'"text"',
        b'{"model": "tiny", "prompt": "\xff\xfe"}',
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b'{"model": "tiny", "prompt": "x", "temperature": NaN}',
        b'{"model": "tiny", "prompt": "x", "n": 1e400}',
        b'{"model": "tiny", "prompt": ' + b"[" * 500 + b"]" * 500 + b"}",
        b"[" * 100_000,
        b"\x00",
    ],
)
def test_invalid_json_is_rejected(server: Any, body: bytes) -> None:
    answer = server.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    error_of(answer, 400)


def test_json_requires_its_content_type(server: Any) -> None:
    """A cross-origin page can send text without a preflight request, but not JSON."""
    answer = server.post("/v1/completions", content=json.dumps(TEXT), headers={"content-type": "text/plain"})
    error_of(answer, 400)
    assert "access-control-allow-origin" not in answer.headers


def test_unknown_paths_and_methods_are_rejected(server: Any) -> None:
    error_of(server.get("/v1/nothing"), 404)
    error_of(server.get("/static/../app.py"), 404)
    error_of(server.get("/static/%2e%2e/app.py"), 404)
    error_of(httpx.delete(f"{server.url}/v1/completions"), 405)


def test_completion_accepts_emoji_and_unicode_stop(server: Any) -> None:
    answer = server.post("/v1/completions", json=TEXT | {"prompt": "\U0001f642 ok", "stop": "\u00e9"})
    assert answer.status_code == 200


def test_body_over_limit_is_rejected_full_and_chunked() -> None:
    with running(make_state(max_body=2048)) as server:
        url = f"{server.url}/v1/completions"
        error_of(httpx.post(url, json=TEXT | {"prompt": "x" * 3000}), 413)

        def chunks() -> Any:
            for _ in range(30):
                yield b"x" * 100

        headers = {"content-type": "application/json"}
        error_of(httpx.post(url, content=chunks(), headers=headers), 413)
        assert httpx.post(url, json=TEXT).status_code == 200


def test_body_timeout_returns_408() -> None:
    with (
        running(make_state(body_seconds=0.05)) as server,
        socket.create_connection(("127.0.0.1", server.port)) as s,
    ):
        s.settimeout(30)
        s.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
        assert b" 408 " in s.recv(100)


def test_local_server_rejects_foreign_host_header(server: Any) -> None:
    """DNS rebinding: evil.example resolves to 127.0.0.1."""
    error_of(server.get("/v1/models", headers={"host": "evil.example"}), 403)
    assert server.get("/v1/models", headers={"host": "localhost:1"}).status_code == 200


def test_full_queue_returns_503_with_retry_after() -> None:
    with running(make_state(max_queue=4)) as server:
        answer = server.post("/v1/completions", json=TEXT | {"prompt": ["a", "b"], "n": 3})
        assert answer.status_code == 200  # a single request may exceed the queue limit
        server.in_loop(lambda: setattr(server.api.worker, "submit", _reject_submit))
        server.in_loop(lambda: server.api.worker.streams.update({str(i): _WaitingStream() for i in range(4)}))
        error = error_of(full := server.post("/v1/completions", json=TEXT), 503)
        assert error["code"] == "queue_full" and int(full.headers["retry-after"]) >= 1
        server.in_loop(server.api.worker.streams.clear)


class _WaitingStream:
    first_token_time = 0.0


def _reject_submit(request: Any) -> Any:
    raise AssertionError("the engine got a request")
