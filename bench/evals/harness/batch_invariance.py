"""Scores with and without the batch-invariant mode: equal bits at any batch size, order and cache; the cost of the mode.

    python bench/evals/harness/batch_invariance.py --save           about 2 minutes
    python bench/evals/harness/batch_invariance.py --quick          a quarter of the items

A Llama of 10 million parameters in fp32; items of four choices (`_tasks.py`). Each run has 1, 8 or 64 requests at once, in a
random order, first with an empty cache and then with the one that the first run left.

Bars: 0 different scores in the mode, 0 different choices without it. Shown: scores that differ without the mode, their
largest difference, and the seconds of both at 64 requests.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from bench._run import claim, parse
from bench.evals.harness._tasks import CHOICES, choice_items, write_model

from whorl.evals.model.engine_backend import EngineBackend
from whorl.evals.model.requests import Request, Response, Score, ScoreRequest
from whorl.machine.device_probe import probe

SIZES = (1, 8, 64)
MOST_COST = 5.0  # no demand: the cost is shown
Scores = dict[int, tuple[float, ...]]


def score(backend: EngineBackend, requests: list[Request], order: list[int]) -> tuple[Scores, float]:
    """Return the log-probabilities by number of the request, and the seconds."""
    found: dict[int, Response] = {}
    began = time.perf_counter()
    backend.respond([requests[n] for n in order], lambda n, response: found.__setitem__(order[n], response))
    seconds = time.perf_counter() - began
    return {n: r.log_probs for n, r in found.items() if isinstance(r, Score)}, seconds


def chosen(scores: Scores) -> list[int]:
    """Return the likeliest choice of each item."""
    totals = [sum(scores[n]) for n in range(len(scores))]
    groups = [totals[n : n + CHOICES] for n in range(0, len(totals), CHOICES)]
    return [max(range(CHOICES), key=group.__getitem__) for group in groups]


def main() -> None:
    """Run all sizes with and without the mode."""
    a = parse(__doc__, lambda p: p.add_argument("--quick", action="store_true"), smoke={"quick": True})
    probe().apply()
    items = choice_items(4 if a.smoke else 25 if a.quick else 100, 0, 2)
    requests: list[Request] = [ScoreRequest(i["context"], f" {rest}") for i in items for rest in i["choices"]]
    runs, seconds = [], {}
    with tempfile.TemporaryDirectory() as temporary:
        size = {"d_model": 64, "n_layers": 2} if a.smoke else {"d_model": 320, "n_layers": 6}
        folder = write_model(Path(temporary) / "model", "gpt2", steps=0, length=2048, **size)
        base: dict[bool, Scores] = {}
        for mode in (True, False):
            for batch in SIZES:
                backend = EngineBackend.open(folder, batch_size=batch, batch_invariant=mode)
                for cache in ("empty", "filled"):
                    order = random.Random(batch).sample(range(len(requests)), len(requests))
                    found, took = score(backend, requests, order)
                    first = base.setdefault(mode, found)
                    seconds[mode, batch, cache] = took
                    apart = [abs(x - y) for n in first for x, y in zip(first[n], found[n], strict=True)]
                    same = zip(chosen(base[True]), chosen(found), strict=True)
                    runs.append({
                        "mode": mode, "batch": batch, "cache": cache, "seconds": round(took, 3),
                        "scores_differ": sum(first[n] != found[n] for n in first), "largest": max(apart),
                        "choices_differ": sum(x != y for x, y in same),
                    })  # fmt: skip
                    print(runs[-1], flush=True)
    differ = sum(run["scores_differ"] for run in runs if run["mode"])
    others = sum(run["choices_differ"] for run in runs)
    claim(
        f"{len(requests)} scores in the batch-invariant mode that differ at batch 1, 8 and 64, cache empty and filled",
        ours=differ, peer=sum(run["scores_differ"] for run in runs if not run["mode"]), unit="scores", ratio=differ, bar=0,
        ok=not differ and not others, samples=runs, quick=a.quick, peer_name="without the mode",
    )  # fmt: skip
    cost, bar = seconds[True, 64, "empty"] / seconds[False, 64, "empty"], MOST_COST
    claim(
        "cost of the batch-invariant mode: seconds with it / without, 64 requests at once, cache empty",
        ours=seconds[True, 64, "empty"], peer=seconds[False, 64, "empty"], unit="s", ratio=cost, bar=bar, ok=cost <= bar,
        quick=a.quick, peer_name="without the mode", variant="cost",
    )  # fmt: skip


if __name__ == "__main__":
    main()
