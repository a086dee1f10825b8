"""Hogwild!, asynchronous parameter servers and DiLoCo: what they gain, and what they cost in quality.

    python bench/parallel/asynchronous.py --save            # all four claims, about half an hour
    python bench/parallel/asynchronous.py --only sparse     # or slow, quality

sparse   Two processes move one table of logistic regression without a lock (Niu et al. 2011), against two processes with a
         table each. Samples per second, median of alternating rounds.
slow     One worker of two takes three times as long: tokens per second of the asynchronous parameter server against the
         synchronous one.
quality  The recipe `asynchronous`, each seed with another order of the data and other weights: bits per byte of the first
         60 kB of the test split after equal tokens, of tables-only Hogwild! and of DiLoCo (H = 16) against synchronous. The
         interval is Student's t over the seeds' ratios; its upper end must be below the bar.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse
from bench.parallel._sparse import AloneWorker, SparseLogistic

from whorl.evals.statistics.comparison import paired_difference
from whorl.plan.training_plan import TrainingPlan
from whorl.recipes import load_recipe, run_recipe
from whorl.recipes.stage import token_set_likelihood
from whorl.store import Store
from whorl.tokens.shards import TokenSet
from whorl.tokens.token_encoder import TokenEncoder
from whorl.tracking.progress import Progress
from whorl.train.asynchronous.methods import METHODS, AsynchronousMethod
from whorl.train.asynchronous.problems import LanguageModelProblem
from whorl.train.asynchronous.server import train
from whorl.train.asynchronous.worker import Worker
from whorl.train.job import Job

BARS = {"hogwild": 0.005, "diloco": 0.02}


def rate_of(run: dict[str, Any]) -> float:
    """Return tokens or samples per second between the first and the last evaluation: without the start of a worker."""
    first, last = run["curve"][0], run["curve"][-1]
    return float((last["tokens"] - first["tokens"]) / (last["seconds"] - first["seconds"]))


def sparse(args: argparse.Namespace) -> None:
    """Compare samples per second on one shared table with those on two tables."""
    method = AsynchronousMethod("no lock", staleness=None, unlocked=True, local_steps=50)
    problem, found, last = SparseLogistic(), dict[str, list[float]](), dict[str, Any]()
    for _ in range(args.rounds):
        for name, kind, n in (("one", Worker, 1), ("alone", AloneWorker, 2), ("hogwild", Worker, 2)):
            network, last = train([kind(problem, method, n)] * n, args.sparse_steps, evaluations=10)
            found.setdefault(name, []).append(rate_of(last))
            print(f"{name:<8} {found[name][-1]:,.0f} samples/s; loss {problem.loss(network):.4f}", flush=True)
    rate = {name: statistics.median(values) for name, values in found.items()}
    gains = {name: rate[name] / rate["one"] for name in ("alone", "hogwild")}
    print(f"gain over one process: {gains}; lost {last['lost']} of {last['moved']} rows")
    ratio = gains["hogwild"] / gains["alone"]
    claim(
        "Hogwild! on sparse logistic regression, 2 processes: gain against 2 that share nothing",
        ours=rate["hogwild"], peer=rate["alone"], unit="samples/s", ratio=ratio, bar=0.85, ok=ratio >= 0.85,
        samples=[found, {"lost": last["lost"], "moved": last["moved"]}], peer_name="nothing shared", variant="sparse",
    )  # fmt: skip


def slow(args: argparse.Namespace, job: Job) -> None:
    """Compare tokens per second with one slow worker."""
    found: dict[str, list[float]] = {"synchronous": [], "asynchronous": []}
    problem = LanguageModelProblem(job)
    for _ in range(args.rounds):
        for name in found:
            workers = [Worker(problem, METHODS[name], 2, factor) for factor in (1.0, 3.0)]
            _, run = train(workers, args.slow_steps, evaluations=6)
            found[name].append(rate_of(run))
            print(f"{name:<13} {found[name][-1]:,.0f} tokens/s; staleness {run['lags']}", flush=True)
    ours, peer = statistics.median(found["asynchronous"]), statistics.median(found["synchronous"])
    claim(
        "asynchronous parameter server with one worker of two slowed threefold", ours=ours, peer=peer, unit="tokens/s",
        ratio=ours / peer, bar=1.5, ok=ours >= 1.5 * peer, samples=[found], peer_name="synchronous", variant="slow",
    )  # fmt: skip


def quality(args: argparse.Namespace, job: Job, tokens: TokenSet, encoder: TokenEncoder) -> None:
    """Compare bits per byte after equal tokens."""
    found: dict[str, list[float]] = {"synchronous": [], **{name: [] for name in BARS}}
    figures: list[dict[str, Any]] = []
    for seed in range(args.seeds):
        problem = LanguageModelProblem(job.model_copy(update={"seed": seed}))
        for name, values in found.items():
            network, run = train([Worker(problem, METHODS[name], 2)] * 2, job.steps)
            measured = token_set_likelihood(tokens, network, encoder)  # type: ignore[arg-type]
            assert measured is not None
            values.append(measured.bits_per_byte)
            figures.append(
                {"seed": seed, "method": name, "bits": values[-1], "lost": run["lost"], "moved": run["moved"]}
            )
            print(figures[-1] | {"seconds": round(run["seconds"], 1)}, flush=True)
    for name, bar in BARS.items():
        excess = [one / other - 1 for one, other in zip(found[name], found["synchronous"], strict=True)]
        apart = paired_difference(excess, [0.0] * len(excess))
        ratio, high = 1 + apart.difference, apart.high
        print(f"{name}: {apart.difference:+.2%} ({apart.low:+.2%} to {apart.high:+.2%})")
        claim(
            f"{name}, 2 workers, equal tokens: held-out bits per byte against synchronous",
            ours=statistics.mean(found[name]), peer=statistics.mean(found["synchronous"]), unit="bits per byte",
            ratio=ratio, bar=1 + bar, ok=high <= bar, samples=[found[name], found["synchronous"], [apart.low, apart.high]],
            peer_name="synchronous", quick=args.seeds < 5, variant=name,
        )  # fmt: skip


def main() -> None:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--only", choices=["sparse", "slow", "quality"])
        parser.add_argument("--seeds", type=int, default=5)
        parser.add_argument("--rounds", type=int, default=5)
        parser.add_argument("--steps", type=int, default=320, help="of `quality`")

    more = {"sparse_steps": 3000, "slow_steps": 60, "sets": []}
    small = [
        "ingest.include=['json/**', 'email/**']",
        "plan.d_model=32",
        "plan.n_layers=1",
        "plan.vocab_size=300",
    ]
    tiny = {"seeds": 2, "rounds": 1, "steps": 16, "sparse_steps": 200, "slow_steps": 8, "sets": small}
    args = parse(__doc__, add, smoke=tiny)
    for name, value in more.items():
        setattr(args, name, getattr(args, name, value))
    torch.set_num_threads(1)
    if args.only in (None, "sparse"):
        sparse(args)
    if args.only == "sparse":
        return
    with tempfile.TemporaryDirectory() as folder:
        recipe = load_recipe("asynchronous", sets=[f"plan.steps={args.steps}", *args.sets])
        made = run_recipe(recipe, Store(Path(folder)), Progress.silent(), until="tokens").artifacts
        plan = TrainingPlan.model_validate_json(made["plan"].file("plan.json").read_bytes())
        tokens, encoder = TokenSet(made["tokens"].path), TokenEncoder.load(made["tokenizer"].path)
        model = plan.job.model.model_copy(
            update={"vocab_size": max(plan.job.model.vocab_size, tokens.vocab_size)}
        )
        fixed = {"tokens": str(tokens.folder), "model": model, "device": "cpu", "compile": False, "replicas": 1,
                 "threads": 1, "long_ratio": 0.0, "seconds": None, "serial_loader": True}  # fmt: skip
        job = plan.job.model_copy(update=fixed)
        if args.only in (None, "slow"):
            slow(args, job)
        if args.only in (None, "quality"):
            quality(args, job, tokens, encoder)


if __name__ == "__main__":
    main()
