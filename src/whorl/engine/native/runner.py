"""A runner whose step is the native one where that is faster, and how that is found out.

    WHORL_NATIVE=0     never
    WHORL_NATIVE=1     wherever the model is supported, unmeasured
    (unset)            both are timed where the engine starts, on a step of one row and one of several

Nothing is taken from CPU flags: a machine may have bf16 products and be faster without, two threads may share one core. So
torch's path and ours, with one thread and with all, run the same small batches on the engine's own empty cache, and the
smallest geometric mean of their times wins. What cannot be run natively (adapters, replaced products) goes by torch, step by
step, over the same cache: both write the same pages.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whorl.engine.cache.pages import Batch
from whorl.engine.model.runner import Runner
from whorl.engine.native.step import NativeStep, supports
from whorl.errors import ConfigError
from whorl.machine.device_probe import usable_cores
from whorl.models import LanguageModel
from whorl.nn.linear import Linear

ROWS = (1, 8)  # of the steps that are timed
ROUNDS = 3


class NativeRunner(Runner):
    """A `Runner` over the same cache; arguments beyond its own are those of `NativeStep`."""

    def __init__(
        self,
        *args: Any,
        kind: str | None = None,
        group: int | None = None,
        threads: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.step = NativeStep(self.model, self.page_size, kind, group, threads, self.capacity)
        self.native = True
        self._linears = [m for m in self.model.modules() if isinstance(m, Linear)]

    @torch.inference_mode()
    def run(self, batch: Batch) -> Tensor:
        """As `Runner`. A row's bits depend on no other row anyway: `invariant` costs nothing here."""
        if self._by_torch(batch):
            return super().run(batch)
        return self.step.run(batch, self.layers, self.group_of)  # type: ignore[arg-type]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden) if self._by_torch() else self.step.logits(hidden)

    @torch.inference_mode()
    def hidden(self, batch: Batch) -> Tensor:
        if self._by_torch(batch):
            return super().hidden(batch)
        hidden = torch.empty(len(batch.ids), self.model.config.d_model)
        none = Batch(**{**vars(batch), "wanted": batch.wanted[:0]})
        self.step.run(none, self.layers, self.group_of, hidden)  # type: ignore[arg-type]
        return hidden

    def refresh(self) -> None:
        super().refresh()
        self.step.refresh()

    def _by_torch(self, batch: Batch | None = None) -> bool:
        if not self.native or (batch is not None and batch.adapters is not None):
            return True
        return any(
            m.product is not None or m._forward_hooks
            for m in self._linears  # fp8's, and somebody's who looks on
        )


def make_runner(
    model: LanguageModel,
    *args: Any,
    kind: str | None = None,
    group: int | None = None,
    **kwargs: Any,
) -> Runner:
    """The faster runner for `model` here; arguments as of `Runner` and `NativeStep`.

    Raises:
        ConfigError: `kind` is given, and the native step, which alone has kinds, cannot run.
    """
    wish = os.environ.get("WHORL_NATIVE", "")
    reason = "WHORL_NATIVE=0" if wish == "0" else supports(model)
    if kwargs.get("dtype") == torch.int8:
        reason = reason or "its cache is of bfloat16 or float32, and int8 was asked for"
    if reason is not None:
        if kind is not None:
            raise ConfigError(
                f"weights are asked for in {kind}: {reason}", expected="a model of the native step"
            )
        return Runner(model, *args, **kwargs)
    runner = NativeRunner(model, *args, kind=kind, group=group, **kwargs)
    if wish != "1":
        fastest(runner, forced=kind is not None)
    return runner


def fastest(runner: NativeRunner, forced: bool = False) -> dict[str, float]:
    """Sets the way and the number of threads that were fastest; -> seconds of each (a geometric mean over `ROWS`).

    The cache must be empty: its first pages are written to.

    Args:
        forced: torch's way is not among those compared.
    """
    seconds: dict[str, float] = {}

    def measure(name: str, run: Callable[[Batch], Tensor]) -> None:
        means = []
        for rows in ROWS:
            batch = _trial(runner, rows)
            run(batch)
            times = []
            for _ in range(ROUNDS):
                began = time.perf_counter()
                run(batch)
                times.append(time.perf_counter() - began)
            means.append(math.log(min(times)))
        seconds[name] = math.exp(sum(means) / len(means))

    threads = sorted({1, max(1, usable_cores())})
    for n in threads:
        runner.step.threads = n
        measure(f"native, {n} threads", runner.run)
    runner.step.threads = min(threads, key=lambda n: seconds[f"native, {n} threads"])
    if not forced:
        runner.native = False
        measure("torch", runner.run)
        runner.native = min(seconds, key=lambda name: seconds[name]) != "torch"
    return seconds


def _trial(runner: Runner, rows: int) -> Batch:
    """A decoding step of rows at their first position, each in a page of its own as far as there are pages."""
    n_pages = min(len(layer.tensors[0]) for layer in runner.layers)  # type: ignore[union-attr]
    pages = (np.arange(rows, dtype=np.int32) % n_pages)[:, None]
    before = torch.full((rows, runner.reach), -1) if runner.reach else None
    return Batch(
        torch.arange(rows) % runner.model.config.vocab_size, torch.zeros(rows, dtype=torch.long), list(range(rows + 1)),
        [1] * rows, list(range(rows)), [pages for _ in runner.windows], torch.arange(rows), rows, before,
    )  # fmt: skip
