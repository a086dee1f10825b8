"""A scripted server with the format of the API: it streams given tokens when the test releases them.

`set_output(...)` sets the next output; with `hold`, each token waits for `release(n)`. `requests` stores the requests. If a
client disconnects during a stream, `gone` is set at once, without timers.
"""

from __future__ import annotations

import json
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import whorl

PAGES = Path(whorl.__file__).parent / "serve" / "pages"
TYPES = {".html": "text/html; charset=utf-8", ".js": "text/javascript", ".css": "text/css"}
LIMIT = 300.0  # s: limit for a held token, so that a failed test ends
Failure = tuple[int, dict[str, Any], dict[str, str]]  # status, body, headers


@dataclass(frozen=True)
class Piece:
    """One token: bytes, log-probability, alternatives, and the text sent with it (None: its bytes)."""

    bytes: bytes
    logprob: float = -0.5
    alternatives: tuple[tuple[bytes, float], ...] = ()
    text: str | None = None

    def shown(self) -> str:
        return self.bytes.decode() if self.text is None else self.text


@dataclass
class Fake:
    """Scripted output and recorded requests."""

    url: str = ""
    pieces: list[Piece] = field(default_factory=list)
    finish: str = "stop"
    sources: list[dict[str, Any]] = field(default_factory=list)  # of the first chunk
    held: bool = False
    fail: Failure | None = None  # the next responses
    break_after: int | None = None  # tokens after which the connection ends
    error_after: int | None = None  # tokens after which the stream sends an error
    key: str | None = None
    models: list[dict[str, Any]] = field(default_factory=lambda: [{"id": "small", "whorl": {"chat": True}}])
    state: dict[str, Any] = field(default_factory=dict)
    requests: list[tuple[str, dict[str, Any], dict[str, str]]] = field(default_factory=list)
    polls: int = 0
    gone: threading.Event = field(default_factory=threading.Event)
    turns: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def set_output(self, *pieces: Piece | str | bytes, finish: str = "stop", hold: bool = False) -> None:
        raw = [p.encode() if isinstance(p, str) else p for p in pieces]
        self.pieces = [p if isinstance(p, Piece) else Piece(p) for p in raw]
        self.finish, self.held = finish, hold
        self.fail = self.break_after = self.error_after = None
        self.gone.clear()
        self.turns = threading.Semaphore(0)

    def release(self, n: int = 1) -> None:
        """Release n tokens."""
        self.turns.release(n)

    def bodies(self) -> list[dict[str, Any]]:
        return [body for _, body, _ in self.requests]


def _handler(fake: Fake) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def _send(self, status: int, body: bytes, kind: str, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            headers = {"Content-Type": kind, "Content-Length": str(len(body))} | (headers or {})
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def _json(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
            self._send(status, json.dumps(body).encode(), "application/json", headers)

        def _allowed(self) -> bool:
            if fake.key is None or self.headers.get("Authorization") == f"Bearer {fake.key}":
                return True
            self._json(401, {"error": {"message": "wrong key", "type": "authentication_error"}})
            return False

        def do_GET(self) -> None:
            path = self.path.split("?")[0]
            name = {"/": "chat.html", "/engine": "engine.html"}.get(path, path.removeprefix("/static/"))
            file = PAGES / name
            if path.startswith("/v1/") and not self._allowed():
                return
            if path == "/v1/models":
                self._json(200, {"object": "list", "data": fake.models})
            elif path == "/v1/engine/state":
                fake.polls += 1
                self._json(*(fake.fail or (200, fake.state, {})))
            elif "/" in name or not file.is_file():
                self._json(404, {})
            else:
                self._send(200, file.read_bytes(), TYPES[file.suffix])

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if not self._allowed():
                return
            headers = {name.lower(): value for name, value in self.headers.items()}
            fake.requests.append((self.path, body, headers))
            if fake.fail:
                self._json(*fake.fail)
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            try:
                for part in self._parts(self.path.endswith("chat/completions"), body):
                    data = part if isinstance(part, str) else json.dumps(part, ensure_ascii=False)
                    self.wfile.write(f"data: {data}\n\n".encode())
            except OSError:
                fake.gone.set()

        def _parts(self, chat: bool, body: dict[str, Any]) -> Iterator[dict[str, Any] | str]:
            beside = {"sources": fake.sources} if fake.sources else {}
            if chat:
                first = {"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}
                yield {"choices": [first], **beside}
            elif beside:
                yield {"choices": [{"index": 0, "text": "", "finish_reason": None}], **beside}
            for i, piece in enumerate(fake.pieces):
                if i == fake.break_after:
                    return
                if i == fake.error_after:
                    yield {"error": {"message": "out of pages", "type": "server_error"}}
                    return
                if fake.held:
                    self._wait()
                yield {"choices": [_choice(piece, chat, bool(body.get("logprobs")))]}
            last: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
            yield {"choices": [{"index": 0, **last, "finish_reason": fake.finish}]}
            if body.get("stream_options", {}).get("include_usage"):
                usage = {"prompt_tokens": 12, "completion_tokens": len(fake.pieces), "total_tokens": 12}
                yield {"choices": [], "usage": usage | {"prompt_tokens_details": {"cached_tokens": 8}}}
            yield "[DONE]"

        def _wait(self) -> None:
            """Wait until a token is released or the client disconnects."""
            turns, connection = fake.turns, self.connection
            for _ in range(int(LIMIT / 0.01)):
                if turns.acquire(timeout=0.01):
                    return
                if select.select([connection], [], [], 0)[0] and not connection.recv(1, socket.MSG_PEEK):
                    raise ConnectionResetError
            raise TimeoutError("this token was never released")

    return Handler


def _entry(token: bytes, logprob: float) -> dict[str, Any]:
    return {"token": token.decode(errors="replace"), "logprob": logprob, "bytes": list(token)}


def _escaped(token: bytes) -> str:
    """The completions format of a token; invalid UTF-8 as escaped bytes."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _choice(piece: Piece, chat: bool, logprobs: bool) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "finish_reason": None}
    if chat:
        choice["delta"] = {"content": piece.shown()}
        entry = _entry(piece.bytes, piece.logprob)
        entry["top_logprobs"] = [_entry(*alternative) for alternative in piece.alternatives]
        choice["logprobs"] = {"content": [entry]}
    else:
        choice["text"] = piece.shown()
        top = {_escaped(token): logprob for token, logprob in piece.alternatives}
        choice["logprobs"] = {"tokens": [_escaped(piece.bytes)], "token_logprobs": [piece.logprob]}
        choice["logprobs"] |= {"top_logprobs": [top], "text_offset": [0]}
    if not logprobs:
        choice["logprobs"] = None
    return choice


@contextmanager
def fake_server() -> Iterator[Fake]:
    """A scripted server on a free port."""
    fake = Fake()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(fake))
    server.daemon_threads = True
    fake.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        fake.release(10_000)
        server.shutdown()
        server.server_close()
        thread.join()
