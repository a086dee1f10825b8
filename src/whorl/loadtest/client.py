"""Sends a schedule of requests to an OpenAI-compatible server and records the times.

    records = await send_requests(planned, Target(model), client)

All times are seconds of the event loop's clock since the start. Latencies count from the *scheduled* send time, not from
the actual one. Otherwise a stalled server or client would delay the sending, and the delay would vanish from the results
(coordinated omission). The delay of the sending is reported as `lag`: if it is large, the client is too slow for the load.

A stream is parsed event by event (`SSEParser`). An event with text counts as an arrival of tokens; the number of tokens
comes from the server's `usage`. Every failure is a record with an error kind: connect, timeout, http 429, error event,
broken (no finish reason), unreadable.

Tests run this in an event loop with a virtual clock against an in-memory transport, so times are exact.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import httpx

from whorl.errors import ConfigError, DataError, shorten
from whorl.http.answers import SSEParser, error_message, parse_answer, read_answer, read_message, read_pieces
from whorl.loadtest.workload import Prompt, PromptPool, ScheduledRequest

MAX_TOKENS = 1 << 32  # that a server may report of one request
QUESTION_SECONDS = 60.0  # for its models, or for the ids of a text
Endpoint = Literal["completions", "chat"]
T = TypeVar("T")


@dataclass(frozen=True)
class Target:
    """Destination of requests. extra_fields: added to every body."""

    model: str
    endpoint: Endpoint = "completions"
    extra_fields: tuple[tuple[str, Any], ...] = ()
    timeout_seconds: float = 600.0  # per request

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.endpoint == "chat" else "/v1/completions"

    def body(self, planned: ScheduledRequest) -> bytes:
        """Return the request as JSON.

        Raises:
            ConfigError: the endpoint does not support this kind of prompt.
        """
        content = {"model": self.model, "max_tokens": planned.max_tokens, "stream": True}
        content |= {"stream_options": {"include_usage": True}, **dict(self.extra_fields)}
        return json.dumps(content | self._prompt(planned.prompt)).encode()

    def _prompt(self, prompt: Prompt) -> dict[str, Any]:
        messages = isinstance(prompt, tuple) and isinstance(prompt[0], tuple)
        if self.endpoint == "completions":
            if messages:
                raise ConfigError("a prompt is a list of messages", expected="a text", do="use --chat")
            return {"prompt": prompt if isinstance(prompt, str) else list(prompt)}
        if isinstance(prompt, str):
            return {"messages": [{"role": "user", "content": prompt}]}
        if not messages:
            raise ConfigError("a prompt is token ids", expected="text or messages for the chat endpoint")
        return {"messages": [{"role": turn[0], "content": turn[1]} for turn in prompt]}  # type: ignore[index]


@dataclass
class RequestRecord:
    """The result of one request; times in seconds since the start.

    arrivals: times of events with text. error: the kind of failure, or None.
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
    error_message: str = ""  # message of the server

    @property
    def ttft(self) -> float | None:
        """Seconds from the scheduled time to the first token."""
        return self.arrivals[0] - self.scheduled if self.arrivals else None

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None with fewer than two tokens."""
        if self.output_tokens < 2 or not self.arrivals:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between events with text."""
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def latency(self) -> float:
        """Seconds from the scheduled time to the end."""
        return self.finished - self.scheduled

    @property
    def lag(self) -> float:
        """Seconds between the scheduled time and the actual sending."""
        return self.sent - self.scheduled


class _RequestError(Exception):
    """A failed request: error kind and the server's message."""

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
    """Send each request at its time, or with `concurrency` in flight; return the records in order.

    Raises:
        ConfigError: the endpoint does not support a prompt.
    """
    bodies = [target.body(request) for request in planned]  # encoded before the clock starts
    loop = asyncio.get_running_loop()
    start = loop.time()

    def now() -> float:
        return loop.time() - start

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
    for number, request in enumerate(planned):
        if (delay := request.send_time - now()) > 0:
            await asyncio.sleep(delay)
        tasks.append(asyncio.create_task(send(number, request.send_time)))
    return list(await asyncio.gather(*tasks))


