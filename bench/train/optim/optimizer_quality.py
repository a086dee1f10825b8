"""AdamW, Muon, Adafactor and SOAP for the matrices of a small language model, at equal steps and at equal seconds.

    python bench/train/optim/optimizer_quality.py                  # all runs: some minutes on two quiet cores
    python bench/train/optim/optimizer_quality.py --quick          # few steps: only checks that it runs

The model is the built-in decoder with three layers of width 128, without n-gram embeddings, on the characters of a
play. The contenders train the matrices of the blocks. All other weights (embedding, head, gains) are trained by AdamW
in every run, at the default rates. Each contender has a separate rate, found on one seed among powers of two; the grid
is widened until the best is not at its end. Then follow three other seeds.

"equal seconds": the contenders' steps are timed in turns in one process (medians of CPU seconds). Each gets as many
steps as fit into the time of AdamW's `--steps`; the schedule is scaled with them.

Adafactor is defined here, described as the difference from Adam. The others are the built-in ones; Muon updates each
matrix in every second step.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[3]))
from bench._run import claim, parse, sized, smoke
from bench.models._synthetic_data import characters, stretches
from bench.train.optim._text import make_text

from whorl.machine.device_probe import probe
from whorl.models import Transformer, whorl_decoder
from whorl.objectives.next_token import next_token
from whorl.tracking.seeds import generator, numpy_rng
from whorl.train.config import OptimConfig, ScheduleConfig
from whorl.train.lm.objective import param_optims
from whorl.train.optim.lr_schedule import lr_scale
from whorl.train.optim.optimizers import AdamW, Muon, NamedTensors
from whorl.train.optim.soap import SOAP

LENGTH, ROWS, TUNING_SEED = 128, 8, 100
BETAS = (0.9, 0.95)
SCHEDULE = ScheduleConfig(warmup_ratio=0.05)
START = {
    "AdamW": 0.004,
    "Muon": 0.02,
    "Adafactor": 0.004,
    "SOAP": 0.004,
}  # where the search for a rate begins

Run = dict[str, Any]


class Adafactor:
    """Adam whose second moments are a row and a column a matrix (Shazeer & Stern 2018, arXiv:1804.04235, algorithm 4).

    v_ij is taken as r_i c_j / mean(r): the best rank-one approximation in the I-divergence (section 3). The decay of the
    means grows, 1 - t^-0.8 (section 7.2), and an update whose root mean square is above 1 is scaled down (section 6). Two
    choices of the paper are left out, so that only the second moments differ. One is steps relative to the weight's size:
    matrices that begin at zero would hardly move. The other is the absence of momentum; results are better with it.
    """

    def __init__(self, params: NamedTensors, rate: float) -> None:
        self.params, self.rate, self.steps = params, rate, 0
        self.rows = {n: torch.zeros(p.shape[0]) for n, p in params}
        self.columns = {n: torch.zeros(p.shape[1]) for n, p in params}
        self.mean = {n: torch.zeros_like(p) for n, p in params}

    def step(self, gradients: dict[str, Tensor], factor: float) -> None:
        self.steps += 1
        share = self.steps**-0.8
        for name, p in self.params:
            square = gradients[name].square() + 1e-30
            row = self.rows[name].lerp_(square.mean(dim=1), share)
            column = self.columns[name].lerp_(square.mean(dim=0), share)
            update = gradients[name] * (row / row.mean()).rsqrt()[:, None] * column.rsqrt()[None, :]
            update /= max(1.0, float(update.norm()) / update.numel() ** 0.5)
            self.mean[name].lerp_(update, 1 - BETAS[0])
            p.add_(self.mean[name], alpha=-self.rate * factor)


def _muon(params: NamedTensors, rate: float) -> Muon:
    names = sorted(params, key=lambda item: item[0])
    return Muon([names[::2], names[1::2]], rate, dtype=probe().torch_dtype)


def _adamw(params: NamedTensors, rate: float) -> AdamW:
    return AdamW(params, dict.fromkeys((n for n, _ in params), rate), betas=BETAS, eps=1e-10)


def _soap(params: NamedTensors, rate: float) -> SOAP:
    return SOAP(dict(params), dict.fromkeys((n for n, _ in params), rate))


MAKERS: dict[str, Callable[[NamedTensors, float], Any]] = {
    "AdamW": _adamw, "Muon": _muon, "Adafactor": Adafactor, "SOAP": _soap,
}  # fmt: skip


class Trainer:
    """A model, its text, and one contender for its matrices."""

    def __init__(self, kind: str, rate: float, seed: int, text: Path, dtype: str) -> None:
        self.text, self.held_out, vocab = characters(text)
        shape = whorl_decoder(
            vocab_size=vocab, d_model=128, n_layers=3, n_heads=4, n_kv_heads=4, head_dim=32, mlp_hidden=512,
            ngram_orders=(),
        )  # fmt: skip
        self.model = Transformer(shape, generator(seed, "weights"), getattr(torch, dtype))
        self.rng = numpy_rng(seed, "optimisers", "batches")
        self.params = dict(self.model.named_parameters())
        data = {n: p.data for n, p in self.params.items()}
        treated = param_optims(self.model, OptimConfig())
        self.matrices = MAKERS[kind](
            [(n, data[n]) for n, t in treated.items() if t.optimizer == "muon"], rate
        )
        rest = {n: t.lr for n, t in treated.items() if t.optimizer == "adamw"}
        self.rest = AdamW([(n, data[n]) for n in rest], rest, betas=(0.8, 0.95), eps=1e-10)

    def step(self, factor: float) -> float:
        part = stretches(self.text, self.rng, ROWS, LENGTH)
        loss = self._loss(part["tokens"], part["targets"])
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = {n: p.grad for n, p in self.params.items() if p.grad is not None}
        with torch.no_grad():
            torch.nn.utils.clip_grad_norm_(list(self.params.values()), 1.0)
            self.matrices.step(gradients, factor)
            self.rest.step(gradients, factor)
        for p in self.params.values():
            p.grad = None
        return float(loss.detach())

    def _loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        due = targets.flatten()
        loss = next_token(
            self.model(tokens).flatten(0, 1),
            self.model.head_weight,
            due,
            torch.ones_like(due, dtype=torch.bool),
        )
        return loss.total / loss.count

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Nats per character on the first 128 rows of held-out text."""
        n = 128
        rows = self.held_out[: n * LENGTH].view(n, LENGTH)
        return float(self._loss(rows, self.held_out[1 : n * LENGTH + 1].view(n, LENGTH)))


