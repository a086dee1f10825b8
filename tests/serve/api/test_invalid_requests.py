"""What cannot be answered is refused, in OpenAI's shape, with the parameter's name; nothing of it reaches the engine."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import pytest
from tests.support.serve.live_server import api_of, running

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
TEXT: dict[str, Any] = {"model": "tiny", "prompt": "hi", "max_tokens": 2}


def refused(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    (only,) = answer.json().items()
    name, error = only
    assert name == "error" and error.keys() == {"message", "type", "param", "code"} and error["message"]
    return dict(error)


@pytest.mark.parametrize(
    ("change", "param"),
    [
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
    ],
)
def test_a_chat_s_wrong_parameter_is_named(server: Any, change: dict[str, Any], param: str | None) -> None:
    error = refused(httpx.post(f"{server.url}/v1/chat/completions", json=CHAT | change), 400)
    if param is not None:
        assert error["param"] == param
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("change", "param"),
    [
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
    ],
)
def test_a_completion_s_wrong_parameter_is_named(
    server: Any, change: dict[str, Any], param: str | None
) -> None:
    error = refused(httpx.post(f"{server.url}/v1/completions", json=TEXT | change), 400)
    if param is not None:
        assert error["param"] == param


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("responses", {"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ("responses", {"input": []}, None),
        ("responses", {"input": "word " * 1000}, "input"),
        ("embeddings", {"input": []}, "input"),
        ("embeddings", {"input": ["a", ""]}, "input"),
        ("embeddings", {"input": [10**6]}, "input"),
        ("embeddings", {"input": "a", "dimensions": 8}, "dimensions"),
    ],
)
def test_the_other_paths_name_parameters_too(
    server: Any, path: str, body: dict[str, Any], param: str | None
) -> None:
    error = refused(httpx.post(f"{server.url}/v1/{path}", json={"model": "tiny", **body}), 400)
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
def test_what_is_no_json_is_refused(server: Any, body: bytes) -> None:
    answer = httpx.post(
        f"{server.url}/v1/completions", content=body, headers={"content-type": "application/json"}
    )
    refused(answer, 400)


def test_json_must_call_itself_so(server: Any) -> None:
    """A web page elsewhere can make a browser send text, but not JSON without asking first."""
    answer = httpx.post(
        f"{server.url}/v1/completions", content=json.dumps(TEXT), headers={"content-type": "text/plain"}
    )
    refused(answer, 400)
    assert "access-control-allow-origin" not in answer.headers


def test_unknown_paths_and_methods(server: Any) -> None:
    refused(httpx.get(f"{server.url}/v1/nothing"), 404)
    refused(httpx.get(f"{server.url}/static/../app.py"), 404)
    refused(httpx.get(f"{server.url}/static/%2e%2e/app.py"), 404)
    refused(httpx.delete(f"{server.url}/v1/completions"), 405)


def test_an_unterminated_surrogate_in_a_stream_s_text_cannot_come_in(server: Any) -> None:
    answer = httpx.post(
        f"{server.url}/v1/completions", json=TEXT | {"prompt": "\U0001f642 ok", "stop": "\u00e9"}
    )
    assert answer.status_code == 200


def test_large_bodies_are_refused_whole_and_chunked() -> None:
    with running(api_of(max_body=2048)) as server:
        url = f"{server.url}/v1/completions"
        refused(httpx.post(url, json=TEXT | {"prompt": "x" * 3000}), 413)

        def chunks() -> Any:
            for _ in range(30):
                yield b"x" * 100

        headers = {"content-type": "application/json"}
        refused(httpx.post(url, content=chunks(), headers=headers), 413)
        assert httpx.post(url, json=TEXT).status_code == 200


def test_a_body_that_never_comes_is_not_waited_for() -> None:
    with (
        running(api_of(body_seconds=0.05)) as server,
        socket.create_connection(("127.0.0.1", server.port)) as s,
    ):
        s.settimeout(30)
        s.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
        assert b" 408 " in s.recv(100)


def test_other_names_for_this_machine_are_refused(server: Any) -> None:
    """A page at evil.example whose name is pointed at 127.0.0.1 may not ask."""
    refused(httpx.get(f"{server.url}/v1/models", headers={"host": "evil.example"}), 403)
    assert httpx.get(f"{server.url}/v1/models", headers={"host": "localhost:1"}).status_code == 200


def test_a_full_queue_says_when_to_come_back() -> None:
    with running(api_of(max_queue=4)) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json=TEXT | {"prompt": ["a", "b"], "n": 3})
        assert answer.status_code == 200  # alone it may be larger than the queue
        server.in_loop(lambda: setattr(server.api.worker, "submit", _never))
        server.in_loop(lambda: server.api.worker.streams.update({str(i): _Waits() for i in range(4)}))
        error = refused(full := httpx.post(f"{server.url}/v1/completions", json=TEXT), 503)
        assert error["code"] == "queue_full" and int(full.headers["retry-after"]) >= 1
        server.in_loop(server.api.worker.streams.clear)


class _Waits:
    first_token_time = 0.0


def _never(request: Any) -> Any:
    raise AssertionError("the engine was asked")
