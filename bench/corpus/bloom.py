"""The Bloom filter: measured false-positive rate and formula, and copies within a batch.

    python bench/corpus/bloom.py [--items 1000000] [--save]

Filters for rates of 10 %, 1 % and 0.1 % get `--items` keys in batches. Every tenth key of a batch has a copy in it. As many
other keys are looked up. The figure is the largest difference between the measured rate and (1 - e^(-kn/m))^k, in standard
errors of the measurement. No copy may be missed.
"""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import numpy as np
from bench._run import claim, parse

from whorl.corpus.deduplication import BloomFilter

RATES, BATCH = (0.1, 0.01, 0.001), 50_000


def measure(n: int, rate: float) -> dict[str, float]:
    """Fill a filter with n distinct keys and their copies, and query n others."""
    keys = np.random.default_rng(1).permutation(np.arange(2 * n, dtype=np.uint64))
    filled, copies, missed = BloomFilter(n, rate), 0, 0
    begin = time.perf_counter()
    for at in range(0, n, BATCH):
        fresh = keys[at : min(at + BATCH, n)]
        again = fresh[::10]
        found = filled.add(np.concatenate([fresh, again]))
        copies, missed = copies + len(again), missed + int((~found[len(fresh) :]).sum())
    seconds = time.perf_counter() - begin
    measured = float(filled.contains(keys[n:]).mean())
    formula = (1 - math.exp(-filled.n_hashes * n / filled.n_bits)) ** filled.n_hashes
    error = math.sqrt(formula * (1 - formula) / n)
    return {
        "rate": rate, "measured": measured, "formula": formula, "by_set_bits": filled.false_positive_rate(),
        "standard_errors": abs(measured - formula) / error, "copies": copies, "missed": missed,
        "bits_per_key": filled.n_bits / n, "keys_per_second": round((n + copies) / seconds),
    }  # fmt: skip


def main() -> None:
    args = parse(
        __doc__,
        lambda p: p.add_argument("--items", type=int, default=1_000_000),
        smoke={"items": 20_000},
    )
    samples = [measure(args.items, rate) for rate in RATES]
    worst, missed = max(s["standard_errors"] for s in samples), sum(s["missed"] for s in samples)
    claim(
        "The Bloom filter's measured false-positive rate is that of the formula",
        ours=round(worst, 2), peer=4, peer_name="standard errors", unit="standard errors", ratio=worst, bar=4,
        ok=worst <= 4 and not missed, samples=samples,
    )  # fmt: skip


if __name__ == "__main__":
    main()
