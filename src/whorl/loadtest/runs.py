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

from whorl.loadtest.client import Endpoint, Record, Target, drive, first_model, tokenised
from whorl.loadtest.summary import Promise, Summary, summarise
from whorl.loadtest.workload import LoadConfig, Planned, Pool, Prompt, plan

POOL_CHARACTERS = 200_000
WARM_TOKENS = 8


@dataclass(frozen=True)
class Load:
    """One load that was run."""

    config: LoadConfig
    records: list[Record]
    summary: Summary

    @property
    def name(self) -> str:
        """ "4/s", "8 callers"."""
        if self.config.rate is None:
            return f"{self.config.concurrency} callers"
        return "all at once" if self.config.rate == float("inf") else f"{self.config.rate:g}/s"


@dataclass(frozen=True)
class Trial:
    """What is tested. texts: prompts of their own, or a text that synthetic ones are cut from.

    model: None asks the server. key: sent as a bearer token. fresh: a seed of its own for each load.
    """

    url: str
    texts: str | Sequence[tuple[Prompt, int | None]]
    loads: Sequence[LoadConfig]
    model: str | None = None
    endpoint: Endpoint = "completions"
    extra: tuple[tuple[str, Any], ...] = ()
    limit: float = 600.0
    key: str | None = None
    warm_up: int = 1
    fresh: bool = True
    promise: Promise | None = None
    cost_per_hour: float | None = None


async def run(
    test: Trial,
    *,
    began: Callable[[LoadConfig], None] = lambda config: None,
    done: Callable[[Record], None] = lambda record: None,
    transport: httpx.AsyncBaseTransport | None = None,
) -> list[Load]:
    """Runs all loads. `began` is told of each, `done` of each request that ended.

    Raises:
        DataError: the server does not answer; ConfigError: prompts that the endpoint does not take.
    """
    headers = {"authorization": f"Bearer {test.key}"} if test.key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    timeout = httpx.Timeout(None, connect=min(30.0, test.limit))
    if transport is None:
        transport = httpx.AsyncHTTPTransport(limits=limits)
    async with httpx.AsyncClient(
        base_url=test.url, headers=headers, transport=transport, timeout=timeout
    ) as client:
        model = test.model or await first_model(client)
        target = Target(model, test.endpoint, test.extra, test.limit)
        texts: Pool | Sequence[tuple[Prompt, int | None]]
        if not isinstance(test.texts, str):
            texts = test.texts
        elif test.endpoint == "chat":
            texts = Pool(test.texts)
        else:
            texts = await tokenised(client, model, test.texts[:POOL_CHARACTERS])
        if test.warm_up:
            first = test.loads[0].model_copy(
                update={"requests": test.warm_up, "seed": -1, "rate": float("inf"), "concurrency": None}
            )
            await drive([_short(one) for one in plan(first, texts)], target, client)
        found = []
        for number, config in enumerate(test.loads):
            if test.fresh and isinstance(texts, Pool):
                config = config.model_copy(update={"seed": config.seed + 1000 * number})
            began(config)
            records = await drive(
                plan(config, texts), target, client, concurrency=config.concurrency, done=done
            )
            summary = summarise(
                records, offered=config.rate, concurrency=config.concurrency, promise=test.promise,
                cost_per_hour=test.cost_per_hour,
            )  # fmt: skip
            found.append(Load(config, records, summary))
    return found


def run_now(test: Trial, **calls: Any) -> list[Load]:
    """`run` in an event loop of its own."""
    return asyncio.run(run(test, **calls))


def lines(loads: Sequence[Load]) -> list[str]:
    """JSON lines: of each load its requests in order, then its summary."""
    found = []
    for load in loads:
        for r in load.records:
            entry = {
                "kind": "request", "load": load.name, "number": r.number, "scheduled": r.scheduled, "sent": r.sent,
                "arrivals": r.arrivals, "finished": r.finished, "prompt_tokens": r.prompt_tokens,
                "output_tokens": r.output_tokens, "finish": r.finish, "error": r.error, "said": r.said,
            }  # fmt: skip
            found.append(json.dumps(entry))
        config = load.config.model_dump(mode="json", exclude={"pairs", "prompt_lengths", "output_lengths"})
        entry = {"kind": "load", "load": load.name, "config": config, **load.summary.to_json()}
        found.append(json.dumps(_finite(entry)))
    return found


def save(loads: Sequence[Load], file: Path) -> None:
    """Writes `lines` to a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(line + "\n" for line in lines(loads)), encoding="utf-8")


def _short(planned: Planned) -> Planned:
    return replace(planned, max_tokens=min(planned.max_tokens, WARM_TOKENS))


def _finite(value: Any) -> Any:
    """JSON has no infinity."""
    if isinstance(value, dict):
        return {name: _finite(v) for name, v in value.items()}
    return None if isinstance(value, float) and abs(value) == float("inf") else value
