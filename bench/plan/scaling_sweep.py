"""The training runs to which the planner's scaling law is fitted.

    python bench/plan/scaling_sweep.py --store .whorl --out sweep.jsonl     # runs, then fits (hours on two cores)
    python bench/plan/scaling_sweep.py --out sweep.jsonl --fit-only         # fits the existing runs, writes scaling_law.json
    python bench/plan/scaling_sweep.py --quick                              # fits the runs of scaling_law.json again

Each run trains one shape with one vocabulary on the curated standard library of the store, through the same code as a
recipe. It records bits per byte on the whole validation split. The fit minimises squared errors of log(bits per byte).
Runs of scaling_law.json that name a source come from another script: each fit keeps them. `--quick` writes nothing there.
The JSON line holds the worst relative error of the law over the runs.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import ROOT, claim, parse, sized, smoke
from bench.plan._tiny_store import cache_folder, open_store

from whorl.corpus import Corpus
from whorl.evals.likelihood import bits_per_byte, document_nats
from whorl.machine.device_probe import probe
from whorl.models import Transformer
from whorl.plan.accounting.model_cost import decoder_config, training_cost
from whorl.plan.laws.law import ScalingLaw, fitted_law
from whorl.store import Store
from whorl.tokens.shards import TokensConfig, TokenSet, write_shards
from whorl.tokens.tokenizer import Tokenizer
from whorl.tracking.progress import Progress
from whorl.train.job import Job
from whorl.train.lm.pretrain import pretrain

# (width, depth, vocabulary, steps of 8 x 256 tokens)
RUNS = [
    (96, 3, 512, 3000), (96, 3, 1024, 3000), (128, 3, 512, 2000), (128, 3, 1024, 1500), (128, 3, 2048, 3000),
    (128, 3, 4096, 1500), (192, 3, 1024, 1500), (192, 3, 1024, 5000), (192, 3, 2048, 3000), (192, 4, 1024, 1500),
    (192, 4, 4096, 1500), (256, 4, 1024, 3000), (256, 4, 2048, 1500),
]  # fmt: skip
SMOKE_RUNS = [(64, 2, 320, 4), (64, 2, 512, 4)]
LAW_FILE = ROOT / "src" / "whorl" / "plan" / "laws" / "scaling_law.json"
WINDOW = sized(512, 64)  # tokens, of the evaluation


class SilentCallback:
    """A training callback without effect."""

    def on_step(self, step: int, metrics: dict[str, float]) -> None: ...

    def on_evaluation(self, step: int, metrics: dict[str, float], model: Transformer) -> None: ...

    def on_checkpoint(self, step: int, seconds: float) -> None: ...

    def on_event(self, step: int, event: dict[str, object]) -> None: ...


def token_set(store: Store, vocabulary: int, cache: Path) -> Path:
    """The quickstart corpus of `store`, encoded with a vocabulary of this size: the quickstart's own tokens, or new ones."""
    own = store.open("quickstart/tokens").path
    if TokenSet(own).vocab_size == vocabulary:
        return own
    folder = cache / f"tokens-{vocabulary}-{store.open('quickstart/curate').address[:12]}"
    if not (folder / "done").exists():
        corpus = Corpus(store.open("quickstart/ingest").path, store.open("quickstart/curate").path)
        tokenizer = Tokenizer.train((d.text for d in corpus.documents("train")), vocabulary)
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save(folder)
        for split in ("train", "validation"):
            write_shards(
                corpus.documents(split),
                tokenizer,
                folder,
                split,
                TokensConfig(),
                Progress.silent(),
                corpus.bytes(split),
            )
        (folder / "done").touch()
    return folder


def validation_bits(model: Any, tokens: Path, length: int = WINDOW, every: int = 1) -> float:
    """Return bits per byte on each `every`-th document of the validation split, in windows of `length` tokens."""
    split = TokenSet(tokens).split("validation")
    nats = document_nats(model.eval(), map(split.document, range(0, split.n_documents, every)), length)
    return bits_per_byte(sum(nats), sum(split.documents["bytes"].to_pylist()[::every]))