async def _send(
    record: RequestRecord, body: bytes, target: Target, client: httpx.AsyncClient, now: Callable[[], float]
) -> None:
    """Send one request and fill its record."""
    try:
        async with asyncio.timeout(target.timeout_seconds):
            headers = {"content-type": "application/json", "accept": "text/event-stream"}
            async with client.stream("POST", target.path, content=body, headers=headers) as answer:
                if answer.status_code != 200:
                    raise _RequestError(
                        f"http {answer.status_code}", shorten(error_message(await read_message(answer)))
                    )
                await _read(record, answer, now)
    except _RequestError as failure:
        record.error, record.error_message = failure.kind, failure.message
    except (TimeoutError, httpx.TimeoutException) as error:
        record.error, record.error_message = "timeout", str(error)
    except httpx.ConnectError as error:
        record.error, record.error_message = "connect", str(error)
    except (httpx.HTTPError, httpx.StreamError) as error:
        record.error, record.error_message = "broken", str(error) or type(error).__name__
    except (
        ValueError,
        TypeError,
        AttributeError,
        ArithmeticError,
    ) as error:  # of another form than the API's
        record.error, record.error_message = "unreadable", shorten(str(error))
    record.finished = now()


async def _read(record: RequestRecord, answer: httpx.Response, now: Callable[[], float]) -> None:
    """Read a stream to its end. Raises _RequestError."""
    events, usage = SSEParser(), None
    async for piece in read_pieces(answer):
        moment = now()
        for data in events.feed(piece):
            if data == b"[DONE]":
                continue
            entry = parse_answer(data)
            if not isinstance(entry, dict):
                raise ValueError(f"an event is not a JSON object: {data[:80]!r}")
            if entry.get("error"):
                raise _RequestError("error event", shorten(error_message(data.decode(errors="replace"))))
            for choice in entry.get("choices") or ():
                if _has_output(choice):
                    record.arrivals.append(moment)
                record.finish_reason = choice.get("finish_reason") or record.finish_reason
            usage = entry.get("usage") or usage
    if record.finish_reason is None:
        raise _RequestError("broken", "the stream ended without a finish reason")
    if not record.arrivals:
        record.arrivals.append(now())  # the text was empty or held back by the server
    if usage is None:
        usage = {"completion_tokens": len(record.arrivals)}
    record.prompt_tokens, record.output_tokens = (
        _count(usage.get(name)) for name in ("prompt_tokens", "completion_tokens")
    )


def _count(value: Any) -> int:
    """Return a number of tokens. Raises ValueError for a number that none can be."""
    if not 0 <= (count := int(value or 0)) <= MAX_TOKENS:
        raise ValueError(f"{count:,} tokens")
    return count


def _has_output(choice: dict[str, Any]) -> bool:
    """Return whether the choice of an event contains sampled output."""
    delta = choice.get("delta") or {}
    return bool(
        choice.get("text") or any(delta.get(name) for name in ("content", "reasoning_content", "tool_calls"))
    )


async def first_model(client: httpx.AsyncClient) -> str:
    """Return the id of the first model of the server.

    Raises:
        DataError: no response, or not in the format of OpenAI's API.
    """

    async def request() -> str:
        async with client.stream("GET", "/v1/models") as answer:
            await _check_status(answer)
            return str(parse_answer(await read_answer(answer))["data"][0]["id"])

    return await _call_server(request, client)


async def tokenize_pool(client: httpx.AsyncClient, model: str, text: str) -> PromptPool:
    """Return a pool of the server's token ids of `text`, or of the text itself if the server has no /tokenize."""

    async def request() -> PromptPool:
        async with client.stream("POST", "/tokenize", json={"model": model, "prompt": text}) as answer:
            if answer.status_code in (404, 405, 501):
                return PromptPool(text)
            await _check_status(answer)
            return PromptPool(tuple(int(i) for i in parse_answer(await read_answer(answer))["tokens"]))

    return await _call_server(request, client)


async def _check_status(answer: httpx.Response) -> None:
    """Raise DataError if the status is not 200."""
    if answer.status_code != 200:
        message = f"{answer.status_code}, {shorten(error_message(await read_message(answer)))}"
        raise DataError(f"{answer.request.url} answered {message}", expected="200")


async def _call_server(request: Callable[[], Awaitable[T]], client: httpx.AsyncClient) -> T:
    try:
        async with asyncio.timeout(QUESTION_SECONDS):
            return await request()
    except (TimeoutError, httpx.HTTPError, httpx.InvalidURL) as error:
        raise DataError(
            f"{client.base_url} does not respond: {error or type(error).__name__}",
            expected="an OpenAI-compatible server",
            do="start one with `whorl serve MODEL`, or pass its address",
        ) from error
    except (ValueError, LookupError, TypeError, ArithmeticError) as error:
        raise DataError(
            f"{client.base_url} sent an unexpected response: {error!r}", expected="the format of OpenAI's API"
        ) from error
