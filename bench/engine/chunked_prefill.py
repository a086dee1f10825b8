"""What those who are being answered notice when a prompt of 4,096 tokens comes in: the gaps between their tokens.

.venv/bin/python bench/engine/chunked_prefill.py [--quick] [--kind bfloat16]

Eight sequences decode. Every gap between two tokens of one of them is taken, for a while without and then with a long
prompt that is read in beside them; again with pieces as large as the budget of a step allows, which is what chunks are
there against. The bar: the 99th percentile of the gaps at most doubles. While the prompt enters, the eight texts grow, and
with them what decoding costs; so the gaps without it are taken before and after, and there is a claim for each: against
those before is what was asked for, against those after is what the prompt alone is to blame for. What it costs the one who
came is said too: the time until its first token, against that of a prompt that has the engine for itself.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim
from bench.engine.support import models
from bench.engine.support.ours import ask, best_kind, made

from whorl.engine.config import EngineConfig

ROWS, LONG = 8, 4096


def gaps(name: str, kind: str, stretch: float, budget: int, long: int) -> dict[str, float]:
    """Milliseconds between tokens without and with the long prompt; seconds to its first token."""
    config = EngineConfig(
        max_num_seqs=ROWS + 1, max_model_len=8192, kv_cache_tokens=3 * 8192, max_num_batched_tokens=budget, max_decode_slowdown=stretch,
        enable_prefix_caching=False,
    )  # fmt: skip
    engine = made(name, kind, config)
    for n, ids in enumerate(models.prompts(name, ROWS, 64)):
        engine.add(ask(n, ids, 1700))
    for _ in range(30):
        engine.step()
    last: dict[str, float] = {}
    alone: list[float] = []
    beside: list[float] = []

    def step(into: list[float]) -> bool:
        """-> whether the long one has its first token."""
        told = engine.step()
        now = time.perf_counter()
        for delta in told:
            if delta.request_id in last:
                into.append(now - last[delta.request_id])
            last[delta.request_id] = now
        return any(delta.request_id == "long" for delta in told)

    for _ in range(150):
        step(alone)
    began = time.perf_counter()
    (prompt,) = models.prompts(name, 1, long, seed=3)
    engine.add(ask(0, prompt, 2).model_copy(update={"id": "long"}))
    while not step(beside):
        pass
    entered = time.perf_counter() - began
    after: list[float] = []
    for _ in range(10):
        step([])  # it has one more token to write
    for _ in range(150):
        step(after)
    for n in range(ROWS):
        engine.abort(str(n))
    while engine.busy:
        engine.step()
    began = time.perf_counter()
    engine.add(ask(0, prompt, 2).model_copy(update={"id": "alone"}))
    while not engine.step():
        pass
    return {
        "p99": 1e3 * float(np.percentile(beside, 99)), "p50": 1e3 * float(np.percentile(beside, 50)),
        "alone p99": 1e3 * float(np.percentile(alone, 99)), "alone p50": 1e3 * float(np.percentile(alone, 50)),
        "after p99": 1e3 * float(np.percentile(after, 99)), "after p50": 1e3 * float(np.percentile(after, 50)),
        "steps": len(beside) / ROWS, "entered": entered, "entered alone": time.perf_counter() - began,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--kind", default=best_kind())
    parser.add_argument("--model", default="14M")
    given = parser.parse_args()
    long = LONG // 4 if given.quick else LONG
    chunked = gaps(
        given.model,
        given.kind,
        EngineConfig().max_decode_slowdown,
        EngineConfig().max_num_batched_tokens,
        long,
    )
    whole = gaps(given.model, given.kind, 1e9, 8192, long)
    for name, found in (("in chunks", chunked), ("in one piece", whole)):
        print(f"{name:13}" + "  ".join(f"{key} {value:.2f}" for key, value in found.items()))
    for when, beside in (("before it came", "alone p99"), ("once it is in", "after p99")):
        ratio = chunked["p99"] / chunked[beside]
        claim(
            f"99th percentile of time per token while a prompt of {long} enters, against {when} "
            f"({given.model}, {given.kind}, {ROWS} rows)",
            ours=chunked["p99"], peer=chunked[beside], unit="ms", ratio=ratio, bar=2.0, ok=ratio <= 2.0,
            samples=[{"in chunks": chunked}, {"in one piece": whole}], quick=given.quick,
        )  # fmt: skip


if __name__ == "__main__":
    main()
