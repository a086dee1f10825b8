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
from whorl.http.answers import SSEParser
from whorl.loadtest.client import RequestRecord, Target, send_requests
from whorl.loadtest.runs import LoadResult, LoadTest, run_load_test, to_jsonl
from whorl.loadtest.summary import LatencySLO, client_lagging, latency_stats, summarize
from whorl.loadtest.workload import LengthDistribution, LoadConfig, ScheduledRequest

Body = dict[str, Any]
Answer = Callable[[Body], httpx.Response]


def response(*pieces: tuple[float, Any]) -> httpx.Response:
    """A stream of events (bytes or JSON), each after a delay in seconds; exceptions are raised."""

    async def stream() -> AsyncIterator[bytes]:
        for delay, piece in pieces:
            await asyncio.sleep(delay)
            if isinstance(piece, Exception):
                raise piece
            yield b"data: " + (piece if isinstance(piece, bytes) else json.dumps(piece).encode()) + b"\n\n"

    return httpx.Response(200, content=stream())


def event(text: str = "", finish_reason: str | None = None, **choice: Any) -> Body:
    return {"choices": [{"text": text, "finish_reason": finish_reason, **choice}]}


def tokens(n: int, first: float = 0.5) -> httpx.Response:
    """A stream of n tokens: the first after `first` seconds, the others every 0.1 seconds."""
    events = [(0.1 if i else first, event("x", "length" if i == n - 1 else None)) for i in range(n)]
    usage = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": n}}
    return response(*events, (0.0, usage), (0.0, b"[DONE]"))


def healthy(body: Body) -> httpx.Response:
    return tokens(body["max_tokens"])


def transport(answer: Answer = healthy, tokenize: int = 200, log: Any = None) -> httpx.MockTransport:
    """A server in memory. tokenize: status of /tokenize; log: list that gets the bodies of generation requests."""

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        body = json.loads(request.content)
        if request.url.path == "/tokenize":
            return httpx.Response(tokenize, json={"tokens": list(body["prompt"].encode())})
        if log is not None:
            log.append(body)
        return answer(body)

    return httpx.MockTransport(handle)


def run_requests(
    planned: list[ScheduledRequest], answer: Answer = healthy, target: Target | None = None, **options: Any
) -> list[RequestRecord]:
    async def work() -> list[RequestRecord]:
        network: Any = {"base_url": "http://test", "transport": transport(answer), "timeout": None}
        async with httpx.AsyncClient(**network) as client:
            return await send_requests(planned, target or Target("m"), client, **options)

    return run(work())


def run_test(network: httpx.MockTransport, loads: list[LoadConfig], **settings: Any) -> list[LoadResult]:
    test = LoadTest("http://test", "some text " * 50, loads, **settings)
    return run(run_load_test(test, transport=network))


def planned_requests(*times: float, tokens: int = 4) -> list[ScheduledRequest]:
    return [ScheduledRequest(n, at, (1, 2, 3), tokens) for n, at in enumerate(times)]


def test_record_times_match_stream_events() -> None:
    (record,) = run_requests(planned_requests(0.0, tokens=5))
    assert record.error is None and record.finish_reason == "length"
    assert record.ttft == pytest.approx(0.5) and record.tpot == pytest.approx(0.1)
    assert record.gaps == pytest.approx([0.1] * 4) and record.latency == pytest.approx(0.9)
    assert (record.prompt_tokens, record.output_tokens) == (3, 5)


def test_open_loop_sends_on_schedule() -> None:
    records = run_requests(planned_requests(0.0, 0.2, 0.25, 3.0))
    assert [r.sent for r in records] == pytest.approx([0.0, 0.2, 0.25, 3.0])
    assert [r.latency for r in records] == pytest.approx([0.8] * 4)


def test_closed_loop_waits_for_responses() -> None:
    records = run_requests(planned_requests(*[0.0] * 5), concurrency=2)
    assert [r.number for r in records] == list(range(5))
    assert [r.sent for r in records] == pytest.approx([0.0, 0.0, 0.8, 0.8, 1.6])
    assert [r.lag for r in records] == [0.0] * 5


def test_latency_counts_from_scheduled_time() -> None:
    def stalls(body: Body) -> httpx.Response:
        loop = asyncio.get_running_loop()
        if loop.time() < 0.05:  # the client process stalls during the first request
            loop.call_later(0.1, lambda: setattr(loop, "moment", loop.time() + 2.0))
        return healthy(body)

    records = run_requests(planned_requests(0.0, 0.3), stalls)
    assert records[1].lag == pytest.approx(1.8, abs=0.01)  # scheduled at 0.3, resumed at 2.1
    assert records[1].ttft == pytest.approx(0.5 + records[1].lag)
    assert client_lagging(summarize(records))
    assert not client_lagging(summarize(records[:1]))


line_text = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]))


@given(st.lists(line_text, max_size=6), st.sampled_from(["\n", "\r\n"]), st.data())
def test_sse_parser_is_independent_of_chunk_boundaries(texts: list[str], end: str, data: Any) -> None:
    whole = "".join(f": a comment{end}event: x{end}data: {text}{end}{end}" for text in texts).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    events, found = SSEParser(), []
    for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        found += events.feed(whole[a:b])
    assert found == [text.encode() for text in texts]


def test_sse_parser_joins_multiline_events() -> None:
    assert SSEParser().feed(b"data: a\ndata:b\n\n") == [b"a\nb"]


