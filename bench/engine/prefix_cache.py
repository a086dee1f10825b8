"""Time to first token of a prompt with a cached prefix of 1,024 tokens, against a prompt without one.

    python bench/engine/prefix_cache.py [--quick] [--kind bfloat16]

Each round uses a new prefix. The first request computes it; the second has the same prefix and 16 new ids. The engine is
otherwise idle, and the time runs from `add` to the first token. Bar: at least 10 x shorter.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse, sized
from bench.engine.support import models
from bench.engine.support.ours import ask, best_kind, made

from whorl.engine.config import EngineConfig
from whorl.engine.engine import Engine

PREFIX, TAIL = sized(1024, 128), 16


def first_token(engine: Engine, number: int, ids: list[int]) -> tuple[float, int]:
    """Seconds to the first token, and the number of cached positions."""
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
    given = parse(
        __doc__,
        lambda p: (
            p.add_argument("--quick", action="store_true"),
            p.add_argument("--kind", default=best_kind()),
        ),
        smoke={"quick": True},
    )
    for name in ("14M",) if given.quick else ("14M", "109M"):
        config = EngineConfig(max_num_seqs=4, max_model_len=2048, kv_cache_tokens=16384)
        engine = made(name, given.kind, config)
        rounds = 3 if given.quick else 7
        prefixes = models.prompts(name, rounds + 1, PREFIX)
        tails = models.prompts(name, 2 * rounds + 2, TAIL, seed=2)
        pairs = []
        for n, prefix in enumerate(prefixes):
            cold, cached = first_token(engine, 2 * n, prefix + tails[2 * n])
            warm, again = first_token(engine, 2 * n + 1, prefix + tails[2 * n + 1])
            assert cached == 0 and again == PREFIX, (cached, again)
            pairs.append((cold, warm))
        pairs = pairs[1:]  # round 0 warms up
        ours, peer = statistics.median(p[1] for p in pairs), statistics.median(p[0] for p in pairs)
        claim(
            f"time to first token with {PREFIX:,} cached prompt tokens ({name}, {given.kind})", ours=ours, peer=peer,
            unit="s", ratio=peer / ours, bar=10.0, ok=peer >= 10 * ours, samples=pairs, quick=given.quick,
            peer_name="without the cache", variant="14M" if name == "14M" else "",
        )  # fmt: skip


if __name__ == "__main__":
    main()
