"""The load client against simulated servers with known delays, in virtual time."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.loadtest.virtual_clock import run

from whorl.errors import ConfigError, DataError
from whorl.loadtest.client import RequestRecord, SSEParser, Target, send_requests
from whorl.loadtest.runs import LoadTest, to_jsonl
from whorl.loadtest.runs import run_load_test as run_test
from whorl.loadtest.summary import LatencySLO, client_lagging, latency_stats, summarize
from whorl.loadtest.workload import LengthDistribution, LoadConfig, PromptPool, ScheduledRequest

Answer = Callable[[dict[str, Any]], httpx.Response]


class Stream(httpx.AsyncByteStream):
    """Pieces with delays in seconds; an exception among them is raised."""

    def __init__(self, *pieces: tuple[float, bytes | Exception]) -> None:
        self.pieces = pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for delay, piece in self.pieces:
            await asyncio.sleep(delay)
            if isinstance(piece, Exception):
                raise piece
            yield piece


def event(content: Any) -> bytes:
    return b"data: " + (content if isinstance(content, bytes) else json.dumps(content).encode()) + b"\n\n"


def token_stream(n: int, first: float = 0.5, later: float = 0.1, prompt: int = 3) -> Stream:
    """A stream of n tokens: the first after `first` seconds, the others every `later` seconds."""
    said = [{"choices": [{"text": "x", "finish_reason": "length" if i == n - 1 else None}]} for i in range(n)]
    pieces = [(first if i == 0 else later, event(one)) for i, one in enumerate(said)]
    usage = {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": n}}
    return Stream(*pieces, (0.0, event(usage) + event(b"[DONE]")))


def served(answer: Answer, delay: float = 0.0) -> httpx.MockTransport:
    async def handle(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(delay)
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        if request.url.path == "/tokenize":
            return httpx.Response(200, json={"tokens": list(json.loads(request.content)["prompt"].encode())})
        return answer(json.loads(request.content))

    return httpx.MockTransport(handle)


def healthy(body: dict[str, Any]) -> httpx.Response:
    return httpx.Response(200, stream=token_stream(body["max_tokens"]))


def run_requests(
    planned: list[ScheduledRequest], answer: Answer, target: Target | None = None, **options: Any
) -> list[RequestRecord]:
    async def work() -> list[RequestRecord]:
        async with httpx.AsyncClient(
            base_url="http://test", transport=served(answer), timeout=None
        ) as client:
            return await send_requests(planned, target or Target("m"), client, **options)

    return run(work())


def planned_requests(*times: float, tokens: int = 4) -> list[ScheduledRequest]:
    return [ScheduledRequest(n, at, (1, 2, 3), tokens) for n, at in enumerate(times)]


def test_record_times_match_stream_events() -> None:
    (record,) = run_requests(planned_requests(0.0, tokens=5), healthy)
    assert record.error is None and record.finish_reason == "length"
    assert record.ttft == pytest.approx(0.5) and record.tpot == pytest.approx(0.1)
    assert record.gaps == pytest.approx([0.1] * 4) and record.latency == pytest.approx(0.9)
    assert (record.prompt_tokens, record.output_tokens) == (3, 5)


def test_open_loop_sends_on_schedule() -> None:
    records = run_requests(planned_requests(0.0, 0.2, 0.25, 3.0), healthy)
    assert [r.sent for r in records] == pytest.approx([0.0, 0.2, 0.25, 3.0])
    assert [r.latency for r in records] == pytest.approx([0.8] * 4)


def test_closed_loop_waits_for_responses() -> None:
    records = run_requests(planned_requests(*[0.0] * 5), healthy, concurrency=2)
    assert [r.number for r in records] == list(range(5))
    assert [r.sent for r in records] == pytest.approx([0.0, 0.0, 0.8, 0.8, 1.6])
    assert [r.lag for r in records] == [0.0] * 5


def test_latency_counts_from_scheduled_time() -> None:
    def stalls(body: dict[str, Any]) -> httpx.Response:
        loop = asyncio.get_running_loop()
        if loop.time() < 0.05:  # the client process stalls during the first request
            loop.call_later(0.1, lambda: setattr(loop, "moment", loop.time() + 2.0))
        return healthy(body)

    records = run_requests(planned_requests(0.0, 0.3), stalls)
    assert records[1].lag == pytest.approx(1.8, abs=0.01)  # scheduled at 0.3, resumed at 2.1
    assert records[1].ttft == pytest.approx(0.5 + records[1].lag)
    assert client_lagging(summarize(records))
    assert not client_lagging(summarize(records[:1]))


@given(st.data())
def test_sse_parser_is_independent_of_chunk_boundaries(data: st.DataObject) -> None:
    texts = data.draw(
        st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"])), max_size=6)
    )
    end = data.draw(st.sampled_from([b"\n", b"\r\n"]))
    whole = b"".join(
        b": a comment" + end + b"event: x" + end + b"data: " + text.encode() + end + end for text in texts
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    events, found = SSEParser(), []
    for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        found += events.feed(whole[a:b])
    assert found == texts


def test_sse_parser_joins_multiline_events() -> None:
    assert SSEParser().feed(b"data: a\ndata:b\n\n") == ["a\nb"]


FAILURES: dict[str, Callable[[], httpx.Response]] = {
    "http 429": lambda: httpx.Response(429, json={"error": {"message": "slow down", "code": None}}),
    "http 500": lambda: httpx.Response(500, text="oh"),
    "broken": lambda: httpx.Response(200, stream=Stream((0.1, event({"choices": [{"text": "x"}]})))),
    "error event": lambda: httpx.Response(200, stream=Stream((0.1, event({"error": {"message": "no"}})))),
    "unreadable": lambda: httpx.Response(200, stream=Stream((0.1, event(b"{")))),
    "timeout": lambda: httpx.Response(200, stream=token_stream(4, first=99.0)),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_failures_become_records_with_kind(kind: str) -> None:
    records = run_requests(
        planned_requests(0.0, 0.1), lambda body: FAILURES[kind](), Target("m", timeout_seconds=20.0)
    )
    assert [r.error for r in records] == [kind, kind]
    found = summarize(records, slo=LatencySLO(ttft=100.0))
    assert found.errors == {kind: 2} and found.finished == 0 and found.slo_attainment == 0.0
    assert found.ttft is None and found.output_rate == 0.0


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (httpx.ConnectError("no"), "connect"),
        (httpx.ReadError("gone"), "broken"),
        (httpx.ReadTimeout("late"), "timeout"),
    ],
)
def test_connection_errors_become_records_with_kind(error: Exception, kind: str) -> None:
    (record,) = run_requests(
        planned_requests(0.0), lambda body: httpx.Response(200, stream=Stream((0.3, error)))
    )
    assert record.error == kind and record.finished == pytest.approx(0.3)


def test_target_builds_bodies_of_both_endpoints() -> None:
    text, ids = ScheduledRequest(0, 0.0, "hi", 7), ScheduledRequest(0, 0.0, (5, 6), 7)
    talk = ScheduledRequest(0, 0.0, (("system", "s"), ("user", "u")), 7)
    plain, chat = Target("m", extra_fields=(("ignore_eos", True),)), Target("m", "chat")
    body = json.loads(plain.body(ids))
    assert body == {
        "model": "m", "prompt": [5, 6], "max_tokens": 7, "stream": True, "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }  # fmt: skip
    assert json.loads(plain.body(text))["prompt"] == "hi"
    assert json.loads(chat.body(text))["messages"] == [{"role": "user", "content": "hi"}]
    assert json.loads(chat.body(talk))["messages"][0] == {"role": "system", "content": "s"}
    for target, wrong in ((plain, talk), (chat, ids)):
        with pytest.raises(ConfigError):
            target.body(wrong)


def test_role_event_is_not_an_arrival() -> None:
    said = [
        (0.1, event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})),
        (0.4, event({"choices": [{"delta": {"content": "x"}}]})),
        (0.2, event({"choices": [{"delta": {}, "finish_reason": "stop"}]})),
    ]
    (record,) = run_requests(
        [ScheduledRequest(0, 0.0, "hi", 9)],
        lambda body: httpx.Response(200, stream=Stream(*said)),
        Target("m", "chat"),
    )
    assert record.arrivals == pytest.approx([0.5]) and record.output_tokens == 1 and record.tpot is None


def test_summarize_known_records() -> None:
    def one(number: int, ttft: float, tokens: int, tpot: float) -> RequestRecord:
        times = [number + ttft + tpot * i for i in range(tokens)]
        return RequestRecord(number, float(number), number + 0.001, times, times[-1], 10, tokens, "stop")

    records = [one(0, 0.1, 11, 0.02), one(1, 0.3, 11, 0.02), one(2, 0.1, 11, 0.05), one(3, 0.2, 1, 0.0)]
    records.append(RequestRecord(4, 4.0, 4.0, finished=5.0, error="timeout"))
    found = summarize(records, offered_rate=1.0, slo=LatencySLO(0.25, 0.03), cost_per_hour=3.6)
    assert (found.requests, found.finished, found.errors, found.seconds) == (5, 4, {"timeout": 1}, 5.0)
    assert found.output_rate == pytest.approx(34 / 5) and found.request_rate == pytest.approx(0.8)
    assert found.slo_attainment == pytest.approx(2 / 5) and found.goodput == pytest.approx(
        2 / 5
    )  # the first and the fourth
    assert found.output_cost == pytest.approx(1e6 * 3.6 * 5 / 3600 / 34)
    assert found.total_cost == pytest.approx(1e6 * 3.6 * 5 / 3600 / 74)
    assert (
        found.ttft is not None
        and found.ttft.p50 == pytest.approx(0.15)
        and found.ttft.maximum == pytest.approx(0.3)
    )
    assert found.itl is not None and found.itl.maximum == pytest.approx(0.05)
    assert json.loads(json.dumps(found.to_json()))["errors"] == {"timeout": 1}


@given(st.lists(st.floats(0, 100), min_size=1, max_size=50))
def test_latency_stats_percentiles_are_ordered(values: list[float]) -> None:
    found = latency_stats(values)
    assert found is not None
    ordered = [min(values), found.p50, found.p90, found.p95, found.p99, found.maximum]
    assert all(a <= b or math.isclose(a, b) for a, b in itertools.pairwise(ordered))


def test_run_load_test_measures_a_curve() -> None:
    loads = [
        LoadConfig(requests=6, rate=rate, output_lengths=LengthDistribution("fixed", (5,)))
        for rate in (1.0, 4.0)
    ]
    bodies: list[dict[str, Any]] = []

    def answer(body: dict[str, Any]) -> httpx.Response:
        bodies.append(body)
        return healthy(body)

    test = LoadTest(
        "http://test", "some text " * 50, loads, warmup_requests=2, slo=LatencySLO(1.0, 1.0), cost_per_hour=1.0,
    )  # fmt: skip
    found = run(run_test(test, transport=served(answer)))
    assert [load.name for load in found] == ["1/s", "4/s"]
    assert all(load.summary.finished == 6 and load.summary.slo_attainment == 1.0 for load in found)
    assert found[1].summary.seconds < found[0].summary.seconds
    assert len(bodies) == 14 and all(isinstance(i, int) for i in bodies[0]["prompt"])
    prompts = [tuple(body["prompt"]) for body in bodies[2:]]
    assert len(set(prompts[:6]) & set(prompts[6:])) == 0  # each load has different prompts
    entries = [json.loads(line) for line in to_jsonl(found)]
    assert [entry["kind"] for entry in entries] == (["request"] * 6 + ["load"]) * 2


def test_run_load_test_without_tokenize_endpoint() -> None:
    bodies: list[dict[str, Any]] = []

    async def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/tokenize":
            return httpx.Response(404)
        bodies.append(json.loads(request.content))
        return healthy(bodies[-1])

    load = LoadConfig(requests=1, rate=1.0, prompt_lengths=LengthDistribution("fixed", (5,)))
    run(
        run_test(
            LoadTest("http://test", "abc" * 20, [load], model="m", warmup_requests=0),
            transport=httpx.MockTransport(handle),
        )
    )
    assert len(bodies[0]["prompt"]) == 20 and set(bodies[0]["prompt"]) == set("abc")


@pytest.mark.parametrize(
    "answer",
    [httpx.Response(200, json={"data": []}), httpx.Response(401, json={"error": {"message": "key?"}}), None],
)
def test_run_load_test_names_an_unusable_server(answer: httpx.Response | None) -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        if answer is None:
            raise httpx.ConnectError("refused")
        return answer

    with pytest.raises(DataError, match="test"):
        run(
            run_test(
                LoadTest("http://test", "x", [LoadConfig(rate=1.0)]), transport=httpx.MockTransport(handle)
            )
        )


def test_prompt_pool_units_per_token() -> None:
    assert PromptPool("abc").per_token == 4 and PromptPool((1, 2)).per_token == 1
