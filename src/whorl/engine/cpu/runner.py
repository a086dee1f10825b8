"""A runner that uses the native step where measurements show that it is faster.

    WHORL_CHOOSE=cpu=torch      never
    WHORL_CHOOSE=cpu=native     for every supported model, without measuring
    default                     both are timed when the engine starts, on a step of one row and one of several, or of
                                `EngineConfig.decode_rows`; under torch's deterministic algorithms torch runs, untimed

CPU flags do not decide: a machine may have bf16 products and run faster without, and two threads may share one core. So the
torch path and the native step, by tile registers and by vectors, with one thread and with all, run the same small batches on
the empty cache. The fastest wins and is kept for this machine (`machine/kernel_choice.py`). Batches that the native step
cannot run (adapters, replaced products) use torch, step by step, over the same cache: both write the same pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whorl.engine.cache.pages import InputBatch
from whorl.engine.cpu.sampling import Draws, decode
from whorl.engine.cpu.step import NativeStep, unsupported_reason
from whorl.engine.cpu.summary import row_summary
from whorl.engine.model.cuda_graphs import GraphRunner
from whorl.engine.model.runner import ModelRunner, StepOutput
from whorl.engine.model.token_scores import score_logits
from whorl.errors import ConfigError
from whorl.machine.device_probe import usable_cores
from whorl.machine.kernel_choice import choose_once, fastest, forced_choices, refuse_forced
from whorl.models import LanguageModel
from whorl.nn.linear import Linear

TIMED_BATCH_SIZES = (1, 1, 1, 1, 8)  # rows of the timed steps: one row and several weigh about the same
MOST_LOGITS = 1 << 24  # of a step at once: 64 MB
Setting = tuple[str, int] | None  # method and threads of the native step; None runs torch
MIN_TIMED_ROWS = 16  # below, the choice is the one for few rows


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
        self.summarize = row_summary(self.native_step)
        self._linears = [m for m in self.model.modules() if isinstance(m, Linear)]

    @torch.inference_mode()
    def run(self, batch: InputBatch) -> Tensor:
        """As `ModelRunner.run`. A row's bits never depend on other rows, so `invariant` has no cost."""
        if self._needs_torch(batch):
            return super().run(batch)
        return self.native_step.run(batch, self.layers, self.group_of)

    @torch.inference_mode()
    def run_step(self, batch: InputBatch, *, needs_hidden: bool = False) -> StepOutput:
        """As `ModelRunner.run_step`. A step that only scores computes the last layer for the scored positions alone."""
        ids, where = batch.score_targets, batch.score_indices
        if ids is None or where is None or len(batch.logit_indices) or needs_hidden or self.invariant:
            return super().run_step(batch, needs_hidden=needs_hidden)
        if len(ids) * self.native_step.vocab_size > MOST_LOGITS or self._needs_torch(batch):
            return super().run_step(batch)
        logits = self.native_step.run(replace(batch, logit_indices=where), self.layers, self.group_of)
        return StepOutput(logits[:0], score_logits(logits, ids, batch.n_alternatives, self.summarize))

    def can_decode(self, batch: InputBatch) -> bool:
        """Whether `decode` runs the batch."""
        return not self._needs_torch(batch)

    def decode(self, batch: InputBatch, draws: Draws) -> None:
        """Run several decode steps at once (`cpu/sampling.py`)."""
        decode(self.native_step, batch, self.layers, self.group_of, draws)

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

    def _parts(self, batch: InputBatch) -> Iterable[InputBatch]:
        return super()._parts(batch) if self._needs_torch(batch) else [batch]

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
    decode_rows: int | None = None,
    max_threads: int | None = None,
    **kwargs: Any,
) -> ModelRunner:
    """Return the faster runner for `model` on this machine; arguments as of `ModelRunner` and `NativeStep`.

    compile_native: False runs torch if the native library has not been compiled on this machine, which takes seconds.
    decode_rows: usual rows of a decode step, for the choice by timing. max_threads: of the native step.

    Raises:
        ConfigError: `weight_dtype` is set, and the native step cannot run; only it has weight formats. Or a forced choice
            that is impossible.
    """
    setting = choose_once("cpu", lambda: forced_choices().get("cpu", ""))
    reason = "cpu=torch is forced" if setting == "torch" else unsupported_reason(model, compile_native)
    if not setting and weight_dtype is None and torch.are_deterministic_algorithms_enabled():
        reason = reason or "timing must not decide"
    if reason is not None:
        refuse_forced(["engine_step"], reason, allowed="torch")
        if weight_dtype is not None:
            raise ConfigError(
                f"weight_dtype is {weight_dtype}, which needs the native step: {reason}",
                expected="a model that the native step supports",
            )
        graphs = model.embedding.is_cuda and not kwargs.get("invariant")
        return (GraphRunner if graphs else ModelRunner)(model, *args, **kwargs)
    runner = NativeRunner(
        model,
        *args,
        weight_dtype=weight_dtype,
        weight_group_size=weight_group_size,
        threads=max_threads,
        **kwargs,
    )
    if setting != "native":
        autotune(runner, weight_dtype is not None, decode_rows, max_threads)
    return runner


