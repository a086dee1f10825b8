"""One stable run with decay branches against a separate run for every budget: bits per byte, and steps in all.

    python bench/train/decay_branches.py --quick      # a smaller model, fewer files, 160 steps, one seed
    python bench/train/decay_branches.py [--steps 2400] [--seeds 3] [--decay 0.5] [--work FOLDER]

A small decoder trains on the interpreter's standard library in float32. The figures are of quality, not of speed. Ours
is a run of all the steps that saves its state, with branches for an eighth, a quarter and half of the steps
(`train/lm/decay_branches.py`). The peer is a separate run planned for each of these budgets, whose warm-up is also a
fraction of its steps. Bits per byte are those of the test split, document by document.

The claim: no branch is more than 0.5 % worse than its peer, as a mean over the seeds, for fewer steps in all. Three
seeds of 2,400 steps take about twenty minutes on two cores.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from bench._run import claim, parse, smoke
from bench.plan._tiny_store import open_store
from bench.plan.scaling_sweep import SilentCallback

from whorl.evals.likelihood import bits_per_byte, document_nats
from whorl.machine.device_probe import probe
from whorl.models import LanguageModel, whorl_decoder
from whorl.recipes import parse_recipe, run_recipe
from whorl.store import Store
from whorl.tokens.shards import TokenSet
from whorl.tracking.progress import Progress
from whorl.train.job import Job
from whorl.train.lm import decay_branches as branches
from whorl.train.lm.pretrain import pretrain

SHARES = (0.125, 0.25, 0.5)
BAR = 1.005
RECIPE = """
name = "branches"
[steps.ingest]
sources = ["python-stdlib"]
[steps.curate]
parents = ["ingest"]
test_bytes = 100000
[steps.tokenizer]
parents = ["ingest", "curate"]
vocab_size = 1024
[steps.tokens]
parents = ["ingest", "curate", "tokenizer"]
"""

FEW_FILES = 'include = ["[a-e]*.py"]\n'  # with --quick


def train(job: Job, folder: Path, **more: Any) -> LanguageModel:
    return pretrain(job, folder, SilentCallback(), checkpoint_seconds=1e9, **more)


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--quick", action="store_true")
        parser.add_argument("--steps", type=int)
        parser.add_argument("--seeds", type=int)
        parser.add_argument("--decay", type=float, default=0.5)
        parser.add_argument("--work", type=Path, help="keeps the token set for the next run")

    a = parse(__doc__, arguments, smoke={"quick": True, "steps": 32, "seeds": 1})
    steps, seeds = a.steps or (160 if a.quick else 2400), a.seeds or (1 if a.quick else 3)
    small = a.quick or steps < 1000
    with tempfile.TemporaryDirectory() as scratch:
        if smoke():
            folder = open_store(None).open("quickstart/tokens").path
        else:
            store = Store(a.work or Path(scratch) / "store")
            text = RECIPE.replace("[steps.curate]", FEW_FILES + "[steps.curate]") if a.quick else RECIPE
            made = run_recipe(parse_recipe(text, "branches.toml"), store, Progress.silent())
            folder = made.artifacts["tokens"].path
        model = whorl_decoder(
            vocab_size=TokenSet(folder).vocab_size, d_model=64 if small else 128, n_layers=2 if small else 3, n_heads=2,
            n_kv_heads=2, head_dim=32 if small else 64, mlp_hidden=256 if small else 512, ngram_buckets=4096,
        )  # fmt: skip
        test = TokenSet(folder).split("test")
        replicas = 1 if small else min(2, probe().cores)
        samples: list[dict[str, Any]] = []
        done = {"ours": 0, "peers": 0}

        def bits(trained_model: LanguageModel) -> float:
            trained_model.eval()
            with torch.no_grad():
                return bits_per_byte(
                    sum(document_nats(trained_model, test.iter_documents(), 256)), test.n_bytes
                )

        for seed in range(seeds):
            whole = Job(
                tokens=str(folder), model=model, seq_len=128 if small else 256, batch_size=8, steps=steps, seed=seed,
                schedule={"decay_ratio": a.decay}, replicas=replicas, deterministic=True, compile=False, evaluations=1,
            )  # fmt: skip
            branch_steps = {share: branches.branch_step(whole, share) for share in SHARES}
            stable = Path(scratch) / f"stable {seed}"
            end = bits(train(whole, stable, branch_points=branch_steps.values()))
            done["ours"] += steps
            done["peers"] += steps  # the largest budget is the same run for both
            print(f"seed {seed}: {steps:,} steps: {end:.4f} bits per byte", flush=True)
            for share, at in branch_steps.items():
                budget = branches.branch_job(whole, share)
                start = branches.branch_folder(stable, at) / f"step-{at:08d}"
                ours = bits(train(budget, Path(scratch) / f"ours {seed} {share}", branch_start=start))
                alone = whole.model_copy(update={"steps": budget.steps})
                peer = bits(train(alone, Path(scratch) / f"peer {seed} {share}"))
                done["ours"] += budget.steps - at
                done["peers"] += budget.steps
                samples.append({"seed": seed, "steps": budget.steps, "from": at, "ours": ours, "peer": peer})
                print(
                    f"    {budget.steps:,} steps: branched at {at:,} {ours:.4f}, separate run {peer:.4f}",
                    flush=True,
                )
    by = {share: [s for s in samples if s["steps"] == round(share * steps)] for share in SHARES}
    means = {
        share: (mean(s["ours"] for s in found), mean(s["peer"] for s in found)) for share, found in by.items()
    }
    worst = max(means, key=lambda share: means[share][0] / means[share][1])
    ours, peer = means[worst]
    print(f"steps in all: {done['ours']:,} against {done['peers']:,} ({done['ours'] / done['peers']:.0%})")
    claim(
        "decay branches of one stable run against a run for each budget, for fewer steps in all",
        ours=ours, peer=peer, peer_name="separate runs", unit="bits per byte", ratio=ours / peer, bar=BAR,
        ok=ours / peer <= BAR and done["ours"] < done["peers"], samples=[*samples, {"steps in all": done}],
        quick=a.quick or bool(a.steps) or bool(a.seeds),
    )  # fmt: skip


if __name__ == "__main__":
    main()