FAILURES: dict[str, Answer] = {
    "http 429": lambda body: httpx.Response(429, json={"error": {"message": "slow down", "code": None}}),
    "http 500": lambda body: httpx.Response(500, text="oh"),
    "broken": lambda body: response((0.1, event("x"))),
    "error event": lambda body: response((0.1, {"error": {"message": "no"}})),
    "unreadable": lambda body: response((0.1, b"{")),
    "timeout": lambda body: tokens(4, first=99.0),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_failures_become_records_with_kind(kind: str) -> None:
    records = run_requests(planned_requests(0.0, 0.1), FAILURES[kind], Target("m", timeout_seconds=20.0))
    assert [r.error for r in records] == [kind, kind]
    found = summarize(records, slo=LatencySLO(ttft=100.0))
    assert found.errors == {kind: 2} and found.finished == 0 and found.slo_attainment == 0.0
    assert found.ttft is None and found.output_rate == 0.0


CONNECTION_ERRORS = {"connect": httpx.ConnectError, "broken": httpx.ReadError, "timeout": httpx.ReadTimeout}


@pytest.mark.parametrize("kind", CONNECTION_ERRORS)
def test_connection_errors_become_records_with_kind(kind: str) -> None:
    error = CONNECTION_ERRORS[kind]("gone")
    (record,) = run_requests(planned_requests(0.0), lambda body: response((0.3, error)))
    assert record.error == kind and record.finished == pytest.approx(0.3)


def test_target_builds_bodies_of_both_endpoints() -> None:
    text, ids = ScheduledRequest(0, 0.0, "hi", 7), ScheduledRequest(0, 0.0, (5, 6), 7)
    talk = ScheduledRequest(0, 0.0, (("system", "s"), ("user", "u")), 7)
    plain, chat = Target("m", extra_fields=(("ignore_eos", True),)), Target("m", "chat")
    fields = {"max_tokens": 7, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    assert json.loads(plain.body(ids)) == {"model": "m", "prompt": [5, 6], **fields}
    assert json.loads(plain.body(text))["prompt"] == "hi"
    assert json.loads(chat.body(text))["messages"] == [{"role": "user", "content": "hi"}]
    assert json.loads(chat.body(talk))["messages"][0] == {"role": "system", "content": "s"}
    for target, wrong in ((plain, talk), (chat, ids)):
        with pytest.raises(ConfigError):
            target.body(wrong)


def test_role_event_is_not_an_arrival() -> None:
    role = event(delta={"role": "assistant", "content": ""})
    pieces = (0.1, role), (0.4, event(delta={"content": "x"})), (0.2, event(finish_reason="stop", delta={}))
    planned = [ScheduledRequest(0, 0.0, "hi", 9)]
    (record,) = run_requests(planned, lambda body: response(*pieces), Target("m", "chat"))
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
    # The first and the fourth request are within the SLO.
    assert found.slo_attainment == pytest.approx(2 / 5) and found.goodput == pytest.approx(2 / 5)
    assert found.output_cost == pytest.approx(1e6 * 3.6 * 5 / 3600 / 34)
    assert found.total_cost == pytest.approx(1e6 * 3.6 * 5 / 3600 / 74)
    assert found.ttft is not None and found.itl is not None
    assert (found.ttft.p50, found.ttft.maximum, found.itl.maximum) == pytest.approx((0.15, 0.3, 0.05))
    assert json.loads(json.dumps(found.to_json()))["errors"] == {"timeout": 1}


@given(st.lists(st.floats(0, 100), min_size=1, max_size=50))
def test_latency_stats_percentiles_are_ordered(values: list[float]) -> None:
    found = latency_stats(values)
    assert found is not None
    ordered = [min(values), found.p50, found.p90, found.p95, found.p99, found.maximum]
    assert all(a <= b or math.isclose(a, b) for a, b in itertools.pairwise(ordered))


def test_run_load_test_measures_a_curve() -> None:
    bodies: list[Body] = []
    lengths = LengthDistribution("fixed", (5,))
    loads = [LoadConfig(requests=6, rate=rate, output_lengths=lengths) for rate in (1.0, 4.0)]
    slo = LatencySLO(1.0, 1.0)
    found = run_test(transport(log=bodies), loads, warmup_requests=2, slo=slo, cost_per_hour=1.0)
    assert [load.name for load in found] == ["1/s", "4/s"]
    assert all(load.summary.finished == 6 and load.summary.slo_attainment == 1.0 for load in found)
    assert found[1].summary.seconds < found[0].summary.seconds
    assert len(bodies) == 14 and all(isinstance(i, int) for i in bodies[0]["prompt"])
    prompts = [tuple(body["prompt"]) for body in bodies[2:]]
    assert set(prompts[:6]).isdisjoint(prompts[6:])  # each load has different prompts
    entries = [json.loads(line) for line in to_jsonl(found)]
    assert [entry["kind"] for entry in entries] == (["request"] * 6 + ["load"]) * 2


def test_run_load_test_without_tokenize_endpoint() -> None:
    bodies: list[Body] = []
    load = LoadConfig(requests=1, rate=1.0, prompt_lengths=LengthDistribution("fixed", (5,)))
    run_test(transport(tokenize=404, log=bodies), [load], model="m", warmup_requests=0)
    assert len(bodies[0]["prompt"]) == 20 and set(bodies[0]["prompt"]) == set("some text ")


NO_MODELS = httpx.Response(200, json={"data": []})
NO_KEY = httpx.Response(401, json={"error": {"message": "key?"}})


@pytest.mark.parametrize("answer", [NO_MODELS, NO_KEY, httpx.ConnectError("refused")])
def test_run_load_test_names_an_unusable_server(answer: httpx.Response | Exception) -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        if isinstance(answer, Exception):
            raise answer
        return answer

    with pytest.raises(DataError, match="test"):
        run_test(httpx.MockTransport(handle), [LoadConfig(rate=1.0)])
