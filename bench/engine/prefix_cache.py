"""Time to the first token of a prompt whose first 1,024 tokens were seen before, against one of which nothing was.

.venv/bin/python bench/engine/prefix_cache.py [--quick] [--kind bfloat16]

Each round takes a beginning of its own: a first request computes all of it, a second one has the same beginning and 16 ids
of its own behind. An otherwise idle engine; the clock runs from `add` to the first token. The bar: at least 10 x shorter.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim
from bench.engine.support import models
from bench.engine.support.ours import ask, best_kind, made

from whorl.engine.config import EngineConfig
from whorl.engine.engine import Engine

PREFIX, TAIL = 1024, 16


def first_token(engine: Engine, number: int, ids: list[int]) -> tuple[float, int]:
    """Seconds to it, and positions that were found."""
    engine.add(ask(number, ids, 2))
    began = time.perf_counter()
    deltas = []
    while not deltas:
        deltas = engine.step()
    seconds = time.perf_counter() - began
    while engine.busy:
        engine.step()
    return seconds, deltas[0].cached_tokens


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--kind", default=best_kind())
    given = parser.parse_args()
    for name in ("14M",) if given.quick else ("14M", "109M"):
        config = EngineConfig(max_num_seqs=4, max_model_len=2048, kv_cache_tokens=16384)
        engine = made(name, given.kind, config)
        rounds = 3 if given.quick else 7
        beginnings = models.prompts(name, rounds + 1, PREFIX)
        tails = models.prompts(name, 2 * rounds + 2, TAIL, seed=2)
        pairs = []
        for n, beginning in enumerate(beginnings):
            cold, found = first_token(engine, 2 * n, beginning + tails[2 * n])
            warm, again = first_token(engine, 2 * n + 1, beginning + tails[2 * n + 1])
            assert found == 0 and again == PREFIX, (found, again)
            pairs.append((cold, warm))
        pairs = pairs[1:]  # the first warms up
        ours, peer = statistics.median(p[1] for p in pairs), statistics.median(p[0] for p in pairs)
        claim(
            f"time to first token with a shared prefix of {PREFIX} tokens ({name}, {given.kind})", ours=ours, peer=peer,
            unit="s", ratio=peer / ours, bar=10.0, ok=peer >= 10 * ours, samples=pairs, quick=given.quick,
        )  # fmt: skip


if __name__ == "__main__":
    main()