def autotune(
    runner: NativeRunner,
    native_only: bool = False,
    decode_rows: int | None = None,
    max_threads: int | None = None,
) -> str:
    """Select the fastest path, method and number of threads, and return its name; kept for this machine (`fastest`).

    The cache must be empty: its first pages are written.

    Args:
        native_only: leave out the torch path.
        decode_rows: usual rows of a decode step, rounded down to a power of 2; below 16 and by default one and several.
        max_threads: default all usable cores.
    """
    step, settings = runner.native_step, step_ways(runner, native_only, max_threads)
    rows = timed_rows(decode_rows)
    steps = decode_steps(runner, rows)

    def work(setting: Setting) -> None:
        apply_way(runner, setting)
        steps()

    suffix = "" if rows == TIMED_BATCH_SIZES else f" {rows[0]} rows"
    name = f"engine_step {step_shape(runner, step.group_size)} {step.weight_dtype}{suffix}"
    chosen = fastest(name, {way: partial(work, setting) for way, setting in settings.items()})
    apply_way(runner, settings[chosen])
    return chosen


def timed_rows(decode_rows: int | None) -> tuple[int, ...]:
    """Return the rows of the steps that are timed: `decode_rows` rounded down to a power of 2, or one row and several."""
    if decode_rows is None or decode_rows < MIN_TIMED_ROWS:
        return TIMED_BATCH_SIZES
    return (1 << decode_rows.bit_length() - 1,)


def decode_steps(runner: ModelRunner, rows: Sequence[int]) -> Callable[[], None]:
    """Return a function that runs one decode step of each size on an empty cache, whose first pages it writes."""
    batches = {n: _timing_batch(runner, n) for n in set(rows)}

    def work() -> None:
        for n in rows:
            runner.run(batches[n])

    return work


def step_shape(runner: ModelRunner, group_size: int | None = None) -> str:
    """Return the name of a model's shape and compute dtype, for choices."""
    c = runner.model.config
    shape = f"{c!r} {runner.model.dtype} {runner.layers[0].k.dtype} {group_size}"
    if runner.model.quantization is not None:
        shape += f" {runner.model.quantization!r}"
    digest = sha256(shape.encode()).hexdigest()[:8]
    return f"{c.n_layers}x{c.d_model}/{c.vocab_size} {digest}"


def step_ways(
    runner: NativeRunner, native_only: bool = False, max_threads: int | None = None
) -> dict[str, Setting]:
    """Return the settings of the ways to run steps, by name; arguments as of `autotune`."""
    ways = [
        (f"native, {method}, {n} threads", (method, n))
        for method in runner.native_step.methods
        for n in _thread_counts(max_threads)
    ]
    settings: dict[str, Setting] = dict(ways)
    return settings if native_only else {**settings, "torch": None}


def apply_way(runner: NativeRunner, setting: Setting) -> None:
    """Run the next steps in this way."""
    runner.use_native = setting is not None
    if setting is not None:
        runner.native_step.method, runner.native_step.threads = setting


def _thread_counts(most: int | None = None) -> list[int]:
    """The default, `most` or all usable cores, first."""
    return sorted({1, most or max(1, usable_cores())}, reverse=True)


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
