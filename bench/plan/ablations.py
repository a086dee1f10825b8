"""Single changes of a quickstart's training settings, each against the defaults.

    python bench/plan/ablations.py --store .whorl [--steps 1800] [--seeds 1] [--only 'rows of 512']
    python bench/plan/ablations.py --store .whorl --quick     # the variant that was the best of short runs

The store must hold a quickstart, whose corpus is used. All variants train the planned shape for an equal number of
tokens. The step time of each is the faster of two short timings, because a change that costs time must pay for it. Bits
per byte are those of the whole validation split, in the evaluation window (four times the row). The script has the
planner's defaults.

The claim: no change is more than 1 % better than the defaults at equal time, as a mean over the seeds. A variant with
slower steps would see less text in that time; its bits per byte are corrected for this by the planner's scaling law.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse, sized
from bench.plan._tiny_store import cache_folder, open_store
from bench.plan.scaling_sweep import SilentCallback, token_set, validation_bits

from whorl.machine.device_probe import probe
from whorl.plan.accounting.model_cost import decoder_config, training_cost
from whorl.plan.laws.law import fitted_law
from whorl.plan.planner import LONG_RATIO
from whorl.tokens.shards import TokenSet
from whorl.train.job import Job
from whorl.train.lm.pretrain import pretrain
from whorl.train.profiling.step_timer import time_steps

VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "no long rows": {"long_ratio": 0.0},
    "long rows in 0.05 of the steps": {"long_ratio": 0.05},
    "long rows in 0.2 of the steps": {"long_ratio": 0.2},
    "rows of 512": {"seq_len": 512, "batch_size": 4, "long_ratio": 0.0},
    "no n-gram embedding": {"model": {"ngram_orders": ()}},
    "keys not smeared": {"model": {"smear_keys": False}},
    "n-gram tables of 131,072 rows": {"model": {"ngram_buckets": 131_072}},
    "n-gram orders 2, 3 and 4": {"model": {"ngram_orders": (2, 3, 4)}},
    "lr_ngram 0.025": {"optim": {"lr_ngram": 0.025}},
    "lr_ngram 0.1": {"optim": {"lr_ngram": 0.1}},
    "lr_muon 0.014": {"optim": {"lr_muon": 0.014}},
    "lr_muon 0.03": {"optim": {"lr_muon": 0.03}},
    "lr_embedding 0.01": {"optim": {"lr_embedding": 0.01}},
    "decay_ratio 0.7": {"schedule": {"decay_ratio": 0.7}},
    "decay_ratio 0.98, to 0": {"schedule": {"decay_ratio": 0.98, "min_lr_ratio": 0.0}},
    "min_lr_ratio 0": {"schedule": {"min_lr_ratio": 0.0}},
    "EMA of the weights, 0.995": {"ema": 0.995},
}
WIDTH, DEPTH, VOCABULARY, SEQ_LEN = sized((192, 3, 1024, 256), (64, 2, 512, 64))


def job_of(tokens: Path, change: dict[str, Any], **base: Any) -> Job:
    """The planned shape with `change`: fields of a job; `model` holds arguments of `whorl_decoder`."""
    more = dict(change)
    length = more.get("seq_len", SEQ_LEN)
    model = decoder_config(WIDTH, DEPTH, VOCABULARY, trained_length=length, **more.pop("model", {}))
    fixed = {"tokens": str(tokens), "model": model, "seq_len": SEQ_LEN, "batch_size": 8, "evaluations": 1,
             "long_ratio": LONG_RATIO}  # fmt: skip
    return Job.model_validate({**fixed, **base, **more})


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--store", default=None)
        parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "whorl-sweep")
        parser.add_argument("--steps", type=int)
        parser.add_argument("--seeds", type=int, default=1)
        parser.add_argument("--replicas", type=int, default=2)
        parser.add_argument("--only", action="append", help="these variants, and the defaults")
        parser.add_argument("--quick", action="store_true")

    only = ["rows of 512", "lr_ngram 0.1", "decay_ratio 0.98, to 0"]
    smoke = {"steps": 4, "replicas": 1, "only": only, "quick": True}
    a = parse(__doc__, arguments, smoke=smoke)
    steps = a.steps or (30 if a.quick else 1800)
    if a.quick:
        a.only = a.only or ["lr_ngram 0.1"]
    tokens = token_set(open_store(a.store), VOCABULARY, cache_folder(a.cache))
    split, machine = TokenSet(tokens).split("validation"), probe()
    base = {
        "steps": steps, "replicas": a.replicas, "dtype": machine.dtype, "device": machine.device, "compile": not a.quick
    }  # fmt: skip
    names = [n for n in VARIANTS if n == "defaults" or not a.only or n in a.only]
    bits_by_variant: dict[str, list[float]] = {}
    cost: dict[str, float] = {}
    for name in names:
        job = job_of(tokens, VARIANTS[name], **base)
        timed = [time_steps(job, sized(1.0, 0.05)) for _ in range(1 if a.quick else 2)]
        cost[name] = min(each.mean_step_seconds(job.long_ratio) for each in timed)
    for seed in range(a.seeds):
        for name in names:
            job = job_of(tokens, VARIANTS[name], **base)
            with tempfile.TemporaryDirectory() as scratch:
                model = pretrain(
                    job.model_copy(update={"seed": seed}),
                    Path(scratch),
                    SilentCallback(),
                    checkpoint_seconds=1e9,
                )
            bits = validation_bits(model, tokens, model.eval_window, every=16 if a.quick else 1)
            bits_by_variant.setdefault(name, []).append(bits)
            print(
                f"{name:26} seed {seed}: {bits_by_variant[name][-1]:.4f}, {cost[name] * 1e3:.1f} ms a step",
                flush=True,
            )

    def at_equal_time(name: str) -> float:
        """Bits per byte at the time that the defaults take, by the scaling law."""
        m = decoder_config(WIDTH, DEPTH, VOCABULARY)
        size, seen = (
            training_cost(m, batch_size=8, seq_len=SEQ_LEN, replicas=1).block_params,
            steps * 8 * SEQ_LEN * split.n_bytes / len(split),
        )
        less = seen * cost["defaults"] / cost[name]
        expected = fitted_law().loss
        law = expected(size, less, m.vocab_size) / expected(size, seen, m.vocab_size)
        return statistics.mean(bits_by_variant[name]) * float(law)

    means = {name: at_equal_time(name) for name in bits_by_variant}
    best = min((n for n in means if n != "defaults"), key=means.__getitem__)
    ratio = means["defaults"] / means[best]
    claim(
        f"the defaults against the best variant ({best}) at equal time", ours=means["defaults"], peer=means[best],
        peer_name=best,
        unit=f"bits per byte after {steps} steps", ratio=ratio, bar=1.01, ok=ratio <= 1.01, quick=a.quick,
        samples=[{"variant": n, "bits_per_byte": v, "step_s": cost[n], "at_equal_time": means[n]}
                 for n, v in bits_by_variant.items()],
    )  # fmt: skip


if __name__ == "__main__":
    main()
