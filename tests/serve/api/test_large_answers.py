"""Large answers and bodies do not hold the event loop: they are made in pieces, outside of it."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import psutil
import pytest
from tests.support.router.harness import async_test
from tests.support.serve.live_server import Running, make_tokenizer

from whorl.engine.request import Delta, Request, Token
from whorl.http import server_process
from whorl.machine.malloc import trim_freed_memory
from whorl.serve.api.response_formatting import MAX_TOKENS_PER_DELTA, StreamDecoder, merge_streams
from whorl.serve.api.sse import JsonPieces, json_pieces

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "ignore_eos": True}
TEXT = {"model": "tiny", "prompt": "x", "ignore_eos": True}
MAX_HOLD = 0.25  # seconds of the event loop's own computing: a fault holds it for longer on any machine


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        {"a": []},
        {"a": {"b": [1.5, None, "é"]}},
        list(range(1000)),
        {"a": [{"b": [i] * 300} for i in range(600)]},
    ],
)
def test_pieces_are_the_whole_json(value: Any) -> None:
    assert b"".join(json_pieces(value)) == orjson.dumps(value)
    assert b"".join(json_pieces({"x": iter([value, 1]), "y": iter([])})) == orjson.dumps(
        {"x": [value, 1], "y": []}
    )


def loop_hold(server: Running, path: str, body: dict[str, Any], status: int = 200) -> float:
    """Return for how long the event loop computed at most while the server answered."""
    server.reset_watchdog()
    answer = server.post(
        path, content=orjson.dumps(body), headers={"content-type": "application/json"}, timeout=120
    )
    assert answer.status_code == status, answer.text[:500]
    assert answer.json()
    return server.api.watchdog.longest_own


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", TEXT | {"n": 8, "max_tokens": 250, "logprobs": 20}),
        ("/v1/chat/completions", CHAT | {"n": 8, "max_tokens": 250, "logprobs": True, "top_logprobs": 20}),
    ],
)
def test_large_answer_does_not_hold_the_event_loop(server: Running, path: str, body: dict[str, Any]) -> None:
    assert loop_hold(server, path, body) < MAX_HOLD


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", TEXT | {"prompt": [1] * 400_000}, 400),
        ("/v1/completions", TEXT | {"prompt": [[1]] * 900_000}, 400),
        ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": "a"}] * 12_000}, 400),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}] * 2_000}, 200),
        ("/tokenize", {"prompt": "word " * 100_000}, 200),
        ("/detokenize", {"tokens": [5] * 400_000}, 200),
        ("/v1/embeddings", {"model": "tiny", "input": [[1]] * 3_000}, 400),
    ],
)  # fmt: skip
def test_large_body_does_not_hold_the_event_loop(
    server: Running, path: str, body: dict[str, Any], status: int
) -> None:
    assert loop_hold(server, path, body, status) < MAX_HOLD


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", TEXT | {"n": 128, "max_tokens": 900, "logprobs": 20}, "max_tokens"),
        (
            "/v1/chat/completions",
            CHAT | {"n": 128, "logprobs": True, "top_logprobs": 20},
            "max_completion_tokens",
        ),
    ],
)
def test_number_of_log_probabilities_is_limited(
    server: Running, path: str, body: dict[str, Any], param: str
) -> None:
    answer = server.post(path, json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param
    assert "at most 262,144" in answer.text


class UnreadStream:
    """A stream whose whole output was not read until now."""

    def __init__(self, n: int) -> None:
        self.request = Request(id="a", ids=(1,))
        self.tokens = tuple(Token(i % 256, -1.0, -1.0) for i in range(n))

    async def next(self) -> Delta:
        return Delta("a", self.tokens, b"text", "length", prompt_log_probs=(-1.0,))


@pytest.mark.parametrize("n", [0, 1, MAX_TOKENS_PER_DELTA, 5 * MAX_TOKENS_PER_DELTA + 3])
@async_test
async def test_unread_output_is_returned_in_parts(n: int) -> None:
    def decoder() -> StreamDecoder:
        return StreamDecoder(UnreadStream(n), make_tokenizer())

    parts = [delta async for _, delta in merge_streams([decoder()])]
    whole = await decoder().read_all()
    assert all(len(part.tokens) <= MAX_TOKENS_PER_DELTA for part in parts)
    assert [t for part in parts for t in part.tokens] == whole.tokens and len(whole.tokens) == n
    assert "".join(part.text for part in parts) == whole.text == "text"
    assert [part.finish for part in parts] == [None] * (len(parts) - 1) + ["length"]
    assert [p for part in parts for p in part.prompt_log_probs] == [-1.0]


@async_test
async def test_stalled_reader_of_a_whole_answer_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    sent = []

    async def send(message: Any) -> None:
        sent.append(message["type"])
        if len(sent) > 2:
            await asyncio.Event().wait()

    async def receive() -> Any:
        await asyncio.Event().wait()

    await JsonPieces([b"a", b"b", b"c"], 0.05, {})({}, receive, send)
    assert sent == ["http.response.start", "http.response.body", "http.response.body"]
    assert "was dropped" in caplog.text


@async_test
async def test_freed_memory_is_returned_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_process, "TRIM_SECONDS", 0.02)
    process = psutil.Process()
    trim_freed_memory()  # of earlier tests, in which the blocks would find room without growth of the process
    trimming = asyncio.create_task(server_process.trim_memory())
    await asyncio.sleep(0.2)
    blocks = [bytes([i % 256]) * 8000 for i in range(20_000)]  # below the size of separate mappings
    full = process.memory_info().rss
    last = blocks[-1]  # in front of the end of the heap, where the allocator returns memory itself
    del blocks
    for _ in range(100):
        await asyncio.sleep(0.02)
        if process.memory_info().rss < full - (100 << 20):
            break
    trimming.cancel()
    assert last
    assert process.memory_info().rss < full - (100 << 20)
