"""Time between tokens of running sequences while a prompt of 4,096 tokens is prefilled.

    python bench/engine/chunked_prefill.py [--quick] [--kind bfloat16]

Eight sequences decode. The gap between successive tokens of one sequence is measured without and with a long prompt in
the same steps. The peer run takes chunks as large as the step's token budget allows.

Bar: the 99th percentile of the gaps at most doubles. Decoding becomes slower while the eight texts grow, so there are
two baselines and a claim for each: the gaps before the prompt arrives, and the gaps after its prefill. Also printed:
the time to first token of the long prompt, with the decoding sequences and alone in the engine.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse, sized
from bench.engine.support import models
from bench.engine.support.ours import ask, best_kind, made

from whorl.engine.config import EngineConfig

ROWS, LONG = 8, sized(4096, 256)
GAPS = sized(150, 8)  # steps that are measured before and after the prompt


def gaps(name: str, kind: str, slowdown: float, budget: int, long: int) -> dict[str, float]:
    """Milliseconds between tokens without and with the long prompt; seconds to its first token."""
    config = EngineConfig(
        max_num_seqs=ROWS + 1, max_model_len=8192, kv_cache_tokens=3 * 8192, max_num_batched_tokens=budget,
        max_decode_slowdown=slowdown,
        enable_prefix_caching=False,
    )  # fmt: skip
    engine = made(name, kind, config)
    for n, ids in enumerate(models.prompts(name, ROWS, 64)):
        engine.add(ask(n, ids, 1700))
    for _ in range(sized(30, 2)):
        engine.step()
    last: dict[str, float] = {}
    alone: list[float] = []
    beside: list[float] = []

    def step(into: list[float]) -> bool:
        """Run one step. Return whether the long prompt has its first token."""
        deltas = engine.step()
        now = time.perf_counter()
        for delta in deltas:
            if delta.request_id in last:
                into.append(now - last[delta.request_id])
            last[delta.request_id] = now
        return any(delta.request_id == "long" for delta in deltas)

    for _ in range(GAPS):
        step(alone)
    began = time.perf_counter()
    (prompt,) = models.prompts(name, 1, long, seed=3)
    engine.add(ask(0, prompt, 2).model_copy(update={"id": "long"}))
    while not step(beside):
        pass
    entered = time.perf_counter() - began
    after: list[float] = []
    for _ in range(10):
        step([])  # the long request decodes one more token
    for _ in range(GAPS):
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
    given = parse(
        __doc__,
        lambda p: (
            p.add_argument("--quick", action="store_true"),
            p.add_argument("--kind", default=best_kind()),
            p.add_argument("--model", default="14M"),
        ),
    )
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
    for when, beside in (("before it arrives", "alone p99"), ("after its prefill", "after p99")):
        ratio = chunked["p99"] / chunked[beside]
        claim(
            f"99th percentile between tokens while a prompt of {long} is prefilled, against {when} "
            f"({given.model}, {given.kind}, {ROWS} rows)",
            ours=chunked["p99"], peer=chunked[beside], unit="ms", ratio=ratio, bar=2.0, ok=ratio <= 2.0,
            samples=[{"in chunks": chunked}, {"in one piece": whole}], quick=given.quick,
            peer_name=f"{when[:6].strip()} the prompt",
            variant="after" if when.startswith("after") else "",
        )  # fmt: skip


if __name__ == "__main__":
    main()
