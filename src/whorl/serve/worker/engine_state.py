"""The state of an engine as JSON, for the engine page, /metrics and routers.

It is read in the engine thread between two steps (`EngineWorker.call`), so that all values belong to one moment.

`page_map` lists the cache pages in order: 0 free, -1 cached and unreferenced, n referenced by n sequences. Runs of equal
pages are written as [entry, length]. It shows the group of full-attention layers, or else the first group.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from typing import Any

from whorl.engine.engine import Engine
from whorl.serve.worker.engine_group import EngineGroup

RATIOS = ("acceptance_rate", "cache_hit_rate", "weights_version")  # no sums
THROUGHPUT_WINDOW_SECONDS = 5.0  # window of the tokens/s value


def engine_counters(engine: Any) -> dict[str, float]:
    """Return counters by name for Prometheus; empty for an object that is not an `Engine`. Those of a group are sums."""
    if isinstance(engine, EngineGroup):
        each = [engine_counters(one) for one in engine.engines.values()]
        return {name: sum(one[name] for one in each) for name in each[0] if name not in RATIOS}
    if not isinstance(engine, Engine):
        return {}
    stats, pools = engine.stats, [group.pool for group in engine.cache.groups]
    return {
        "steps": stats.steps,
        "prompt_tokens": stats.prompt_tokens,
        "output_tokens": stats.output_tokens,
        "drafted_tokens": stats.drafted_tokens,
        "accepted_tokens": stats.accepted_tokens,
        "acceptance_rate": stats.acceptance_rate,
        "draft_seconds": stats.draft_seconds,
        "preemptions": stats.n_preemptions,
        "step_seconds": stats.seconds,
        "model_seconds": stats.model_seconds,
        "sample_seconds": stats.sample_seconds,
        "queue": len(engine.scheduler.waiting),
        "running": len(engine.scheduler.running),
        "pages": sum(pool.n_pages for pool in pools),
        "pages_used": sum(pool.n_used for pool in pools),
        "pages_cached": sum(pool.n_cached for pool in pools),
        "pages_evicted": sum(pool.n_evicted for pool in pools),
        "prefix_cache_queries": engine.cache.queried_tokens,
        "prefix_cache_hits": engine.cache.hit_tokens,
        "cache_hit_rate": engine.cache.hit_tokens / max(1, engine.cache.queried_tokens),
        "weights_version": engine.version,
    }


def evicted_tokens(engine: Any) -> int:
    """Return the number of positions that the prefix cache has evicted so far; routers use it. Callable from any thread."""
    if isinstance(engine, EngineGroup):
        return sum(map(evicted_tokens, engine.engines.values()))
    if not isinstance(engine, Engine):
        return 0
    pool = engine.cache.groups[0].pool
    return pool.n_evicted * pool.page_size


def engine_snapshot(engine: Any) -> dict[str, Any]:
    """Return the state for the engine page (parsed by `pages/state.js`)."""
    if not isinstance(engine, Engine):
        return {}
    now, clock = time.time(), engine.clock()
    group = next((g for g in engine.cache.groups if g.window is None), engine.cache.groups[0])
    pool, numbers = group.pool, engine_counters(engine)
    entries = (
        n or (-1 if h is not None else 0) for n, h in zip(pool.ref_counts, pool.page_hashes, strict=True)
    )
    recent = list(engine.stats.recent_steps)
    lately = [step for step in recent if clock - step.started <= THROUGHPUT_WINDOW_SECONDS]
    span = clock - lately[0].started if lately else 0.0
    return {
        "version": engine.version,
        "queue": len(engine.scheduler.waiting),
        "running": len(engine.scheduler.running),
        "pages": {
            "total": pool.n_pages,
            "used": pool.n_used,
            "cached": pool.n_cached,
            "free": pool.n_available - pool.n_cached,
            "size": pool.page_size,
        },
        "page_map": _run_length_encode(entries),
        "sequences": [
            {
                "id": s.request.id,
                "state": s.status.value,
                "prompt": s.n_prompt,
                "output": s.n_output,
                "computed": s.n_computed,
                "cached": s.cached_tokens,
                "preempted": s.n_preemptions,
                "pages": sum(page >= 0 for pages in s.pages for page in pages),
            }
            for s in engine.sequences()
        ],
        "batches": [
            {
                "at": round(now - (clock - step.started), 6),
                "prefill_tokens": step.prefill_tokens,
                "decode_tokens": step.decode_tokens,
                "sequences": step.sequences,
                "waiting": step.waiting,
                "preempted": step.n_preempted,
                "seconds": round(step.seconds, 6),
                "model": round(step.model_seconds, 6),
                "sample": round(step.sample_seconds, 6),
            }
            for step in recent
        ],
        "hit_rate": numbers["cache_hit_rate"] if engine.cache.queried_tokens else None,
        "tokens_per_second": sum(step.decode_tokens for step in lately) / span if span > 0 else 0.0,
        "counters": numbers,
    }


def _run_length_encode(entries: Iterable[int]) -> list[list[int]]:
    return [[value, sum(1 for _ in run)] for value, run in itertools.groupby(entries)]
