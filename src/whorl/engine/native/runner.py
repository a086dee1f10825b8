"""A runner that uses the native step where measurements show that it is faster.

    WHORL_NATIVE=0     never
    WHORL_NATIVE=1     for every supported model, without measuring
    (unset)            both are timed when the engine starts, on a step of one row and one of several; under torch's
                       deterministic algorithms nothing is timed and torch runs

CPU flags do not decide: a machine may have bf16 products and run faster without, and two threads may share one core. So the
torch path and the native step, with one thread and with all, run the same small batches on the empty cache. The smallest
geometric mean of the times wins. Batches that the native step cannot run (adapters, replaced products) use torch, step by
step, over the same cache: both write the same pages.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whorl.engine.cache.pages import InputBatch
from whorl.engine.model.runner import ModelRunner
from whorl.engine.native.step import NativeStep, unsupported_reason
from whorl.errors import ConfigError
from whorl.machine.choices import choose_once
from whorl.machine.device_probe import usable_cores
from whorl.models import LanguageModel
from whorl.nn.linear import Linear

TIMED_BATCH_SIZES = (1, 8)  # rows of the timed steps
ROUNDS = 3


class NativeRunner(ModelRunner):
    """A `ModelRunner` over the same cache; further arguments are those of `NativeStep`."""

    def __init__(
        self,
        *args: Any,
        weight_dtype: str | None = None,
        weight_group_size: int | None = None,
        threads: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.native_step = NativeStep(
            self.model, self.page_size, weight_dtype, weight_group_size, threads, self.max_model_len
        )
        self.use_native = True
        self._linears = [m for m in self.model.modules() if isinstance(m, Linear)]

    @torch.inference_mode()
    def run(self, batch: InputBatch) -> Tensor:
        """As `ModelRunner.run`. A row's bits never depend on other rows, so `invariant` has no cost."""
        if self._needs_torch(batch):
            return super().run(batch)
        return self.native_step.run(batch, self.layers, self.group_of)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden) if self._needs_torch() else self.native_step.logits(hidden)

    @torch.inference_mode()
    def hidden(self, batch: InputBatch) -> Tensor:
        if self._needs_torch(batch):
            return super().hidden(batch)
        hidden = torch.empty(len(batch.ids), self.model.config.d_model)
        no_logits = InputBatch(**{**vars(batch), "logit_indices": batch.logit_indices[:0]})
        self.native_step.run(no_logits, self.layers, self.group_of, hidden)
        return hidden

    def refresh(self) -> None:
        super().refresh()
        self.native_step.refresh()

    def _needs_torch(self, batch: InputBatch | None = None) -> bool:
        if not self.use_native or (batch is not None and batch.adapter_indices is not None):
            return True
        return any(
            m.matmul is not None or m._forward_hooks
            for m in self._linears  # fp8 products and forward hooks
        )


def make_runner(
    model: LanguageModel,
    *args: Any,
    weight_dtype: str | None = None,
    weight_group_size: int | None = None,
    compile_native: bool = True,
    **kwargs: Any,
) -> ModelRunner:
    """Return the faster runner for `model` on this machine; arguments as of `ModelRunner` and `NativeStep`.

    compile_native: False runs torch if the native library has not been compiled on this machine, which takes seconds.

    Raises:
        ConfigError: `weight_dtype` is set, and the native step cannot run; only it has weight formats.
    """
    setting = choose_once("WHORL_NATIVE", lambda: os.environ.get("WHORL_NATIVE", ""))
    reason = "WHORL_NATIVE=0" if setting == "0" else unsupported_reason(model, compile_native)
    if not setting and weight_dtype is None and torch.are_deterministic_algorithms_enabled():
        reason = reason or "timing must not decide"
    if kwargs.get("dtype") == torch.int8:
        reason = reason or "its cache is bfloat16 or float32, and kv_cache_dtype is int8"
    if reason is not None:
        if weight_dtype is not None:
            raise ConfigError(
                f"weight_dtype is {weight_dtype}, which needs the native step: {reason}",
                expected="a model that the native step supports",
            )
        return ModelRunner(model, *args, **kwargs)
    runner = NativeRunner(
        model, *args, weight_dtype=weight_dtype, weight_group_size=weight_group_size, **kwargs
    )
    if setting != "1":
        autotune(runner, native_only=weight_dtype is not None)
    return runner


def autotune(runner: NativeRunner, native_only: bool = False) -> dict[str, float]:
    """Select the fastest path and number of threads; returns the seconds of each (geometric mean over batch sizes).

    A continued step of a recipe takes those with which it began, and returns nothing (`machine/choices.py`).

    The cache must be empty: its first pages are written.

    Args:
        native_only: leave out the torch path.
    """
    seconds: dict[str, float] = {}

    def measure(name: str, run: Callable[[InputBatch], Tensor]) -> None:
        log_means = []
        for rows in TIMED_BATCH_SIZES:
            batch = _timing_batch(runner, rows)
            run(batch)
            times = []
            for _ in range(ROUNDS):
                started = time.perf_counter()
                run(batch)
                times.append(time.perf_counter() - started)
            log_means.append(math.log(min(times)))
        seconds[name] = math.exp(sum(log_means) / len(log_means))

    def choose() -> dict[str, int | bool]:
        threads = sorted({1, max(1, usable_cores())})
        for n in threads:
            runner.native_step.threads = n
            measure(f"native, {n} threads", runner.run)
        fastest = min(threads, key=lambda n: seconds[f"native, {n} threads"])
        if not native_only:
            runner.use_native = False
            measure("torch", runner.run)
        return {"threads": fastest, "use_native": min(seconds, key=lambda name: seconds[name]) != "torch"}

    shape = f"{runner.model.config!r} {runner.model.dtype} {native_only}"
    chosen = choose_once(f"engine-{sha256(shape.encode()).hexdigest()[:16]}", choose)
    runner.native_step.threads, runner.use_native = chosen["threads"], chosen["use_native"]
    return seconds


def _timing_batch(runner: ModelRunner, batch_size: int) -> InputBatch:
    """A decode step of rows at their first position, each in a separate page as far as there are pages."""
    n_pages = min(len(layer.tensors[0]) for layer in runner.layers)
    pages = (np.arange(batch_size, dtype=np.int32) % n_pages)[:, None]
    previous_ids = torch.full((batch_size, runner.ngram_context), -1) if runner.ngram_context else None
    return InputBatch(
        torch.arange(batch_size) % runner.model.config.vocab_size,
        torch.zeros(batch_size, dtype=torch.long),
        list(range(batch_size + 1)),
        [1] * batch_size,
        list(range(batch_size)),
        [pages for _ in runner.windows],
        torch.arange(batch_size),
        batch_size,
        previous_ids,
    )
