"""Sends a planned load to an OpenAI-compatible server and notes when each thing happened.

    records = await drive(planned, Target(url, model), client)

Every moment is read from the event loop's clock, in seconds after the beginning. A request's latencies count from the time
it was *scheduled* for, not from when this client got round to sending it: were the server, or this process, to hold up the
sending, the delay would be the users' and not vanish from the figures (coordinated omission). How late the sending was
stands beside them, as `lag`; when it is not small, the client is too slow for the load and the figures say so.

A stream is read event by event (`Events`); an event that carries text counts as a moment at which tokens arrived, and how
many they were the server says itself in its `usage`. Whatever goes wrong is a record with an error of a kind, never a
missing record: connect, timeout, http 429, refused in the stream, broken (ended without a finish), unreadable.

Tests run all this in an event loop whose clock jumps from timer to timer, against a transport that answers from memory:
exact times, no waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import httpx

from whorl.errors import ConfigError, DataError
from whorl.loadtest.workload import Prompt, PromptPool, ScheduledRequest

Endpoint = Literal["completions", "chat"]
T = TypeVar("T")


@dataclass(frozen=True)
class Target:
    """Where requests go. extra: fields that every body has besides."""

    model: str
    endpoint: Endpoint = "completions"
    extra_fields: tuple[tuple[str, Any], ...] = ()
    timeout_seconds: float = 600.0  # seconds for one request

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.endpoint == "chat" else "/v1/completions"

    def body(self, planned: ScheduledRequest) -> bytes:
        """The request as JSON.

        Raises:
            ConfigError: a prompt that this endpoint does not take.
        """
        content = {"model": self.model, "max_tokens": planned.max_tokens, "stream": True}
        content |= {"stream_options": {"include_usage": True}, **dict(self.extra_fields)}
        return json.dumps(content | self._prompt(planned.prompt)).encode()

    def _prompt(self, prompt: Prompt) -> dict[str, Any]:
        messages = isinstance(prompt, tuple) and isinstance(prompt[0], tuple)
        if self.endpoint == "completions":
            if messages:
                raise ConfigError(
                    "a prompt is a conversation", expected="a text", do="ask for --endpoint chat"
                )
            return {"prompt": prompt if isinstance(prompt, str) else list(prompt)}
        if isinstance(prompt, str):
            return {"messages": [{"role": "user", "content": prompt}]}
        if not messages:
            raise ConfigError("a prompt is token ids", expected="text: a chat has no place for ids")
        return {"messages": [{"role": turn[0], "content": turn[1]} for turn in prompt]}  # type: ignore[index]


@dataclass
class RequestRecord:
    """What became of a request; moments in seconds after the beginning.

    arrivals: of each event that carried text. error: its kind, or None.
    """

    number: int
    scheduled: float
    sent: float
    arrivals: list[float] = field(default_factory=list)
    finished: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None
    error_message: str = ""  # the server's words about the error

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token, from the scheduled time."""
        return self.arrivals[0] - self.scheduled if self.arrivals else None

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first; None where there is none after it."""
        if self.output_tokens < 2 or not self.arrivals:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between events with text, as a reader sees them."""
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def latency(self) -> float:
        """Seconds to the end, from the scheduled time."""
        return self.finished - self.scheduled

    @property
    def lag(self) -> float:
        """Seconds by which it was sent too late."""
        return self.sent - self.scheduled


class SSEParser:
    """Server-sent events out of bytes in any pieces: `feed` returns the data of those that are complete."""

    def __init__(self) -> None:
        self._rest, self._data = b"", list[bytes]()

    def feed(self, data: bytes) -> list[str]:
        """Raises UnicodeDecodeError if an event is no UTF-8."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        found = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                found.append(b"\n".join(self._data).decode())
                self._data = []
        return found


class _RequestError(Exception):
    """An error of a kind, with the server's words."""

    def __init__(self, kind: str, message: str = "") -> None:
        super().__init__(kind)
        self.kind, self.message = kind, message


async def send_requests(
    planned: Sequence[ScheduledRequest],
    target: Target,
    client: httpx.AsyncClient,
    *,
    concurrency: int | None = None,
    on_done: Callable[[RequestRecord], None] = lambda record: None,
) -> list[RequestRecord]:
    """Sends all requests, each at its time, or `concurrency` at a time; returns their records in order.

    Raises:
        ConfigError: a prompt that the endpoint does not take.
    """
    bodies = [target.body(one) for one in planned]  # before the clock starts
    loop = asyncio.get_running_loop()
    began = loop.time()

    def now() -> float:
        return loop.time() - began

    async def send(number: int, scheduled: float | None) -> RequestRecord:
        moment = now()
        record = RequestRecord(planned[number].number, moment if scheduled is None else scheduled, moment)
        await _send(record, bodies[number], target, client, now)
        on_done(record)
        return record

    if concurrency is not None:
        records: dict[int, RequestRecord] = {}
        waiting: Iterator[int] = iter(range(len(planned)))

        async def caller() -> None:
            for number in waiting:
                records[number] = await send(number, None)

        await asyncio.gather(*(caller() for _ in range(min(concurrency, len(planned)))))
        return [records[number] for number in range(len(planned))]
    tasks = []
    for number, one in enumerate(planned):
        if (early := one.send_time - now()) > 0:
            await asyncio.sleep(early)
        tasks.append(asyncio.create_task(send(number, one.send_time)))
    return list(await asyncio.gather(*tasks))