def run(
    tokens: Path,
    width: int,
    depth: int,
    vocabulary: int,
    steps: int,
    *,
    replicas: int,
    compile: bool = True,
    every: int = 1,
    **job,
) -> dict:
    """One run; bits per byte on each `every`-th document of the validation split."""
    machine = probe()
    model = decoder_config(width, depth, vocabulary)
    settings = Job(
        tokens=str(tokens), model=model, seq_len=job.pop("seq_len", sized(256, 64)),
        batch_size=job.pop("batch_size", 8), steps=steps,
        replicas=replicas, dtype=machine.dtype, device=machine.device, compile=compile, evaluations=1, **job,
    )  # fmt: skip
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        trained = pretrain(settings, Path(scratch), SilentCallback(), checkpoint_seconds=1e9)
    seconds = time.monotonic() - began
    split = TokenSet(tokens).split("validation")
    return {
        "width": width, "depth": depth, "vocabulary": vocabulary, "steps": steps, "seq_len": settings.seq_len,
        "batch_size": settings.batch_size, "lr_muon": settings.optim.lr_muon, "seed": settings.seed,
        "matrices": training_cost(model, batch_size=8, seq_len=settings.seq_len, replicas=1).block_params,
        "bytes": steps * settings.batch_size * settings.seq_len * split.n_bytes / len(split),
        "bits_per_byte": validation_bits(trained, tokens, every=every), "seconds": seconds,
    }  # fmt: skip


def fit(runs: list[dict]) -> ScalingLaw:
    """Least squares in the logarithm, from many starts."""
    best, best_error = None, math.inf
    names = [*ScalingLaw.__dataclass_fields__][:7]
    target = torch.tensor([math.log(r["bits_per_byte"]) for r in runs], dtype=torch.float64)
    size = torch.tensor([r["matrices"] / 1e6 for r in runs], dtype=torch.float64)
    data = torch.tensor([r["bytes"] / 1e6 for r in runs], dtype=torch.float64)
    vocabulary = torch.tensor([float(r["vocabulary"]) for r in runs], dtype=torch.float64)
    prior = torch.tensor([0.45, 0.15, 0.35, 1.2, 0.4, 0.008, 1000.0], dtype=torch.float64).log()
    for start in range(sized(20, 2)):
        torch.manual_seed(start)
        x = (prior + 0.3 * torch.randn(7, dtype=torch.float64)).requires_grad_()
        optimizer = torch.optim.LBFGS([x], max_iter=500, line_search_fn="strong_wolfe")

        def error(x=x) -> torch.Tensor:
            e, a, alpha, b, beta, c, v = x.exp()
            predicted = e + a / size**alpha + b / data**beta + c * (vocabulary / (v * size**0.5)).log() ** 2
            # A weak prior, because there are few more runs than constants.
            return (predicted.log() - target).square().mean() + 3e-4 * (x - prior).square().mean()

        optimizer.step(partial(_closure, optimizer, error))
        if (value := float(error().detach())) < best_error:
            best, best_error = dict(zip(names, x.exp().tolist(), strict=True)), value
    assert best is not None
    return replace(fitted_law(), **best)


def _closure(optimizer: torch.optim.Optimizer, error: Callable[[], torch.Tensor]) -> torch.Tensor:
    optimizer.zero_grad()
    loss = error()
    loss.backward()
    return loss


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--store", default=None)
        parser.add_argument("--out", type=Path, default=Path("sweep.jsonl"))
        parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "whorl-sweep")
        parser.add_argument("--replicas", type=int, default=2)
        parser.add_argument("--fit-only", action="store_true")
        parser.add_argument("--quick", action="store_true")

    a = parse(__doc__, arguments, smoke={"replicas": 1, "fit_only": False, "quick": False})
    stored = json.loads(LAW_FILE.read_text())["runs"]
    a.cache = cache_folder(a.cache)
    if smoke():
        a.out = a.cache / "sweep.jsonl"
    done = [json.loads(line) for line in a.out.read_text().splitlines()] if a.out.exists() else []
    if a.quick:
        done = stored
    elif not a.fit_only:
        store = open_store(a.store)
        for width, depth, vocabulary, steps in sized(RUNS, SMOKE_RUNS)[len(done) :]:
            tokens = token_set(store, vocabulary, a.cache)
            found = run(tokens, width, depth, vocabulary, steps, replicas=a.replicas, compile=not smoke())
            print(json.dumps(found), flush=True)
            with a.out.open("a") as out:
                out.write(json.dumps(found) + "\n")
            done.append(found)
    if not (a.quick or smoke()):
        done += [run for run in stored if "source" in run]
    law = fit(done)
    errors = [
        float(abs(law.loss(r["matrices"], r["bytes"], r["vocabulary"]) / r["bits_per_byte"] - 1))
        for r in done
    ]
    rounded = {name: round(value, 4) for name, value in [*vars(law).items()][:7]}
    if not a.quick:
        path = a.cache / LAW_FILE.name if smoke() else LAW_FILE
        path.write_text(json.dumps({"law": rounded, "runs": done}, indent=1) + "\n")
    claim(
        "the planner's scaling law against its own runs", ours=max(errors), peer=0.0, peer_name="measured",
        unit="worst relative error",
        ratio=max(errors), bar=0.05, ok=max(errors) <= 0.05, quick=a.quick, samples=[round(e, 4) for e in errors],
    )  # fmt: skip


if __name__ == "__main__":
    main()
