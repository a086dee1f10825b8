"""Held-out bits per byte of one small text model, trained in each precision on the same batches.

    python bench/train/precision.py [--steps 500] [--seeds 6] [--time]
    python bench/train/precision.py --quick      # the claim's precisions: one seed, 20 steps, no step times

A decoder of 3 layers and width 64 trains on the standard library's source. For each seed every precision starts from
the same weights and uses the same batches. So its difference to fp32 is taken for each seed, and reported with its
standard deviation over the seeds. The control shows which differences matter: it is fp32 with initial weights changed
by as much as rounding to bf16 would. Training amplifies such a change. A precision that differs by no more than the
control has no visible cost in these runs. (Another order of sums in fp32 is a far smaller change: it moved the result
by less than 1e-6.)

Each run takes about a minute. `--time` times a step of each, in turn, as medians; it needs a quiet machine.

On a CPU, fp8 is an emulation (rounding as on a GPU, sums in fp32), so its bits are valid and its time is not. The same
holds for fp16, which most CPUs multiply many times slower than fp32. Here the layers' products are computed in fp32
from fp16 numbers, and results and gradients are rounded to fp16, as on a GPU.
"""

from __future__ import annotations

import argparse
import atexit
import math
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from bench._run import claim, parse, sized, smoke

from whorl.evals.likelihood import bits_per_byte, document_nats
from whorl.models import whorl_decoder
from whorl.nn import Linear
from whorl.parallel.process_group import ProcessGroup
from whorl.tokens.shards import TokensConfig, TokenSet, write_shards
from whorl.tokens.tokenizer import Tokenizer
from whorl.tracking.progress import Progress
from whorl.train.job import Job
from whorl.train.lm import pretrain as training
from whorl.train.lm.build import allocate_shared, build_learner, build_model
from whorl.train.lm.pretrain import pretrain
from whorl.train.profiling.step_timer import random_batch

WORDS = 512
BASE = "fp32"
CONTROL = "fp32, initial weights 0.2 % off (control)"
# name -> (what of the job differs, bytes per weight of the blocks' matrices, without gradients and moments)
KINDS: dict[str, tuple[dict[str, Any], int]] = {
    BASE: ({}, 4),
    CONTROL: ({}, 4),
    "bf16, fp32 masters": ({"dtype": "bfloat16"}, 4),
    "fp8, fp32 masters": ({"dtype": "float8"}, 4),
    "bf16, bf16 weights, nearest": ({"dtype": "bfloat16", "bf16_weights": "nearest"}, 2),
    "bf16, bf16 weights, stochastic": ({"dtype": "bfloat16", "bf16_weights": "stochastic"}, 2),
    "fp16, loss scaled, fp32 masters": ({"dtype": "float16"}, 4),  # the slowest, so last
}


class Document(NamedTuple):
    id: str
    source: str
    path: str
    offset: int
    text: str


class Silent:
    """A callback that prints events only."""

    def on_step(self, step: int, metrics: dict[str, float]) -> None: ...
    def on_evaluation(self, step: int, metrics: dict[str, float], model: Any) -> None: ...
    def on_checkpoint(self, step: int, seconds: float) -> None: ...
    def on_event(self, step: int, event: dict[str, Any]) -> None:
        print(f"    event at step {step}: {event['message']}", flush=True)


def token_set(folder: Path) -> Path:
    """About 4 MB of source for training and 150 kB held out, split by files."""
    if (folder / "tokens.json").exists():
        return folder
    library = Path(statistics.__file__).parent
    texts = [(p.name, p.read_text(errors="replace")) for p in sorted(library.glob("*.py"))[: sized(None, 10)]]
    made = [Document(name, "stdlib", name, 0, text) for name, text in texts if len(text) > 1000]
    held = [document for number, document in enumerate(made) if number % 20 == 7]
    train = [document for number, document in enumerate(made) if number % 20 != 7]
    tokenizer = Tokenizer.train([d.text for d in train], WORDS)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder)
    for split, part in (("train", train), ("validation", held)):
        size = sum(len(d.text.encode()) for d in part)
        write_shards(part, tokenizer, folder, split, TokensConfig(), Progress.silent(), size)
    return folder


def job_of(tokens: Path, steps: int, seed: int, change: dict[str, Any]) -> Job:
    model = whorl_decoder(
        vocab_size=WORDS, d_model=64, n_layers=3, n_heads=2, n_kv_heads=2, head_dim=32, mlp_hidden=256
    )
    base = {"tokens": str(tokens), "model": model, "seq_len": sized(128, 32), "batch_size": 8, "steps": steps, "seed": seed,
            "compile": False, "evaluations": 1, "serial_loader": True}  # fmt: skip
    return Job.model_validate({**base, **change})


@contextmanager
def perturbed_weights(enabled: bool) -> Iterator[None]:
    """A context in which the initial weights differ by the rounding error of bf16."""

    def build(job: Job) -> Any:
        model, g = build_model(job), torch.Generator().manual_seed(job.seed)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 + 2.0**-9 * torch.randn(p.shape, generator=g))
        return model

    training.build_model = build if enabled else build_model
    try:
        yield
    finally:
        training.build_model = build_model


