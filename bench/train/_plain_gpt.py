"""The plain peer: a GPT-2 as most people would write it today, with its training loop.

The model has nn.Linear without biases, LayerNorm, learned positions, GELU, torch's scaled_dot_product_attention, and a
head tied to the embedding. The loss is F.cross_entropy over all logits. The optimizer is torch's fused AdamW (0.9,
0.95) with weight decay 0.1 on matrices, gradient clipping at 1, warm-up, and a cosine to a tenth. Rows are random
windows of the token stream. The file imports nothing from Whorl.
"""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

KINDS = ("fp32", "autocast", "pure bf16")


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class PlainGPT(nn.Module):
    """ids [B, T] -> hidden [B, T, width] -> logits. Has the attributes that `whorl.evals.likelihood` reads."""

    batch_independent = True
    config = None  # likelihood: no trained length, so all windows share batches

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                deep = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / (2 * layers) ** 0.5 if deep else 0.02)

    @property
    def embedding(self) -> Tensor:
        return self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.words.weight).float()

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(self(ids)).flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Setting:
    """Precision, and whether the loss is compiled."""

    kind: str = "fp32"
    compiled: bool = True

    def __str__(self) -> str:
        return f"{self.kind}, {'compiled' if self.compiled else 'eager'}"


class Training:
    """A model with its optimizer."""

    def __init__(self, model: PlainGPT, setting: Setting, rate: float = 1e-3) -> None:
        self.model = model.to(torch.bfloat16) if setting.kind == "pure bf16" else model
        self.setting = setting
        decayed = [p for p in model.parameters() if p.ndim == 2]
        rest = [p for p in model.parameters() if p.ndim != 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True)
        self.rate = rate
        self.loss = torch.compile(model.loss) if setting.compiled else model.loss

    def _cast(self) -> AbstractContextManager[object]:
        device = self.model.embedding.device.type
        return torch.autocast(device, torch.bfloat16) if self.setting.kind == "autocast" else nullcontext()

    def step(self, ids: Tensor, targets: Tensor, factor: float = 1.0) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * factor
        with self._cast():
            loss = self.loss(ids, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())


def seconds_per_step(training: Training, vocabulary: int, rows: int, length: int, seconds: float) -> float:
    """Median step time after three warm-up steps."""
    ids = torch.randint(0, vocabulary, (rows, length + 1), device=training.model.embedding.device)
    times: list[float] = []
    for number in range(10_000):
        began = time.perf_counter()
        training.step(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        times.append(time.perf_counter() - began)
        if number > 5 and sum(times[3:]) > seconds:
            break
    return sorted(times[3:])[len(times[3:]) // 2]


def train_for(
    training: Training,
    stream: np.ndarray,
    rows: int,
    length: int,
    seconds: float,
    step_seconds: float,
    seed: int,
) -> int:
    """Train for `seconds` of wall-clock time, compilation included, and return the number of steps.

    The cosine follows the clock, so that it ends with the time. `stream`: ids of all documents, concatenated.
    """
    draw = np.random.default_rng(seed)
    began, step = time.perf_counter(), 0
    while (spent := time.perf_counter() - began) < seconds - step_seconds:
        starts = draw.integers(0, len(stream) - length - 1, rows)
        batch = torch.from_numpy(np.stack([stream[s : s + length + 1] for s in starts]).astype(np.int64))
        done = spent / seconds
        factor = min(1.0, (step + 1) / 100) * (0.55 + 0.45 * math.cos(math.pi * done))
        training.step(batch[:, :-1].contiguous(), batch[:, 1:].contiguous(), factor)
        step += 1
    return step


def heads_of(width: int) -> int:
    """64 features a head, or the nearest that divides."""
    return max(n for n in range(1, max(1, width // 64) + 1) if width % n == 0)
