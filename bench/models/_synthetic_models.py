"""The models of `bench/models/synthetic_tasks.py` and their training. All have two layers and differ only in the mixer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
from bench._run import sized
from bench.models._synthetic_data import Batch
from torch import Tensor, nn

from whorl.models.transformer import Transformer, TransformerConfig
from whorl.nn.attention.short_conv import ShortConvolution
from whorl.nn.experts import Routing
from whorl.objectives.next_token import Loss, next_token
from whorl.objectives.routing import load_balance
from whorl.tracking.seeds import generator
from whorl.train.config import ScheduleConfig
from whorl.train.learner.learner import Learner
from whorl.train.learner.loop import Stopwatch, train_loop
from whorl.train.learner.update import MicroBatch, Update, all_adamw
from whorl.train.optim.lr_schedule import lr_scale

SCHEDULE = ScheduleConfig(warmup_ratio=0.05)
RATES = sized((3e-4, 1e-3, 3e-3, 1e-2), (3e-3,))


class Convolved(nn.Module):
    """A mixer after a causal convolution of width 4 with a residual (a Canon layer, position "A"). [B, T, D] -> same."""

    def __init__(self, mixer: nn.Module, d_model: int, rng: torch.Generator) -> None:
        super().__init__()
        self.convolution, self.mixer = ShortConvolution(d_model, residual=True, generator=rng), mixer

    def forward(self, x: Tensor, **more: Any) -> Tensor:
        mixed: Tensor = self.mixer(self.convolution(x, more.get("segments")), **more)
        return mixed


class Constant(nn.Module):
    """Learned numbers that do not depend on the input: [..., D] -> [..., n].

    As Mamba's `selection` it makes the recurrence time-invariant, as in S4: delta, B and C are learned constants.
    """

    def __init__(self, n: int, rng: torch.Generator) -> None:
        super().__init__()
        self.numbers = nn.Parameter(torch.randn(n, generator=rng))

    def forward(self, x: Tensor) -> Tensor:
        return self.numbers.to(x.dtype).expand(*x.shape[:-1], -1)


def mixers(width: int) -> dict[str, dict[str, Any]]:
    """Configurations of all mixers, of about equal size."""
    n = width // 32
    heads = {"n_heads": n, "n_kv_heads": n, "head_dim": 32}
    return {
        "attention": heads,
        "smeared": {**heads, "smear": True},
        "convolved": heads,
        "window 16": {**heads, "window": 16},
        "latent": {
            "kind": "latent",
            "n_heads": n,
            "kv_rank": 16,
            "nope_dim": 32,
            "rope_dim": 16,
            "v_dim": 32,
        },
        "pointwise": {"kind": "pointwise", "options": {"n_heads": n, "n_time_buckets": 0}},
        "pointwise, convolved": {"kind": "pointwise", "options": {"n_heads": n, "n_time_buckets": 0}},
        "linear": {"kind": "linear", "options": {"n_heads": n}},
        "linear, convolved": {"kind": "linear", "options": {"n_heads": n}},
        "linear, decay": {"kind": "linear", "options": {"n_heads": n, "decay": True}},
        "Mamba": {"kind": "mamba"},
        "not selective": {"kind": "mamba"},
        "GRU": {"kind": "gru"},
        "LSTM": {"kind": "lstm"},
        "RNN": {"kind": "rnn"},
    }


def build(kind: str, vocab: int, width: int, seed: int) -> Transformer:
    """Two layers of one kind. "experts" is "attention" with 8 experts, top 2, each half as wide as the MLP."""
    mixer = mixers(width)["attention" if kind == "experts" else kind]
    more = {"experts": {"n_experts": 8, "top_k": 2, "hidden": width}} if kind == "experts" else {}
    config = {"vocab_size": vocab, "d_model": width, "n_layers": 2, "mixers": {"m": mixer}, "mlp": "relu2"}
    model = Transformer(
        TransformerConfig.model_validate(config | {"mlp_hidden": 2 * width} | more),
        generator(seed, "weights"),
    )
    rng = generator(seed, "changes")
    for block in model.blocks:
        if kind.endswith("convolved"):
            block.mixer = Convolved(block.mixer, width, rng)  # type: ignore[arg-type]
        elif kind == "not selective":
            mamba: Any = block.mixer
            mamba.selection = Constant(mamba.rank + 2 * mamba.d_state, rng)
    return model


class StopTraining(Exception):
    """Raised by `evaluate` to end a run."""


def train(
    model: Transformer,
    batches: Iterator[Batch],
    *,
    rate: float,
    steps: int = 10**9,
    seconds: float = math.inf,
    balance: float = 0.01,
    every: int = 100,
    evaluate: Callable[[int], None] = lambda step: None,
) -> tuple[int, float]:
    """Train with AdamW. Returns (steps, CPU seconds of this process).

    steps or seconds: the limit. The rate warms up over a twentieth of it and decays over its second half.
    evaluate: called with the step number after every `every` steps, not timed. It may raise StopTraining.
    """

    def objective(part: MicroBatch) -> Loss:
        routings: list[Routing] = []
        hidden = model(part["tokens"], routings=routings).flatten(0, 1)
        loss = next_token(hidden, model.head_weight, part["targets"].flatten(), part["mask"].flatten())
        if not routings:
            return loss
        each = [load_balance(r.scores, r.requested) for r in routings]
        even = torch.stack([one.total / one.count for one in each]).sum()
        return Loss(loss.total + balance * loss.count * even, loss.count, loss.metrics)

    learner = Learner(model, [Update(objective, all_adamw(model, rate))])
    began, n_steps = time.process_time(), 0

    def factor(step: int) -> float:
        done, total = step, steps
        if seconds < math.inf:  # in milliseconds
            done, total = int(1000 * (time.process_time() - began)), int(1000 * seconds)
        return max(0.0, lr_scale(done, total, SCHEDULE))

    def after(step: int, metrics: dict[str, float], clock: Stopwatch) -> None:
        nonlocal n_steps, began
        n_steps = step
        if time.process_time() - began >= seconds:
            raise StopTraining
        if step % every == 0:
            paused = time.process_time()
            evaluate(step)
            began += time.process_time() - paused

    with suppress(StopTraining):
        train_loop(learner, batches, lambda batch: [[batch]], last=steps, lr_scale=factor, on_step_end=after)
    return n_steps, time.process_time() - began


@torch.no_grad()
def accuracy(model: Transformer, batch: Batch) -> float:
    """Share of scored positions with a correct argmax."""
    predicted = model.logits(model(batch["tokens"])).argmax(dim=-1)
    right = (predicted == batch["targets"]) & batch["mask"]
    return float(right.sum() / batch["mask"].sum())


@torch.no_grad()
def bits_per_character(
    model: Transformer, ids: Tensor, length: int, routings: list[Routing] | None = None
) -> float:
    """Bits per character of a text in rows of `length`. Appends the routing decisions to `routings`."""
    n = (len(ids) - 1) // length
    tokens, targets = ids[: n * length].view(n, length), ids[1 : n * length + 1].view(n, length)
    total = 0.0
    for at in range(0, n, 64):
        hidden = model(tokens[at : at + 64], routings=routings).flatten(0, 1)
        scored = targets[at : at + 64].flatten()
        total += float(
            next_token(hidden, model.head_weight, scored, torch.ones_like(scored, dtype=torch.bool)).total
        )
    return total / (n * length) / math.log(2)
