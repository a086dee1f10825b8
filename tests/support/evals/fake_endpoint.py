"""An OpenAI-compatible endpoint in this process, with faults on demand.

    with FakeEndpoint() as fake:
        fake.faults["/v1/completions"] = ["busy", "half"]         of the next answers, in order
        backend = EndpointBackend.open(fake.url, "fake")

A completion repeats the last word of its prompt, or is `reply(body)`.
The log-probability of a token is -1 / (1 + its id, or its length).
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from tests.support.evals.hostile_answers import HOSTILE


class FakeEndpoint:
    """See the top of this file. bodies: (path, body) of each POST. always: a fault of every answer."""

    def __init__(self, max_model_len: int | None = None, bos: str = "<s>") -> None:
        self.faults: dict[str, list[str]] = defaultdict(list)
        self.always = ""
        self.reply: Callable[[dict[str, Any]], str] | None = None
        self.bodies: list[tuple[str, dict[str, Any]]] = []
        self.max_model_len, self.bos = max_model_len, bos
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *arguments: object) -> None:
                pass

            def do_GET(self) -> None:
                card = {"id": "fake"} | ({"max_model_len": fake.max_model_len} if fake.max_model_len else {})
                if fake.always == "GET is a stream":
                    send(self, 200, b"data: [DONE]\n\n", content_type="text/event-stream")
                else:
                    send(self, 200, {"data": [card]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                fake.bodies.append((self.path, body))
                own = fake.faults[self.path]
                fault = own.pop(0) if own else fake.always
                if fault in HOSTILE:
                    HOSTILE[fault](self)
                elif not broken(self, fault):
                    answer(self, fake, body, fault)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def __enter__(self) -> FakeEndpoint:
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


def send(handler: BaseHTTPRequestHandler, status: int, content: Any, **headers: str) -> None:
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    handler.send_response(status)
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    sizes = {"content-type": "application/json", "content-length": str(len(raw))}
    for name, value in (sizes | given).items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(raw)


def broken(handler: BaseHTTPRequestHandler, fault: str) -> bool:
    """Send an answer without content; returns False for other faults."""
    if fault == "busy":
        send(handler, 429, {"error": {"message": "too many requests"}}, retry_after="0.01")
    elif fault == "down":
        send(handler, 503, b"overloaded")
    elif fault == "unknown model":
        send(handler, 404, {"error": {"message": "no model 'fake'"}})
    elif fault == "no key":
        send(handler, 401, {"error": {"message": "no access"}})
    elif fault == "too long":
        send(handler, 400, {"error": {"message": "the context is 5 tokens"}})
    elif fault == "hangs":
        time.sleep(1.0)
        handler.close_connection = True
    elif fault == "prose":
        send(handler, 200, b"<html>welcome</html>")
    elif fault == "truncated":
        handler.send_response(200)
        handler.send_header("content-length", "1000")
        handler.end_headers()
        handler.wfile.write(b'{"choices": [')
        handler.close_connection = True
    elif fault == "error event":
        send(
            handler,
            200,
            b'data: {"error": {"message": "engine failed"}}\n\n',
            content_type="text/event-stream",
        )
    else:
        return False
    return True


def answer(handler: BaseHTTPRequestHandler, fake: FakeEndpoint, body: dict[str, Any], fault: str) -> None:
    head = {"id": "1", "model": "other" if fault == "other model" else body["model"]}
    if body.get("echo"):
        found = ["?"] if fault == "other form" else echo(fake, body, fault)
        usage = {"usage": {"prompt_tokens": 99}} if fault == "few tokens" else {}
        send(handler, 200, {**head, **usage, "choices": [{"index": 0, "text": "", "logprobs": found}]})
        return
    chat = "messages" in body
    prompt = body["messages"][-1]["content"] if chat else body["prompt"]
    text = prompt.split()[-1] if fake.reply is None else fake.reply(body)
    parts = [text[:1], text[1:]]
    events = [
        {**head, "choices": [{"index": 0, "delta": {"content": p}} if chat else {"index": 0, "text": p}]}
        for p in parts
    ]
    finish = {"limit": "length", "filtered": "content_filter"}.get(fault, "stop")
    events.append({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    if fault == "half":
        events = events[:1]
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    if fault != "no finish":
        lines += [] if fault == "half" else ["data: [DONE]\n\n"]
    else:
        lines = [*lines[:-1], "data: [DONE]\n\n"]
    send(handler, 200, "".join(lines).encode(), content_type="text/event-stream")


def echo(fake: FakeEndpoint, body: dict[str, Any], fault: str) -> dict[str, Any] | None:
    if fault == "no logprobs":
        return None
    prompt = body["prompt"]
    if isinstance(prompt, list):
        tokens, values = [f"t{i}" for i in prompt], [-1 / (1 + i) for i in prompt]
    else:
        tokens = [fake.bos] * bool(fake.bos) + re.findall(r"\s*[^\s.]+|\s*\.|\s+$", prompt)
        values = [-1 / (1 + len(t)) for t in tokens]
    scores: list[float | None] = [None, *values[1:], -0.5]
    if fault == "nan":
        scores[-2] = float("nan")
    best = [None if p is None else {"x": min(0.0, p + 0.1 * (k % 2)), "y": p} for k, p in enumerate(scores)]
    return {
        "tokens": [*tokens, " and"],
        "token_logprobs": scores,
        "top_logprobs": None if fault == "no top" else best,
    }
