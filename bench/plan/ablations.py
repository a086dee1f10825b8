"""What else might make a quickstart better: settings of its training, each moved by itself, against the defaults.

    .venv/bin/python bench/plan/ablations.py --store .whorl [--steps 1800] [--seeds 1] [--only 'rows of 512']
    .venv/bin/python bench/plan/ablations.py --store .whorl --quick

The store must hold a quickstart, whose corpus is used. All train the planned shape for an equal number of tokens; the time
of a step is measured beside (the faster of two short timings), since a lever that costs time must pay for it. Bits per byte
are those of the whole validation split, in windows of 512 tokens. The claim: no lever is more than 1 % better than the
defaults, the mean over the seeds, counted at equal time: what takes longer steps is charged the text that it would not have
seen, by the planner's law.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim
from bench.plan.scaling_sweep import Quiet, token_set

from whorl.evals.likelihood import bits_per_byte, document_nats
from whorl.machine.device_probe import probe
from whorl.models.decoder import matrix_params
from whorl.plan.cost import decoder_config
from whorl.plan.scaling_law import expected_bits_per_byte
from whorl.store import Store
from whorl.tokens.shards import TokenSet
from whorl.train.job import Job
from whorl.train.lm.pretrain import pretrain
from whorl.train.profiling.step_timer import time_steps

LEVERS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "rows of 512": {"length": 512, "batch_rows": 4},
    "memories of 131,072 rows": {"model": {"ngram_buckets": 131_072}},
    "a memory of order 4 too": {"model": {"ngram_orders": (2, 3, 4)}},
    "memories half as fast": {"optim": {"memory_rate": 0.025}},
    "memories twice as fast": {"optim": {"memory_rate": 0.1}},
    "matrices at 0.014": {"optim": {"matrix_rate": 0.014}},
    "matrices at 0.03": {"optim": {"matrix_rate": 0.03}},
    "embedding at 0.01": {"optim": {"embedding_rate": 0.01}},
    "decay over 0.7": {"schedule": {"decay": 0.7}},
    "decay over 0.98, to 0": {"schedule": {"decay": 0.98, "floor": 0.0}},
    "decay to 0": {"schedule": {"floor": 0.0}},
    "averaged weights, 0.995": {"ema": 0.995},
}


def job_of(tokens: Path, change: dict[str, Any], steps: int, replicas: int, dtype: str, device: str) -> Job:
    """The planned shape with `change`: fields of a job, and under `model` those of its shape."""
    more = dict(change)
    model = decoder_config(192, 3, 1024).model_copy(update=more.pop("model", {}))
    base = {
        "length": 256,
        "batch_rows": 8,
        "steps": steps,
        "replicas": replicas,
        "dtype": dtype,
        "device": device,
    }
    return Job.model_validate({"tokens": str(tokens), "model": model, "evaluations": 1, **base, **more})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", default=None)
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "whorl-sweep")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--only", action="append", help="these levers, and the defaults")
    parser.add_argument("--quick", action="store_true")
    a = parser.parse_args()
    steps = a.steps or (40 if a.quick else 1800)
    tokens = token_set(Store(a.store), 1024, a.cache)
    split, machine = TokenSet(tokens).split("validation"), probe()
    names = [n for n in LEVERS if n == "defaults" or not a.only or n in a.only]
    bits: dict[str, list[float]] = {}
    cost: dict[str, float] = {}
    for name in names:
        job = job_of(tokens, LEVERS[name], steps, a.replicas, machine.dtype, machine.device)
        cost[name] = min(time_steps(job, 1.0).step_seconds for _ in range(2))
    for seed in range(a.seeds):
        for name in names:
            job = job_of(tokens, LEVERS[name], steps, a.replicas, machine.dtype, machine.device)
            with tempfile.TemporaryDirectory() as scratch:
                model = pretrain(
                    job.model_copy(update={"seed": seed}), Path(scratch), Quiet(), checkpoint_seconds=1e9
                )
            nats = sum(document_nats(model.eval(), split.iter_documents(), 512))
            bits.setdefault(name, []).append(bits_per_byte(nats, split.n_bytes))
            print(
                f"{name:26} seed {seed}: {bits[name][-1]:.4f}, {cost[name] * 1e3:.1f} ms a step", flush=True
            )

    def charged(name: str) -> float:
        """Bits per byte at the time that the defaults take."""
        m = decoder_config(192, 3, 1024)
        size, seen = matrix_params(m) - m.vocab_size * m.d_model, steps * 8 * 256 * split.n_bytes / len(split)
        less = seen * cost["defaults"] / cost[name]
        law = expected_bits_per_byte(size, less, m.vocab_size) / expected_bits_per_byte(
            size, seen, m.vocab_size
        )
        return statistics.mean(bits[name]) * law

    means = {name: charged(name) for name in bits}
    best = min((n for n in means if n != "defaults"), key=means.__getitem__)
    ratio = means["defaults"] / means[best]
    claim(
        f"the defaults against the best lever ({best}) at equal time", ours=means["defaults"], peer=means[best],
        unit=f"bits per byte after {steps} steps", ratio=ratio, bar=1.01, ok=ratio <= 1.01, quick=a.quick,
        samples=[{"lever": n, "bits_per_byte": v, "step_s": cost[n], "charged": means[n]} for n, v in bits.items()],
    )  # fmt: skip


if __name__ == "__main__":
    main()
