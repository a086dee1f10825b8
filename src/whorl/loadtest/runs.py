"""A complete load test: find the model, build the prompts, warm up, then run one load after another.

Each point of a curve is a separate load (`LoadResult`) that starts after the previous one has ended. The warm-up opens
connections and triggers compilation in the server; it is not counted. Warm-up and loads use different prompts
(`new_prompts_per_load`), because equal prompts would hit the prefix cache of earlier loads.

Results are JSON lines, one per request and one per load, for use by other tools.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from whorl.http.answers import PLAIN, no_cookies
from whorl.loadtest.client import Endpoint, RequestRecord, Target, first_model, send_requests, tokenize_pool
from whorl.loadtest.summary import LatencySLO, LoadSummary, summarize
from whorl.loadtest.workload import LoadConfig, Prompt, PromptPool, ScheduledRequest, schedule_requests

MAX_POOL_CHARACTERS = 200_000
WARMUP_MAX_TOKENS = 8


@dataclass(frozen=True)
class LoadResult:
    """The result of one load."""

    config: LoadConfig
    records: list[RequestRecord]
    summary: LoadSummary

    @property
    def name(self) -> str:
        """Display name, such as "4/s" or "8 callers"."""
        if self.config.rate is None:
            return f"{self.config.concurrency} callers"
        return "all at once" if self.config.rate == float("inf") else f"{self.config.rate:g}/s"


@dataclass(frozen=True)
class LoadTest:
    """Configuration of a load test. prompts: a list of prompts, or a text from which synthetic prompts are cut.

    model: None selects the server's first. api_key: sent as bearer token. new_prompts_per_load: another seed for each load.
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
    """Run all loads. Calls `on_load_start` before each load and `on_done` after each request.

    Raises:
        DataError: the server does not respond. ConfigError: the endpoint does not support a prompt.
    """
    headers = PLAIN | ({"authorization": f"Bearer {test.api_key}"} if test.api_key else {})
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    timeout = httpx.Timeout(None, connect=min(30.0, test.timeout_seconds))
    if transport is None:
        transport = httpx.AsyncHTTPTransport(limits=limits)
    async with httpx.AsyncClient(
        base_url=test.url, headers=headers, transport=transport, timeout=timeout, cookies=no_cookies()
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
            warmup = test.loads[0].model_copy(
                update={
                    "requests": test.warmup_requests,
                    "seed": -1,
                    "rate": float("inf"),
                    "concurrency": None,
                }
            )
            await send_requests(
                [_limit_warmup_tokens(one) for one in schedule_requests(warmup, texts)], target, client
            )
        results = []
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
            summary = summarize(
                records, offered_rate=config.rate, concurrency=config.concurrency, slo=test.slo,
                cost_per_hour=test.cost_per_hour,
            )  # fmt: skip
            results.append(LoadResult(config, records, summary))
    return results


def run_load_test_sync(test: LoadTest, **calls: Any) -> list[LoadResult]:
    """Call `run_load_test` in a new event loop."""
    return asyncio.run(run_load_test(test, **calls))


def to_jsonl(loads: Sequence[LoadResult]) -> list[str]:
    """Return JSON lines: the requests of each load in order, then its summary."""
    lines = []
    for load in loads:
        for r in load.records:
            entry = {
                "kind": "request", "load": load.name, "number": r.number, "scheduled": r.scheduled, "sent": r.sent,
                "arrivals": r.arrivals, "finished": r.finished, "prompt_tokens": r.prompt_tokens,
                "output_tokens": r.output_tokens, "finish_reason": r.finish_reason, "error": r.error,
                "error_message": r.error_message,
            }  # fmt: skip
            lines.append(json.dumps(entry))
        config = load.config.model_dump(
            mode="json", exclude={"length_pairs", "prompt_lengths", "output_lengths"}
        )
        entry = {"kind": "load", "load": load.name, "config": config, **load.summary.to_json()}
        lines.append(json.dumps(_finite_json(entry)))
    return lines


def save_jsonl(loads: Sequence[LoadResult], file: Path) -> None:
    """Write `to_jsonl` to a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(line + "\n" for line in to_jsonl(loads)), encoding="utf-8")


def _limit_warmup_tokens(planned: ScheduledRequest) -> ScheduledRequest:
    return replace(planned, max_tokens=min(planned.max_tokens, WARMUP_MAX_TOKENS))


def _finite_json(value: Any) -> Any:
    """Replace infinity by None: JSON has no infinity."""
    if isinstance(value, dict):
        return {name: _finite_json(v) for name, v in value.items()}
    return None if isinstance(value, float) and abs(value) == float("inf") else value
