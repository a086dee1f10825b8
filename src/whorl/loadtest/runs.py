"""A load test from end to end: find the model, make the prompts, warm up, then one load after another.

Each point of a curve (`Load`) is a load of its own, begun when the one before has ended. The warm-up is not counted: it
opens connections and lets a server compile what it compiles, and it is of other prompts than the loads, so that it fills no
prefix cache for them. For the same reason each load draws prompts of its own (`fresh`); only with the same ones would later
loads profit from what earlier ones left in the cache.

Results are JSON lines, one a request and one a load, so that another tool can draw them anew.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from whorl.loadtest.client import Endpoint, RequestRecord, Target, first_model, send_requests, tokenize_pool
from whorl.loadtest.summary import LatencySLO, LoadSummary, summarise
from whorl.loadtest.workload import LoadConfig, Prompt, PromptPool, ScheduledRequest, schedule_requests

MAX_POOL_CHARACTERS = 200_000
WARMUP_MAX_TOKENS = 8


@dataclass(frozen=True)
class LoadResult:
    """One load that was run."""

    config: LoadConfig
    records: list[RequestRecord]
    summary: LoadSummary

    @property
    def name(self) -> str:
        """ "4/s", "8 callers"."""
        if self.config.rate is None:
            return f"{self.config.concurrency} callers"
        return "all at once" if self.config.rate == float("inf") else f"{self.config.rate:g}/s"


@dataclass(frozen=True)
class LoadTest:
    """What is tested. texts: prompts of their own, or a text that synthetic ones are cut from.

    model: None asks the server. key: sent as a bearer token. fresh: a seed of its own for each load.
    """

    url: str
    prompts: str | Sequence[tuple[Prompt, int | None]]
    loads: Sequence[LoadConfig]
    model: str | None = None
    endpoint: Endpoint = "completions"
    extra_fields: tuple[tuple[str, Any], ...] = ()
    timeout_seconds: float = 600.0
    api_key: str | None = None
    warmup_requests: int = 1
    new_prompts_per_load: bool = True
    slo: LatencySLO | None = None
    cost_per_hour: float | None = None


async def run_load_test(
    test: LoadTest,
    *,
    on_load_start: Callable[[LoadConfig], None] = lambda config: None,
    on_done: Callable[[RequestRecord], None] = lambda record: None,
    transport: httpx.AsyncBaseTransport | None = None,
) -> list[LoadResult]:
    """Runs all loads. `began` is told of each, `done` of each request that ended.

    Raises:
        DataError: the server does not answer; ConfigError: prompts that the endpoint does not take.
    """
    headers = {"authorization": f"Bearer {test.api_key}"} if test.api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    timeout = httpx.Timeout(None, connect=min(30.0, test.timeout_seconds))
    if transport is None:
        transport = httpx.AsyncHTTPTransport(limits=limits)
    async with httpx.AsyncClient(
        base_url=test.url, headers=headers, transport=transport, timeout=timeout
    ) as client:
        model = test.model or await first_model(client)
        target = Target(model, test.endpoint, test.extra_fields, test.timeout_seconds)
        texts: PromptPool | Sequence[tuple[Prompt, int | None]]
        if not isinstance(test.prompts, str):
            texts = test.prompts
        elif test.endpoint == "chat":
            texts = PromptPool(test.prompts)
        else:
            texts = await tokenize_pool(client, model, test.prompts[:MAX_POOL_CHARACTERS])
        if test.warmup_requests:
            first = test.loads[0].model_copy(
                update={
                    "requests": test.warmup_requests,
                    "seed": -1,
                    "rate": float("inf"),
                    "concurrency": None,
                }
            )
            await send_requests(
                [_limit_warmup_tokens(one) for one in schedule_requests(first, texts)], target, client
            )
        found = []
        for number, config in enumerate(test.loads):
            if test.new_prompts_per_load and isinstance(texts, PromptPool):
                config = config.model_copy(update={"seed": config.seed + 1000 * number})
            on_load_start(config)
            records = await send_requests(
                schedule_requests(config, texts),
                target,
                client,
                concurrency=config.concurrency,
                on_done=on_done,
            )
            summary = summarise(
                records, offered_rate=config.rate, concurrency=config.concurrency, slo=test.slo,
                cost_per_hour=test.cost_per_hour,
            )  # fmt: skip
            found.append(LoadResult(config, records, summary))
    return found


def run_load_test_sync(test: LoadTest, **calls: Any) -> list[LoadResult]:
    """`run` in an event loop of its own."""
    return asyncio.run(run_load_test(test, **calls))


def to_jsonl(loads: Sequence[LoadResult]) -> list[str]:
    """JSON lines: of each load its requests in order, then its summary."""
    found = []
    for load in loads:
        for r in load.records:
            entry = {
                "kind": "request", "load": load.name, "number": r.number, "scheduled": r.scheduled, "sent": r.sent,
                "arrivals": r.arrivals, "finished": r.finished, "prompt_tokens": r.prompt_tokens,
                "output_tokens": r.output_tokens, "finish_reason": r.finish_reason, "error": r.error,
                "error_message": r.error_message,
            }  # fmt: skip
            found.append(json.dumps(entry))
        config = load.config.model_dump(
            mode="json", exclude={"length_pairs", "prompt_lengths", "output_lengths"}
        )
        entry = {"kind": "load", "load": load.name, "config": config, **load.summary.to_json()}
        found.append(json.dumps(_finite_json(entry)))
    return found


def save_jsonl(loads: Sequence[LoadResult], file: Path) -> None:
    """Writes `lines` to a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(line + "\n" for line in to_jsonl(loads)), encoding="utf-8")


def _limit_warmup_tokens(planned: ScheduledRequest) -> ScheduledRequest:
    return replace(planned, max_tokens=min(planned.max_tokens, WARMUP_MAX_TOKENS))


def _finite_json(value: Any) -> Any:
    """JSON has no infinity."""
    if isinstance(value, dict):
        return {name: _finite_json(v) for name, v in value.items()}
    return None if isinstance(value, float) and abs(value) == float("inf") else value
