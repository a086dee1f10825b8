"""The two schemes that came before continuous batching, for comparison, over the same models and the same sampler.

    static     a batch is begun when `size` requests are there, and ends when its longest answer does
    dynamic    as static, but no request waits longer than `patience` for a batch to fill: then it begins as it is

Told as the difference from `engine.py`: the batch is a rectangle in the model's own contiguous state, made once and not at
every step. Prompts are padded on the left to the longest, so that all rows end at the same place; padding is a document of
its own, which no other position sees, and each row counts its own positions. A row whose answer has ended is computed on
until the last one has: that, the padding and the waiting are what continuous batching (Yu et al. 2022, Orca) does away
with.

Both are given every advantage that the scheme allows: tokens are told as they come and not when the batch is done, and
ended rows are not sampled. The draw of a token is the engine's (its request's seed and its place decide it), so all three
schemes write the same texts, which is the test of this file; `bench/engine/batching.py` compares how long they take.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from whorl.engine.request import Delta, FinishReason, Request
from whorl.engine.sampling.sampler import Sampler, SamplerRow
from whorl.errors import ConfigError
from whorl.models import LanguageModel, Transformer
from whorl.tracking.seeds import derive


class StaticBatchEngine:
    """Static batching; with `patience`, dynamic. `add`, `step` and `busy` as an `Engine` has them.

    Of a request it knows ids, sampling, max_tokens and stop_ids.

    Args:
        model: a Transformer, in its compute type.
        size: of a batch.
        patience: seconds that a request waits at most for others; infinite in static batching.
        forbidden: ids that are never drawn.
        seed: of requests that bring none, as in `EngineConfig`.
        clock: seconds.

    Raises:
        ConfigError: a model whose state keeps no documents apart.
    """

    def __init__(
        self,
        model: LanguageModel,
        batch_size: int,
        *,
        max_wait_seconds: float = math.inf,
        banned_ids: Sequence[int] = (),
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not isinstance(model, Transformer):
            raise ConfigError(
                f"batches of a {type(model).__name__} cannot be padded", expected="a Transformer"
            )
        self.model, self.batch_size, self.max_wait_seconds, self.seed, self.clock = (
            model,
            batch_size,
            max_wait_seconds,
            seed,
            clock,
        )
        self.sampler = Sampler(model.config.vocab_size, banned_ids, str(model.embedding.device))
        self.computed_positions = 0  # positions, padding and ended rows included
        self.useful_positions = 0  # those of prompts, and of answers that had not ended
        self.closed = False
        self._waiting: list[tuple[float, Request]] = []
        self._batch: _PaddedBatch | None = None

    @property
    def busy(self) -> bool:
        """Whether anything is on its way; it may be waiting for others."""
        return bool(self._waiting) or self._batch is not None

    def add(self, request: Request) -> None:
        """Takes a request in."""
        self._waiting.append((self.clock(), request))

    def close(self) -> None:
        """Nothing more comes: what waits need not wait for others."""
        self.closed = True

    @torch.inference_mode()
    def step(self) -> list[Delta]:
        """One step of the model; [] while a batch fills."""
        if self._batch is None:
            if not self._ready():
                return []
            taken, self._waiting = self._waiting[: self.batch_size], self._waiting[self.batch_size :]
            self._batch = _PaddedBatch(self.model, [request for _, request in taken], self.seed)
        batch = self._batch
        self.computed_positions += batch.input_ids.numel()
        self.useful_positions += batch.useful_positions
        deltas = batch.step(self.sampler)
        if not batch.active_rows:
            self._batch = None
        return deltas

    def deadline(self) -> float | None:
        """When the next batch begins even if nobody comes, by `clock`; None if never."""
        if not self._waiting or math.isinf(self.max_wait_seconds):
            return None
        return self._waiting[0][0] + self.max_wait_seconds

    def _ready(self) -> bool:
        due = self.deadline()
        full = len(self._waiting) >= self.batch_size or (self.closed and bool(self._waiting))
        return full or (due is not None and self.clock() >= due)


class _PaddedBatch:
    """A batch under way: `fed` [B, T] ids that the next step computes."""

    def __init__(self, model: Transformer, requests: Sequence[Request], seed: int) -> None:
        self.model, self.requests = model, requests
        self.seeds = [
            r.sampling.seed if r.sampling.seed is not None else derive(seed, "request", r.id)
            for r in requests
        ]
        self.outputs: list[list[int]] = [[] for _ in requests]
        self.active_rows = list(range(len(requests)))
        lengths = torch.tensor([len(r.ids) for r in requests])
        longest, device = int(lengths.max()), model.embedding.device
        self.state = model.new_state(len(requests), longest + max(r.max_tokens for r in requests))
        fed = torch.zeros(len(requests), longest, dtype=torch.long)
        for row, r in enumerate(requests):
            fed[row, longest - len(r.ids) :] = torch.tensor(r.ids)
        positions = torch.arange(longest)[None] - (longest - lengths)[:, None]
        # Padding is document 0 and a row's own text document 1, in which decoding then goes on by itself.
        self.segments: Tensor | None = (positions >= 0).long().to(device)
        self.input_ids, self.positions = fed.to(device), positions.clamp_min(0).to(device)
        if int(lengths.min()) == longest:
            self.segments = None

    @property
    def useful_positions(self) -> int:
        """Positions of `fed` that somebody has use for."""
        began = bool(self.outputs[self.active_rows[0]])
        return len(self.active_rows) if began else sum(len(r.ids) for r in self.requests)

    def step(self, sampler: Sampler) -> list[Delta]:
        """Computes what is fed, and draws a token for each row that has not ended."""
        hidden = self.model(self.input_ids, self.positions, self.segments, self.state)[:, -1]
        alive = torch.tensor(self.active_rows, device=hidden.device)
        drawn = sampler(self.model.logits(hidden[alive]), [self._row(n) for n in self.active_rows])
        newest = torch.zeros(len(self.requests), 1, dtype=torch.long)
        deltas = []
        for n, token in zip(list(self.active_rows), drawn, strict=True):
            r, output = self.requests[n], self.outputs[n]
            output.append(token.id)
            newest[n] = token.id
            finish: FinishReason | None = "stop" if token.id in r.stop_ids else None
            if finish is None and len(output) >= r.max_tokens:
                finish = "length"
            if finish is not None:
                self.active_rows.remove(n)
            deltas.append(Delta(r.id, (token,), finish_reason=finish))
        self.input_ids, self.segments = newest.to(hidden.device), None
        self.positions = self.positions[:, -1:] + 1
        return deltas

    def _row(self, n: int) -> SamplerRow:
        r: Any = self.requests[n]
        return SamplerRow(
            sampling=r.sampling, prompt=r.ids, output=self.outputs[n], seed=self.seeds[n], n_drawn=len(self.outputs[n]),
            top_log_probs=r.top_log_probs,
        )  # fmt: skip