async def _send(
    record: RequestRecord, body: bytes, target: Target, client: httpx.AsyncClient, now: Callable[[], float]
) -> None:
    """Sends one request and fills its record."""
    try:
        async with asyncio.timeout(target.timeout_seconds):
            headers = {"content-type": "application/json", "accept": "text/event-stream"}
            async with client.stream("POST", target.path, content=body, headers=headers) as answer:
                if answer.status_code != 200:
                    raise _RequestError(f"http {answer.status_code}", _error_message(await answer.aread()))
                await _read(record, answer, now)
    except _RequestError as refusal:
        record.error, record.error_message = refusal.kind, refusal.message
    except (TimeoutError, httpx.TimeoutException) as error:
        record.error, record.error_message = "timeout", str(error)
    except httpx.ConnectError as error:
        record.error, record.error_message = "connect", str(error)
    except (httpx.HTTPError, httpx.StreamError) as error:
        record.error, record.error_message = "broken", str(error) or type(error).__name__
    except ValueError as error:
        record.error, record.error_message = "unreadable", str(error)
    record.finished = now()


async def _read(record: RequestRecord, answer: httpx.Response, now: Callable[[], float]) -> None:
    """Reads a stream to its end. Raises _Refused."""
    events, counted = SSEParser(), None
    async for piece in answer.aiter_bytes():
        moment = now()
        for data in events.feed(piece):
            if data == "[DONE]":
                continue
            entry = json.loads(data)
            if not isinstance(entry, dict):
                raise ValueError(f"an event is no object: {data[:80]}")
            if entry.get("error"):
                raise _RequestError("refused in the stream", _error_message(data.encode()))
            for choice in entry.get("choices") or ():
                if _has_output(choice):
                    record.arrivals.append(moment)
                record.finish_reason = choice.get("finish_reason") or record.finish_reason
            counted = entry.get("usage") or counted
    if record.finish_reason is None:
        raise _RequestError("broken", "the stream ended before the answer did")
    if not record.arrivals:
        record.arrivals.append(now())  # all of its text was held back, or there was none
    if counted is None:
        counted = {"completion_tokens": len(record.arrivals)}
    record.prompt_tokens = int(counted.get("prompt_tokens") or 0)
    record.output_tokens = int(counted.get("completion_tokens") or 0)


def _has_output(choice: dict[str, Any]) -> bool:
    """Whether an event's choice brought something that was sampled."""
    delta = choice.get("delta") or {}
    return bool(
        choice.get("text") or any(delta.get(name) for name in ("content", "reasoning_content", "tool_calls"))
    )


def _error_message(body: bytes) -> str:
    """What an error's body says, in a line."""
    text = body.decode(errors="replace")
    with contextlib.suppress(ValueError, AttributeError):
        error = json.loads(text).get("error")
        text = str(error["message"] if isinstance(error, dict) and "message" in error else error or text)
    return " ".join(text.split())[:200]


async def first_model(client: httpx.AsyncClient) -> str:
    """The id of the first model that a server names.

    Raises:
        DataError: nobody answers, or not as such a server does.
    """

    async def ask() -> str:
        answer = await client.get("/v1/models")
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])

    return await _call_server(ask, client)


async def tokenize_pool(client: httpx.AsyncClient, model: str, text: str) -> PromptPool:
    """A pool of the server's own ids of `text`; of the text itself where it does not tokenise for others."""

    async def ask() -> PromptPool:
        answer = await client.post("/tokenize", json={"model": model, "prompt": text})
        if answer.status_code in (404, 405, 501):
            return PromptPool(text)
        answer.raise_for_status()
        return PromptPool(tuple(int(i) for i in answer.json()["tokens"]))

    return await _call_server(ask, client)


async def _call_server(ask: Callable[[], Awaitable[T]], client: httpx.AsyncClient) -> T:
    try:
        return await ask()
    except httpx.HTTPStatusError as error:
        said = f"{error.response.status_code}, {_error_message(error.response.content)}"
        raise DataError(f"{error.request.url} answered {said}", expected="200") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise DataError(
            f"{client.base_url} does not answer: {error or type(error).__name__}",
            expected="an OpenAI-compatible server",
            do="start one with `whorl serve MODEL`, or give its address",
        ) from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise DataError(
            f"{client.base_url} answered in another form: {error!r}", expected="that of OpenAI's API"
        ) from error
