"""The planned shape against four neighbours at equal wall-clock time.

    python bench/plan/shape_neighbors.py --store .whorl            # 5 runs of the whole budget
    python bench/plan/shape_neighbors.py --store .whorl --quick    # 3 runs of 4 s, not compiled

The store must hold a quickstart. The neighbours have half and double the vocabulary, and the next narrower and the next
wider shape of the planner's ladder. All are timed first, as the planner times its choice, so that the machine is
equally quiet for each. Then each trains for the steps that fit and is scored on the validation split. The claim: no
neighbour is more than 1 % better.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from itertools import islice, takewhile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse, sized, smoke
from bench.plan._tiny_store import cache_folder, open_store
from bench.plan.scaling_sweep import run, token_set

from whorl.machine.device_probe import probe
from whorl.plan.cost import decoder_config
from whorl.plan.ladder import ladder
from whorl.plan.planner import LOOP_OVERHEAD
from whorl.train.job import Job
from whorl.train.profiling.step_timer import time_steps


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--store", default=None)
        parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "whorl-sweep")
        parser.add_argument("--seconds", type=float, default=300.0)

    a = parse(__doc__, arguments, smoke={"seconds": 1.0}, quick={"seconds": 4.0})
    store, cache = open_store(a.store), cache_folder(a.cache)
    plan = json.loads(store.open("quickstart/plan").file("plan.json").read_text())
    job = Job.model_validate({**plan["job"], "tokens": "-"})
    if a.quick:
        job = job.model_copy(update={"compile": False})
    width, depth, vocabulary = job.model.d_model, job.model.n_layers, job.model.vocab_size
    smaller = [*takewhile(lambda shape: shape != (width, depth), ladder())]
    larger = next(islice(ladder(), len(smaller) + 1, None))
    shapes = {
        "plan": (width, depth, vocabulary),
        "half the vocabulary": (width, depth, max(vocabulary // 2, 320)),
        "double the vocabulary": (width, depth, vocabulary * 2),
        "narrower": (*(smaller or [(width, depth)])[-1], vocabulary),
        "wider": (*larger, vocabulary),
    }
    if a.quick and not smoke():  # the best neighbours of short runs
        shapes = {name: shapes[name] for name in ("plan", "half the vocabulary", "narrower")}
    machine, steps, found = probe(), {}, {}
    for name, (w, d, v) in shapes.items():
        candidate = job.model_copy(update={"model": decoder_config(w, d, v), "dtype": machine.dtype})
        timing = time_steps(candidate, sized(1.0 if a.quick else 2.0, 0.05))
        startup = 0.0 if a.quick else timing.startup_seconds
        steps[name] = max(2, int((a.seconds - startup) / (timing.step_seconds * (1 + LOOP_OVERHEAD))))
        steps[name] = sized(steps[name], 2)
        print(f"{name:22} {d} x {w}, {v:6,}: {timing.step_seconds * 1e3:5.1f} ms a step", flush=True)
    for name, (w, d, v) in shapes.items():
        tokens = token_set(store, v, cache)
        found[name] = run(
            tokens,
            w,
            d,
            v,
            steps[name],
            replicas=job.replicas,
            compile=job.compile,
            every=16 if a.quick else 1,
        )
        print(
            f"{name:22} {steps[name]:6,} steps, {found[name]['seconds']:5.0f} s, {found[name]['bits_per_byte']:.4f}",
            flush=True,
        )
    best = min(r["bits_per_byte"] for n, r in found.items() if n != "plan")
    ours = found["plan"]["bits_per_byte"]
    claim(
        "the planned shape is not beaten by a neighbour at equal wall-clock", ours=ours, peer=best,
        peer_name="best neighbour", unit="bits per byte",
        ratio=ours / best, bar=1.01, ok=ours <= 1.01 * best, quick=a.quick,
        samples=[{"name": n, **r} for n, r in found.items()],
    )  # fmt: skip


if __name__ == "__main__":
    main()