@contextmanager
def fast_half(enabled: bool) -> Iterator[None]:
    """A context with the fp16 products described above. The casts round gradients to fp16 in the backward pass."""

    def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        y = torch.nn.functional.linear(x.float(), weight.to(x.dtype).float()).to(x.dtype)
        return y if bias is None else y + bias

    Linear.matmul = staticmethod(product) if enabled else None
    try:
        yield
    finally:
        Linear.matmul = None


def bits(tokens: Path, scratch: Path, job: Job, limit: int | None) -> float:
    """Held-out bits per byte after training, computed in the precision of the training. Continues from `scratch`."""
    with fast_half(job.dtype == "float16"):
        model = pretrain(job, scratch, Silent(), checkpoint_seconds=30.0).eval()
        split = TokenSet(tokens).split("validation")
        documents = list(split.iter_documents())[:limit]
        sizes = [int(n) for n in split.documents["bytes"][: len(documents)].to_pylist()]
        found = bits_per_byte(sum(document_nats(model, documents, 512)), sum(sizes))
    shutil.rmtree(scratch)
    return found


def step_times(tokens: Path, rounds: int) -> dict[str, float]:
    """Median milliseconds per step of each kind; blocks of steps run in turns."""
    updates = {}
    for name, (change, _) in KINDS.items():
        job = job_of(tokens, 10**6, 0, change)
        model = build_model(job)
        (update,) = build_learner(model, job, allocate_shared(model, job), ProcessGroup()).updates
        updates[name] = update, random_batch(job, job.batch_size)
    times: dict[str, list[float]] = {name: [] for name in updates}
    for turn in range(rounds + 1):
        for name, (update, part) in updates.items():
            began = time.perf_counter()
            with fast_half(KINDS[name][0].get("dtype") == "float16"):
                for _ in range(sized(5, 1)):
                    update.accumulate(update.objective(part))
                    update.step(1e-3)
            if turn:
                times[name].append((time.perf_counter() - began) / sized(5, 1) * 1e3)
    return {name: statistics.median(each) for name, each in times.items()}


def table(found: dict[str, dict[int, float]], times: dict[str, float]) -> list[str]:
    """Markdown lines. Differences are paired by seed."""
    lines = [
        "| products, weights of the blocks | bytes per weight | held-out bits per byte | difference to fp32 | ms per step |",
        "|---|---|---|---|---|",
    ]
    for name, (_, size) in KINDS.items():
        values = found.get(name, {})
        both = [seed for seed in values if seed in found.get(BASE, {})]
        if not both:
            continue
        mean, spread = _spread([values[seed] for seed in both])
        difference, deviation = _spread([values[seed] - found[BASE][seed] for seed in both])
        shown = "-" if name == BASE else f"{difference:+.4f} ± {deviation:.4f}"
        step_ms = f"{times[name]:.1f}" if name in times else "-"
        lines.append(f"| {name} | {size} | {mean:.4f} ± {spread:.4f} | {shown} | {step_ms} |")
    return lines


def _spread(values: list[float]) -> tuple[float, float]:
    """Mean and standard deviation; the latter NaN of a single value."""
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else math.nan


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--steps", type=int, default=500)
        parser.add_argument("--seeds", type=int, default=6)
        parser.add_argument("--time", action="store_true", help="time steps too (a quiet machine)")
        parser.add_argument("--quick", action="store_true")

    a = parse(__doc__, arguments, smoke={"quick": True})
    a.folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, a.folder, ignore_errors=True)
    steps = sized(20, 2) if a.quick else a.steps
    torch.set_num_threads(1)
    tokens = token_set(a.folder / "tokens")
    found: dict[str, dict[int, float]] = {}
    kinds = list(KINDS)[:3] if a.quick and not smoke() else list(KINDS)
    for seed in range(1 if a.quick else a.seeds):
        for name in kinds:
            with perturbed_weights(name == CONTROL):
                job = job_of(tokens, steps, seed, KINDS[name][0])
                value = bits(tokens, a.folder / "scratch", job, 1 if a.quick else None)
            found.setdefault(name, {})[seed] = value
            print(f"{name:40} seed {seed}: {value:.4f}", flush=True)
    times = step_times(tokens, sized(9, 1)) if a.time or smoke() else {}
    print("\n".join(table(found, times)))
    base, ours = (statistics.mean(found[name].values()) for name in (BASE, "bf16, fp32 masters"))
    differences = [found[CONTROL][seed] - value for seed, value in found[BASE].items()]
    noise = (sum(n * n for n in differences) / len(differences)) ** 0.5 / len(differences) ** 0.5
    bar = 1 + 2 * noise / base
    claim(
        "held-out bits per byte with bf16 products and fp32 masters; bar: twice the control's error",
        ours=ours, peer=base, peer_name="fp32",
        unit=f"bits per byte after {steps} steps", ratio=ours / base, bar=round(bar, 4), ok=ours <= bar * base,
        samples=[{"kind": name, "bits": list(each.values()), "ms": times.get(name)} for name, each in found.items()],
        quick=a.quick,
    )  # fmt: skip


if __name__ == "__main__":
    main()
