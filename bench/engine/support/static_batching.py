"""Static and dynamic batching, the baselines of continuous batching, over the same models and sampler.

    static     a batch starts when `batch_size` requests are waiting, and ends with its longest output
    dynamic    as static, but the batch starts after `max_wait_seconds` even if it is not full

Differences from `engine.py`: the batch is a rectangle in the model's contiguous state, allocated once per batch.
Prompts are padded on the left to the longest, so that all rows end at the same column. Padding is a separate document,
which no other position attends to, and each row counts its positions without it. A finished row is computed until the
last row finishes. Continuous batching (Yu et al. 2022, Orca) removes that cost, the padding and the waiting.

Both schemes stream tokens as they are computed and do not sample finished rows. Tokens are drawn as in the engine, from
the request's seed and the position, so all three schemes write equal texts. `bench/engine/batching.py` compares their
latency.
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
    """Static batching; dynamic with `max_wait_seconds`. `add`, `step` and `busy` as in `Engine`.

    Supports the request fields ids, sampling, max_tokens and stop_ids.

    Args:
        model: a Transformer, in its compute dtype.
        batch_size: requests per batch.
        max_wait_seconds: longest time that a request waits for a full batch; infinite in static batching.
        banned_ids: ids that are never sampled.
        seed: base seed for requests without a seed, as in `EngineConfig`.
        clock: returns seconds.

    Raises:
        ConfigError: a model without document masks in its state.
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
        self.computed_positions = 0  # positions, padding and finished rows included
        self.useful_positions = 0  # positions of prompts and of unfinished outputs
        self.closed = False
        self._waiting: list[tuple[float, Request]] = []
        self._batch: _PaddedBatch | None = None

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished, including requests that wait for a full batch."""
        return bool(self._waiting) or self._batch is not None

    def add(self, request: Request) -> None:
        """Add a request."""
        self._waiting.append((self.clock(), request))

    def close(self) -> None:
        """No more requests arrive: waiting requests need not wait for a full batch."""
        self.closed = True

    @torch.inference_mode()
    def step(self) -> list[Delta]:
        """Run one model step; [] while a batch fills."""
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
        """Latest start of the next batch by `clock`; None without a limit."""
        if not self._waiting or math.isinf(self.max_wait_seconds):
            return None
        return self._waiting[0][0] + self.max_wait_seconds

    def _ready(self) -> bool:
        due = self.deadline()
        full = len(self._waiting) >= self.batch_size or (self.closed and bool(self._waiting))
        return full or (due is not None and self.clock() >= due)


class _PaddedBatch:
    """A running batch: `input_ids` [B, T] of the next step."""

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
        # Padding is document 0 and the row's text is document 1, which decoding continues.
        self.segments: Tensor | None = (positions >= 0).long().to(device)
        self.input_ids, self.positions = fed.to(device), positions.clamp_min(0).to(device)
        if int(lengths.min()) == longest:
            self.segments = None

    @property
    def useful_positions(self) -> int:
        """Positions of `input_ids` that are neither padding nor of finished rows."""
        decoding = bool(self.outputs[self.active_rows[0]])
        return len(self.active_rows) if decoding else sum(len(r.ids) for r in self.requests)

    def step(self, sampler: Sampler) -> list[Delta]:
        """Compute `input_ids` and sample a token for each unfinished row."""
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
