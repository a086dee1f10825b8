"""The suite `probes` separates model sizes: 0.3, 1 and 3 M parameters, five seeds each.

    python bench/evals/suites/probes.py --save          15 minutes of two Zen 5 cores
    python bench/evals/suites/probes.py --quick         two seeds, 10 steps, fewer items: only checks that it runs

A model sees tokens in proportion to its parameters, about 1.2 for each. Suites that compare sizes do so at a fixed ratio
(Magnusson et al. 2025, DataDecide, arXiv:2504.11393). So a difference is of size and training together. In equal steps these
sizes are not separated: see LOG.md. Learning rates are equal; each core trains one model at a time.
A probe separates the sizes if the mean scores over seeds are in the order of the sizes, and the 95 % intervals (Student's t
over seeds) of neighbors do not overlap.
Models that repeat symbols (`bench.evals.suites._repeaters`) must win no probe: none is above chance, and none above the
smallest model.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[3]))
from bench._run import claim, parse, smoke
from bench.evals.suites._repeaters import REPEATERS, RepeatingModel

import whorl
from whorl.evals.model.engine_backend import EngineBackend
from whorl.evals.runner import evaluate
from whorl.evals.statistics.intervals import mean_interval
from whorl.evals.suites.probe_lines import PROBES
from whorl.evals.suites.probes import probe_tasks, training_lines
from whorl.plan.accounting.model_cost import decoder_config
from whorl.tokens.tokenizer import Tokenizer

SIZES = {
    "0.3 M": (96, 2, 0.1),
    "1 M": (144, 4, 1 / 3),
    "3 M": (192, 7, 1.0),
}  # width, depth, share of the steps
BATCH, SEQ_LEN, VOCAB = 16, 128, 360
SYMBOLS_PER_LINE = 25
ITEMS = 500
APART = 4  # probes at least
FIRST_SEED = 8  # the number of steps was chosen with the scores of seeds 0 to 7 in view
WORKERS = 2  # models at a time, one thread each

Scores = dict[str, float]


def train_and_score(size: str, seed: int, steps: int, items: int) -> Scores:
    """Return probe -> share right of a new model. steps: of the largest."""
    torch.set_num_threads(1)
    width, depth, share = SIZES[size]
    steps = round(share * steps)
    began = time.perf_counter()
    lines = training_lines(max(steps * BATCH * SEQ_LEN // SYMBOLS_PER_LINE, 200))
    tokenizer = Tokenizer.train(lines[:3000], VOCAB)
    with tempfile.TemporaryDirectory() as folder:
        model = decoder_config(width, depth, tokenizer.vocab_size, trained_length=SEQ_LEN, ngram_orders=())
        whorl.train(
            lines, out=folder, tokenizer=tokenizer, steps=steps, batch_size=BATCH, seq_len=SEQ_LEN, seed=seed,
            evaluations=1, quiet=True, threads=1, model=model,
        )  # fmt: skip
        backend = EngineBackend.open(folder)
        results = evaluate(backend, probe_tasks(items=items, shots=0))
        found = {r.task.removeprefix("probe-"): r.measures[0].value for r in results}
        n = sum(p.numel() for p in backend.engine.model.parameters())
    text = ", ".join(f"{name} {value:.3f}" for name, value in found.items())
    print(f"{size}, seed {seed}: {n:,} parameters, {time.perf_counter() - began:.0f} s: {text}", flush=True)
    return found


def train_all(steps: int, seeds: int, items: int) -> dict[str, list[Scores]]:
    """Return size -> scores of each seed."""
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as pool:
        running = {
            (size, seed): pool.submit(train_and_score, size, seed, steps, items)
            for seed in range(FIRST_SEED, FIRST_SEED + seeds)
            for size in reversed(SIZES)  # long ones first
        }
        return {
            size: [future.result() for (of, _), future in running.items() if of == size] for size in SIZES
        }


def main() -> int:
    """Print the scores of each model and the JSON lines."""
    args = parse(
        __doc__,
        lambda p: (
            p.add_argument("--quick", action="store_true", help="two seeds, 10 steps, fewer items"),
            p.add_argument("--steps", type=int, default=1800, help="of 3 M"),
            p.add_argument("--seeds", type=int, default=5),
        ),
        smoke={"quick": True, "steps": 40, "seeds": 2},
    )
    steps, seeds = args.steps, args.seeds
    if args.quick and not smoke():
        steps, seeds = 10, 2
    items = 20 if smoke() else ITEMS // 5 if args.quick else ITEMS
    scores, tasks = train_all(steps, seeds, items), probe_tasks(items=items, shots=0)
    apart = []
    for probe in PROBES:
        intervals = [mean_interval(np.array([s[probe] for s in scores[size]])) for size in SIZES]
        separate = all(a.high < b.low for a, b in pairwise(intervals))
        apart += [probe] * separate
        shown = "   ".join(f"{i.mean:.3f} ({i.low:.3f} to {i.high:.3f})" for i in intervals)
        print(f"{probe:<11} {shown}   {'apart' if separate else ''}")
    claim(
        f"probes with 0.3, 1 and 3 M parameters in order and intervals apart: {', '.join(apart) or 'none'}; {seeds} seeds",
        ours=len(apart), peer=len(PROBES), unit="probes", ratio=len(apart) / APART, bar=1.0,
        ok=smoke() or len(apart) >= APART, quick=args.quick, variant="sizes", peer_name="all probes",
        samples=[{size: [round(s[probe], 4) for s in scores[size]] for size in SIZES} for probe in PROBES],
    )  # fmt: skip
    wins = []
    for rule in REPEATERS:
        for result in evaluate(RepeatingModel(rule), tasks):
            probe, acc = result.task.removeprefix("probe-"), result.measure("acc")
            limit = 0.25 + 3 * math.sqrt(0.25 * 0.75 / acc.n)  # 21 comparisons
            wins += [f"{rule} on {probe}"] if acc.value > limit else []
    claim(
        f"probes that a model wins by repeating itself, above chance: {', '.join(wins) or 'none'}",
        ours=len(wins), peer=0, unit="wins", ratio=float(not wins), bar=1.0, ok=not wins, quick=args.quick,
        variant="repeats", peer_name="none",
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
