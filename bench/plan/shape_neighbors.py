"""The planned shape against four neighbours at equal wall-clock time.

    python bench/plan/shape_neighbors.py --store .whorl            # 5 runs of the whole budget
    python bench/plan/shape_neighbors.py --store .whorl --quick    # 3 runs of 4 s, not compiled
    python bench/plan/shape_neighbors.py --pays                    # 24 runs on two corpora: about 35 minutes on two cores

The store must hold a quickstart. The neighbours have half and double the vocabulary, and the next narrower and the next
wider shape of the planner's ladder. All are timed first, as the planner times its choice, so that the machine is
equally quiet for each. Then each trains for the steps that fit and is scored on the validation split. The claim: no
neighbour is more than 1 % better.

`--pays` plans three budgets on Python and on C headers, and trains the plan with two seeds, and the shapes of about half and
double its size, for equal wall-clock. The claim: in five of six cases neither is better than the mean of the seeds by more
than the seeds' spread, the mean relative difference of two seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from itertools import islice, product, takewhile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse, sized, smoke
from bench.plan._tiny_store import cache_folder, open_store
from bench.plan.predictions import make, sources
from bench.plan.scaling_sweep import run, token_set

from whorl.machine.device_probe import probe
from whorl.plan.accounting.model_cost import decoder_config
from whorl.plan.ladder import ladder
from whorl.plan.planner import LOOP_OVERHEAD
from whorl.store import Store
from whorl.train.job import Job
from whorl.train.profiling.step_timer import time_steps


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--store", default=None)
        parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "whorl-sweep")
        parser.add_argument("--seconds", type=float, default=300.0)
        parser.add_argument("--pays", action="store_true")
        parser.add_argument("--budgets", nargs="*", default=["30s", "60s", "120s"])

    a = parse(__doc__, arguments, smoke={"seconds": 1.0, "budgets": ["5s"]}, quick={"seconds": 4.0})
    if a.pays:
        pays(a.budgets)
        return
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


def pays(budgets: list[str]) -> None:
    """Compare plans of two corpora with half and double their size at equal wall-clock."""
    cases: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as top:
        store, texts = Store(Path(top) / "store"), sources(Path(top) / "texts", ("python", "headers"))
        for name, budget in product(texts, budgets):
            made = make(store, f"{name}-{budget}", texts[name], budget, "tokens")
            plan = json.loads(made["plan"].file("plan.json").read_text())
            job = Job.model_validate({**plan["job"], "tokens": "-"})
            seconds = plan["expected"].get("seconds", 1.0)
            shape = job.model.d_model, job.model.n_layers
            found = {
                label: equal_time(job, made["tokens"].path, other, seconds, seed)
                for label, other, seed in (
                    ("plan", shape, 0), ("plan, seed 1", shape, 1), ("half", near(shape, 0.5), 0),
                    ("double", near(shape, 2.0), 0),
                )
            }  # fmt: skip
            cases.append({"corpus": name, "budget": budget, "plan": shape, "bits_per_byte": found})
            print(json.dumps(cases[-1]), flush=True)
    bits = [case["bits_per_byte"] for case in cases]
    spread = sum(abs(b["plan"] / b["plan, seed 1"] - 1) for b in bits) / len(bits)
    ratios = [(b["plan"] + b["plan, seed 1"]) / 2 / min(b["half"], b["double"]) for b in bits]
    held = sum(ratio <= 1 + spread for ratio in ratios)
    claim(
        "plans that neither half nor double the size beats by more than the seeds' spread", ours=held, peer=len(bits),
        peer_name="cases", unit="cases", ratio=held / len(bits), bar=0.83, ok=held >= 0.83 * len(bits), variant="pays",
        samples=[{"spread": spread, "plan_over_best": ratio, **case} for ratio, case in zip(ratios, cases, strict=True)],
    )  # fmt: skip


def near(shape: tuple[int, int], factor: float) -> tuple[int, int]:
    """The shape of the ladder whose weights in the blocks are nearest to `factor` times those of a shape."""
    size = factor * shape[0] ** 2 * shape[1]
    others = [s for s in islice(ladder(), 30) if s != shape]
    return min(others, key=lambda s: abs(math.log(s[0] ** 2 * s[1] / size)))


def equal_time(job: Job, tokens: Path, shape: tuple[int, int], seconds: float, seed: int) -> float:
    """Bits per byte of a shape that trains for the steps that fit into the seconds."""
    model = decoder_config(*shape, job.model.vocab_size)
    timing = time_steps(
        job.model_copy(update={"model": model, "long_ratio": 0.0, "compile_long": False}), sized(1.5, 0.05)
    )
    steps = int((seconds - timing.startup_seconds) / (timing.step_seconds * (1 + LOOP_OVERHEAD)))
    found = run(
        tokens,
        *shape,
        job.model.vocab_size,
        sized(max(2, steps), 2),
        replicas=job.replicas,
        compile=job.compile,
        seed=seed,
    )
    return float(found["bits_per_byte"])


if __name__ == "__main__":
    main()
