"""What brings the fall forward: n-gram memories and smeared keys, each switched off, at an equal number of steps.

    .venv/bin/python bench/plan/ngram_token_shift.py --store .whorl [--steps 1500] [--seeds 3]

The store must hold a quickstart, whose corpus is used. Reports bits per byte on the validation split for each variant and
seed; the claim is that the decoder as it stands needs at most 0.95 x the bits of the same decoder without both.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim
from bench.plan.scaling_sweep import Quiet, token_set

from whorl.evals.likelihood import bits_per_byte, document_nats
from whorl.machine.device_probe import probe
from whorl.plan.cost import decoder_config
from whorl.store import Store
from whorl.tokens.shards import TokenSet
from whorl.train.job import Job
from whorl.train.lm.pretrain import pretrain

VARIANTS = {
    "as it stands": {},
    "no n-gram memory": {"ngram_orders": ()},
    "keys not smeared": {"smear_keys": False},
    "neither": {"ngram_orders": (), "smear_keys": False},
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", default=None)
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "whorl-sweep")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=2)
    a = parser.parse_args()
    tokens = token_set(Store(a.store), 1024, a.cache)
    split, machine = TokenSet(tokens).split("validation"), probe()
    found: dict[str, list[float]] = {}
    for name, change in VARIANTS.items():
        for seed in range(a.seeds):
            job = Job(
                tokens=str(tokens), model=decoder_config(128, 3, 1024).model_copy(update=change), seq_len=256, batch_size=8,
                steps=a.steps, seed=seed, replicas=a.replicas, dtype=machine.dtype, evaluations=1,
            )  # fmt: skip
            with tempfile.TemporaryDirectory() as scratch:
                model = pretrain(job, Path(scratch), Quiet(), checkpoint_seconds=1e9)
            bits = bits_per_byte(sum(document_nats(model, split.iter_documents(), 512)), split.n_bytes)
            found.setdefault(name, []).append(bits)
            print(f"{name:20} seed {seed}: {bits:.4f}", flush=True)
    means = {name: statistics.mean(values) for name, values in found.items()}
    ratio = means["as it stands"] / means["neither"]
    claim(
        "n-gram memories and smeared keys", ours=means["as it stands"], peer=means["neither"],
        unit=f"bits per byte after {a.steps} steps", ratio=ratio, bar=0.95, ok=ratio <= 0.95,
        quick=a.seeds < 3, samples=[{"variant": n, "bits_per_byte": v} for n, v in found.items()],
    )  # fmt: skip


if __name__ == "__main__":
    main()
