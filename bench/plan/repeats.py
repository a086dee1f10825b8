"""Text that is read several times: a model with n-gram tables, and one without.

    python bench/plan/repeats.py --store .whorl        # 15 minutes on two quiet cores
    python bench/plan/repeats.py --store .whorl --megabytes 1.5 1000 --rows 65536 4096 16 0

A random choice of 3 MB of training files trains the planner's 3 x 128 for 2,400 steps, with branches at
an eighth, a quarter and half of them. The claim: after more than FRESH_PASSES passes, which is where the planner
leaves the tables out, the model without them has fewer bits per byte, and after fewer passes that with them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse, sized
from bench.plan._tiny_store import open_store

from whorl.corpus.documents import Document
from whorl.machine.device_probe import probe
from whorl.plan.accounting.model_cost import decoder_config
from whorl.plan.config import PlanConfig
from whorl.plan.ladder import FRESH_PASSES
from whorl.plan.laws.study import DATA
from whorl.plan.laws.study_run import train_run
from whorl.plan.planner import make_plan
from whorl.tokens.shards import TokenSet, write_shards
from whorl.tokens.tokenizer import Tokenizer
from whorl.tracking.progress import Progress

FRACTIONS = (1 / 8, 1 / 4, 1 / 2, 1.0)


def subset(whole: TokenSet, tokenizer: Tokenizer, size: float, folder: Path) -> Path:
    """Write a token set with `size` bytes of training files, and all others."""
    folder.mkdir()
    for name in ("train", "validation", "test"):
        split = whole.split(name)
        sizes = np.array(split.documents["bytes"].to_pylist())
        order = np.random.default_rng(0).permutation(len(sizes))
        chosen = (
            order[: int(np.searchsorted(np.cumsum(sizes[order]), size))]
            if name == "train"
            else np.sort(order)
        )
        texts = {int(n): tokenizer.decode(split.document(n)[1:-1]).decode() for n in chosen}
        found = [Document(str(n), name, str(n), None, 0, t, len(t.encode()), None) for n, t in texts.items()]
        write_shards(found, tokenizer, folder, name)
    return folder


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--store", default=None)
        parser.add_argument("--megabytes", type=float, nargs="+", default=[3.0])
        parser.add_argument(
            "--rows", type=int, nargs="+", default=[65_536, 0], help="of each n-gram table; 0: none"
        )

    a = parse(__doc__, arguments, smoke={"megabytes": [0.03]})
    store, machine = open_store(a.store), probe()
    whole = TokenSet(store.open("quickstart/tokens").path)
    tokenizer = Tokenizer.load(store.open("quickstart/tokenizer").path)
    for size in a.megabytes:
        found, passes = dict[int, list[float]](), list[float]()
        with tempfile.TemporaryDirectory() as top:
            tokens = subset(whole, tokenizer, 1e6 * size, Path(top) / "tokens")
            split = TokenSet(tokens).split("train")
            config = PlanConfig(
                steps=sized(2400, 64), d_model=sized(128, 32), n_layers=sized(3, 1), ngram_buckets=65_536, data=DATA,
                vocab_size=whole.vocab_size, deterministic=True,
            )  # fmt: skip
            job = make_plan(config, machine, split.n_bytes, Progress.silent()).job
            passes = [share * job.steps * job.batch_size * job.seq_len / len(split) for share in FRACTIONS]
            for rows in a.rows:
                tables: dict[str, Any] = {"ngram_buckets": rows} if rows else {"ngram_orders": ()}
                model = decoder_config(
                    job.model.d_model, job.model.n_layers, whole.vocab_size, trained_length=job.model.trained_length,
                    **tables,
                )  # fmt: skip
                own = job.model_copy(update={"tokens": str(tokens), "evaluations": 1, "model": model})
                found[rows] = train_run(own, Path(top) / str(rows), FRACTIONS)
        for at, *bits in zip(passes, *found.values(), strict=True):
            print(f"{split.n_bytes / 1e6:.1f} MB, {at:.2f} passes: {bits}", flush=True)
        most, least = found[a.rows[0]], found[a.rows[-1]]
        right = [
            (few < many) == (at > FRESH_PASSES) for at, few, many in zip(passes, least, most, strict=True)
        ]
        claim(
            f"{a.rows[-1]} rows in n-gram tables are better than {a.rows[0]} after more than {FRESH_PASSES:g} passes, "
            "and not before",
            ours=least[-1], peer=most[-1], peer_name=f"{a.rows[0]} rows", unit="bits per byte after all steps",
            ratio=least[-1] / most[-1], bar=1.0, ok=all(right), variant=f"{size:g} MB",
            samples=[{"passes": passes, "bits_per_byte": {str(rows): bits for rows, bits in found.items()}}],
        )  # fmt: skip


if __name__ == "__main__":
    main()
