"""What each kind of layer can learn: associative recall, selective copying, text, and experts against a dense model.

    .venv/bin/python bench/models_proofs.py                        # all of it, 3 seeds: about an hour on 2 cores
    .venv/bin/python bench/models_proofs.py --task recall --quick  # one seed, fewer steps

recall     (Arora et al. 2023, Zoology, arXiv:2312.04927, section 3.1) 16 pairs "key value", then the keys again in another
           order: the share of values that follow rightly. Attention looks them up, at once where keys are smeared (each
           mixed with the one before), else once copying heads have formed; a state of fixed size must hold all.
copying    (Gu & Dao 2023, Mamba, arXiv:2312.00752, section 4.1.1) 8 tokens at random places among 48, then 8 marks: the
           tokens in order. Layers that treat all inputs alike cannot choose.
text       tinyshakespeare by characters: bits per character on the last tenth, at equal compute and after equal seconds.
experts    the same text: 8 experts, top 2, against a dense MLP of the same active FLOPs; how evenly experts are used.

Every model is two layers, 64 wide (text: 128), trained by the one learner with AdamW; all differ in their mixer alone.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from _claim import claim

from whorl.models.transformer import Transformer, TransformerConfig
from whorl.nn.experts import Routing
from whorl.objectives import Loss, next_token
from whorl.objectives.routing import load_balance
from whorl.runs.seeds import generator
from whorl.train.learner import Learner
from whorl.train.loop import Clock, learn
from whorl.train.schedule import warmup_stable_decay
from whorl.train.update import Part, Update, all_adamw

Batch = dict[str, Tensor]
TEXT = Path("../shared/data/tinyshakespeare.txt")


def mixers(width: int) -> dict[str, dict[str, Any]]:
    """A mixer of each kind, of about the same size."""
    heads = {"n_heads": width // 32, "n_kv_heads": width // 32, "head_dim": 32}
    return {
        "attention": heads,
        "smeared": {**heads, "smear": True},
        "window 16": {**heads, "window": 16},
        "latent": {
            "kind": "latent", "n_heads": width // 32, "kv_rank": 16, "nope_dim": 32, "rope_dim": 16, "v_dim": 32
        },
        "linear": {"kind": "linear", "options": {"n_heads": width // 32}},
        "Mamba": {"kind": "mamba"},
        "GRU": {"kind": "gru"},
        "LSTM": {"kind": "lstm"},
        "RNN": {"kind": "rnn"},
    }  # fmt: skip


def build(mixer: dict[str, Any], vocab: int, width: int, seed: int, **more: Any) -> Transformer:
    config = TransformerConfig.model_validate(
        {
            "vocab_size": vocab, "d_model": width, "n_layers": 2, "mixers": {"m": mixer}, "mlp": "relu2",
            "mlp_hidden": 2 * width, **more,
        }
    )  # fmt: skip
    return Transformer(config, generator(seed, "weights"))


def recall(rng: np.random.Generator, rows: int) -> Batch:
    pairs, half = 16, 32
    keys = np.stack([rng.permutation(half)[:pairs] for _ in range(rows)])
    values = half + rng.integers(0, half, (rows, pairs))
    again = np.stack([rng.permutation(pairs) for _ in range(rows)])
    first = np.stack((keys, values), axis=2).reshape(rows, -1)
    second = np.stack(
        (np.take_along_axis(keys, again, 1), np.take_along_axis(values, again, 1)), axis=2
    ).reshape(rows, -1)
    ids = torch.from_numpy(np.concatenate((first, second), axis=1))
    mask = torch.zeros(rows, ids.shape[1] - 1, dtype=torch.bool)
    mask[:, 2 * pairs :: 2] = True  # where a key of the second half is read, its value comes next
    return {"tokens": ids[:, :-1], "targets": ids[:, 1:], "mask": mask}


def copying(rng: np.random.Generator, rows: int) -> Batch:
    places, count, vocab = 48, 8, 18  # 0 is noise, 1 the mark
    content = rng.integers(2, vocab, (rows, count))
    ids = np.zeros((rows, places + count), np.int64)
    for row in range(rows):
        ids[row, np.sort(rng.permutation(places)[:count])] = content[row]
    ids[:, places:] = 1
    targets = np.zeros_like(ids)
    targets[:, places:] = content
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    mask[:, places:] = True
    return {"tokens": torch.from_numpy(ids), "targets": torch.from_numpy(targets), "mask": mask}


def train(
    model: Transformer,
    batches: Iterator[Batch],
    *,
    steps: int,
    rate: float,
    seconds: float = math.inf,
    balance: float = 0.0,
) -> int:
    """Trains by the one learner; returns the steps taken. A run bounded by seconds decays over what it can reach."""

    def objective(part: Part) -> Loss:
        records: list[Routing] = []
        hidden = model(part["tokens"], records=records)
        loss = next_token(
            hidden.flatten(0, 1), model.head_weight, part["targets"].flatten(), part["mask"].flatten()
        )
        if balance and records:
            losses = [load_balance(r.scores, r.wished) for r in records]
            even = torch.stack([one.total / one.count for one in losses]).sum()
            return Loss(loss.total + balance * loss.count * even, loss.count, loss.metrics)
        return loss

    learner = Learner(model, [Update(objective, all_adamw(model, rate))])
    began, taken = time.perf_counter(), 0

    class Enough(Exception):
        pass

    def share() -> float:
        return min(1.0, (time.perf_counter() - began) / seconds)

    def factor(step: int) -> float:
        if seconds == math.inf:
            return warmup_stable_decay(step, steps, 0.05, 0.5)
        return min(1.0, step / 50 + 0.02) * min(1.0, 2 * (1 - share()) + 0.01)

    def after(step: int, metrics: dict[str, float], clock: Clock) -> None:
        nonlocal taken
        taken = step
        if share() >= 1.0 and seconds != math.inf:
            raise Enough

    with suppress(Enough):
        learn(learner, batches, lambda batch: [[batch]], last=steps, factor=factor, after=after)
    return taken


@torch.no_grad()
def accuracy(model: Transformer, batch: Batch) -> float:
    said = model.logits(model(batch["tokens"])).argmax(dim=-1)
    right = (said == batch["targets"]) & batch["mask"]
    return float(right.sum() / batch["mask"].sum())


def synthetic(name: str, make: Callable[[np.random.Generator, int], Batch], vocab: int, a: Any) -> None:
    """Accuracy of every mixer over the seeds."""
    table: dict[str, list[float]] = {}
    for kind, mixer in mixers(64).items():
        for seed in range(a.seeds):
            model = build(mixer, vocab, 64, seed)
            rng = np.random.default_rng(seed)
            batches = iter(lambda rng=rng: make(rng, 64), None)
            train(model, batches, steps=a.steps, rate=3e-3)
            table.setdefault(kind, []).append(
                accuracy(model, make(np.random.default_rng(10_000 + seed), 256))
            )
        print(f"{name:8} {kind:10} {' '.join(f'{x:.3f}' for x in table[kind])}", flush=True)
    smeared, plain = float(np.mean(table["smeared"])), float(np.mean(table["attention"]))
    claim(
        f"{name}: accuracy of attention with smeared keys, and without", ours=round(smeared, 3), peer=round(plain, 3),
        unit="share", ratio=smeared, bar=0.99, ok=smeared >= 0.99, quick=a.quick, samples=[table],
    )  # fmt: skip


def rows_of_text(ids: Tensor, rng: np.random.Generator, rows: int, length: int) -> Batch:
    starts = torch.from_numpy(rng.integers(0, len(ids) - length - 1, rows))
    stretch = ids[starts[:, None] + torch.arange(length + 1)]
    mask = torch.ones(rows, length, dtype=torch.bool)
    return {"tokens": stretch[:, :-1], "targets": stretch[:, 1:], "mask": mask}


@torch.no_grad()
def bits_per_character(
    model: Transformer, ids: Tensor, length: int, records: list[Routing] | None = None
) -> float:
    """Over the held-out text in rows of `length`."""
    n = (len(ids) - 1) // length
    tokens, targets = ids[: n * length].view(n, length), ids[1 : n * length + 1].view(n, length)
    total = 0.0
    for at in range(0, n, 64):
        hidden = model(tokens[at : at + 64], records=records)
        wanted = targets[at : at + 64].flatten()
        total += float(
            next_token(
                hidden.flatten(0, 1), model.head_weight, wanted, torch.ones_like(wanted, dtype=torch.bool)
            ).total
        )
    return total / (n * length) / math.log(2)


def characters() -> tuple[Tensor, Tensor, int]:
    """(training ids, held-out ids, how many characters there are)."""
    if not TEXT.exists():
        raise SystemExit(f"{TEXT} is not there: a plain text of a megabyte, named by --text, does as well")
    data = np.frombuffer(TEXT.read_bytes(), np.uint8)
    known, ids = np.unique(data, return_inverse=True)
    ids = torch.from_numpy(ids.astype(np.int64))
    cut = len(ids) * 9 // 10
    return ids[:cut], ids[cut:], len(known)


def text(a: Any) -> None:
    """Bits per character at equal compute (FLOPs of training) and after equal seconds."""
    training, held_out, vocab = characters()
    width, length, rows = 128, 128, 16
    kinds: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {k: (m, {}) for k, m in mixers(width).items()}
    kinds["experts"] = (
        mixers(width)["attention"],
        {"experts": {"n_experts": 8, "top_k": 2, "hidden": width}},
    )
    budget = build(kinds["attention"][0], vocab, width, 0).flops_per_token(length) * rows * length * a.steps
    found: dict[str, dict[str, list[float]]] = {}
    for kind, (mixer, more) in kinds.items():
        for seed in range(a.seeds):
            for how in ("compute", "seconds"):
                model = build(mixer, vocab, width, seed, **more)
                steps = int(budget / (model.flops_per_token(length) * rows * length))
                rng = np.random.default_rng(seed)
                batches = iter(lambda rng=rng: rows_of_text(training, rng, rows, length), None)
                limit = a.seconds if how == "seconds" else math.inf
                taken = train(
                    model,
                    batches,
                    steps=steps if how == "compute" else 10**6,
                    rate=2e-3,
                    seconds=limit,
                    balance=0.01,
                )
                bits = bits_per_character(model, held_out, length)
                found.setdefault(kind, {}).setdefault(how, []).append(round(bits, 4))
                print(
                    f"text     {kind:10} seed {seed}, equal {how:8} {taken:6,} steps {bits:.3f}", flush=True
                )
    dense, rnn = (float(np.mean(found[k]["compute"])) for k in ("attention", "RNN"))
    claim(
        "text: bits per character at equal compute, attention against an RNN", ours=round(dense, 3), peer=round(rnn, 3),
        unit="bits", ratio=dense / rnn, bar=1.0, ok=dense < rnn, quick=a.quick, samples=[found],
    )  # fmt: skip


def experts(a: Any) -> None:
    """8 experts, top 2, against a dense MLP of the same active FLOPs."""
    training, held_out, vocab = characters()
    width, length, rows = 128, 128, 16
    bits: dict[str, list[float]] = {"dense": [], "experts": []}
    loads: list[list[float]] = []
    for seed in range(a.seeds):
        for name in bits:
            more: dict[str, Any] = {"mlp_hidden": 2 * width}
            if name == "experts":
                more["experts"] = {"n_experts": 8, "top_k": 2, "hidden": width}
            model = build(mixers(width)["attention"], vocab, width, seed, **more)
            rng = np.random.default_rng(seed)
            batches = iter(lambda rng=rng: rows_of_text(training, rng, rows, length), None)
            train(model, batches, steps=a.steps, rate=2e-3, balance=0.01)
            records: list[Routing] = []
            bits[name].append(round(bits_per_character(model, held_out, length, records), 4))
            if records:
                counts = torch.stack([r.counts.double() for r in records]).sum(dim=0)
                loads.append((counts / counts.sum()).tolist())
            print(f"experts  {name:8} seed {seed}: {bits[name][-1]:.3f}", flush=True)
    ours, dense = (float(np.mean(bits[k])) for k in ("experts", "dense"))
    claim(
        "experts: bits per character, 8 experts top 2 against dense at equal active FLOPs", ours=round(ours, 4),
        peer=round(dense, 4), unit="bits", ratio=ours / dense, bar=1.0, ok=ours < dense, quick=a.quick,
        samples=[bits, {"least and most used expert, shares": [[round(min(x), 3), round(max(x), 3)] for x in loads]}],
    )  # fmt: skip


def main() -> None:
    global TEXT
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", choices=["recall", "copying", "text", "experts", "all"], default="all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--quick", action="store_true")
    a = parser.parse_args()
    if a.quick:
        a.seeds, a.steps, a.seconds = 1, 300, 10.0
    TEXT = a.text
    if a.task in ("recall", "all"):
        synthetic("recall", recall, 64, a)
    if a.task in ("copying", "all"):
        synthetic("copying", copying, 18, a)
    if a.task in ("text", "all"):
        text(a)
    if a.task in ("experts", "all"):
        experts(a)


if __name__ == "__main__":
    main()
