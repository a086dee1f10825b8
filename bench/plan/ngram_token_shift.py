"""Bits per byte without n-gram embeddings and without smeared keys, at an equal number of steps.

    python bench/plan/ngram_token_shift.py --store .whorl [--steps 1500] [--seeds 3]
    python bench/plan/ngram_token_shift.py --store .whorl --quick

The store must hold a quickstart, whose corpus is used. Reports bits per byte on the validation split for each variant
and seed. Both parts bring the loss drop of induction forward. The claim: the default decoder needs at most 0.95 times
the bits of the same decoder without both.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse, sized
from bench.plan._tiny_store import cache_folder, open_store
from bench.plan.scaling_sweep import SilentCallback, token_set, validation_bits

from whorl.machine.device_probe import probe
from whorl.plan.cost import decoder_config
from whorl.train.job import Job
from whorl.train.lm.pretrain import pretrain

VARIANTS = {
    "default": {},
    "no n-gram embedding": {"ngram_orders": ()},
    "keys not smeared": {"smear_keys": False},
    "neither": {"ngram_orders": (), "smear_keys": False},
}
WIDTH, DEPTH, VOCABULARY, SEQ_LEN = sized((128, 3, 1024, 256), (64, 2, 512, 64))


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--store", default=None)
        parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "whorl-sweep")
        parser.add_argument("--steps", type=int, default=1500)
        parser.add_argument("--seeds", type=int, default=3)
        parser.add_argument("--replicas", type=int, default=2)

    quick = {"steps": 40, "seeds": 1}
    a = parse(__doc__, arguments, smoke={"steps": 4, "replicas": 1}, quick=quick)
    tokens = token_set(open_store(a.store), VOCABULARY, cache_folder(a.cache))
    machine = probe()
    found: dict[str, list[float]] = {}
    for name, change in VARIANTS.items():
        if a.quick and name not in ("default", "neither"):
            continue
        for seed in range(a.seeds):
            job = Job(
                tokens=str(tokens), model=decoder_config(WIDTH, DEPTH, VOCABULARY, **change),
                seq_len=SEQ_LEN, batch_size=8, steps=a.steps, compile=not a.quick, seed=seed, replicas=a.replicas,
                dtype=machine.dtype, evaluations=1,
            )  # fmt: skip
            with tempfile.TemporaryDirectory() as scratch:
                model = pretrain(job, Path(scratch), SilentCallback(), checkpoint_seconds=1e9)
            bits = validation_bits(model, tokens, 512, every=16 if a.quick else 1)
            found.setdefault(name, []).append(bits)
            print(f"{name:20} seed {seed}: {bits:.4f}", flush=True)
    means = {name: statistics.mean(values) for name, values in found.items()}
    ratio = means["default"] / means["neither"]
    claim(
        "n-gram embeddings and smeared keys", ours=means["default"], peer=means["neither"],
        peer_name="the same decoder without both",
        unit=f"bits per byte after {a.steps} steps", ratio=ratio, bar=0.95, ok=ratio <= 0.95,
        quick=a.quick, samples=[{"variant": n, "bits_per_byte": v} for n, v in found.items()],
    )  # fmt: skip


if __name__ == "__main__":
    main()