def train(kind: str, rate: float, seed: int, steps: int, how: str, text: Path, dtype: str) -> Run:
    torch.set_num_threads(1)
    trainer, began, last = Trainer(kind, rate, seed, text, dtype), time.process_time(), 0.0
    for step in range(steps):
        last = trainer.step(lr_scale(step, steps, SCHEDULE))
        if not last < 20.0:
            break
    loss = trainer.held_out_loss() if last < 20.0 else 99.0
    return {
        "kind": kind, "rate": rate, "seed": seed, "steps": steps, "how": how, "loss": round(loss, 4),
        "cpu_seconds": round(time.process_time() - began, 1),
    }  # fmt: skip


def relative_seconds(text: Path, dtype: str, rounds: int) -> dict[str, float]:
    """CPU seconds of a step over AdamW's, blocks of ten steps in turns (ten: SOAP turns its basis once in each)."""
    torch.set_num_threads(1)
    trainers = {kind: Trainer(kind, START[kind], 0, text, dtype) for kind in MAKERS}
    times: dict[str, list[float]] = {kind: [] for kind in MAKERS}
    for number in range(rounds + 1):
        for kind, trainer in trainers.items():
            began = time.process_time()
            for _ in range(sized(10, 1)):
                trainer.step(1.0)
            if number:
                times[kind].append(time.process_time() - began)
    return {kind: statistics.median(t) / statistics.median(times["AdamW"]) for kind, t in times.items()}


def tuned_rate(kind: str, run: Callable[..., list[Run]], quick: bool) -> float:
    """The best of powers of two times the start; the grid is widened until the best is not at its end."""
    losses: dict[float, float] = {}
    due = [START[kind] * 2.0**k for k in (-1, 0, 1)]
    while due:
        losses |= {r["rate"]: r["loss"] for r in run([(kind, rate, TUNING_SEED) for rate in due])}
        top = min(losses, key=lambda rate: losses[rate])
        due = [] if quick else [rate for rate in (top / 2, top * 2) if rate not in losses]
    return top


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text", type=Path, default=Path("../shared/data/tinyshakespeare.txt"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--quick", action="store_true")


def main() -> None:
    a = parse(__doc__, add_arguments, smoke={"quick": True, "workers": 1})
    if a.quick:
        a.steps, a.seeds = sized(10, 2), 1
    if smoke():
        a.text = make_text()
    dtype = probe().dtype
    seconds = relative_seconds(a.text, dtype, 1 if a.quick else 9)
    found: dict[str, dict[str, Any]] = {}
    with multiprocessing.get_context("spawn").Pool(a.workers) as pool:

        def run(some: list[tuple[str, float, int]], steps: int = a.steps, how: str = "tuning") -> list[Run]:
            made = pool.starmap(train, [(*each, steps, how, a.text, dtype) for each in some], chunksize=1)
            for one in made:
                print(json.dumps(one), flush=True)
            return made

        for kind in MAKERS:
            rate = tuned_rate(kind, run, a.quick)
            found[kind] = {"relative_seconds": round(seconds[kind], 3), "rate": rate}
            for how, steps in (("steps", a.steps), ("seconds", max(1, round(a.steps / seconds[kind])))):
                if how == "steps" and a.quick and not smoke():
                    continue  # no claim
                losses = [r["loss"] for r in run([(kind, rate, seed) for seed in range(a.seeds)], steps, how)]
                found[kind] |= {how: losses, f"mean_{how}": round(statistics.mean(losses), 4)}
    for kind, each in found.items():
        print(kind, json.dumps(each))
    ours = found["Muon"]["mean_seconds"]
    peer = min(each["mean_seconds"] for kind, each in found.items() if kind != "Muon")
    claim(
        "held-out loss at equal seconds with Muon for the matrices",
        ours=ours, peer=peer, peer_name="best of AdamW, Adafactor, SOAP",
        unit="nats/character", ratio=peer / ours, bar=1.0, ok=ours <= peer,
        samples=[found], quick=a.quick,
    )  # fmt: skip


if __name__ == "__main__":
    main()
