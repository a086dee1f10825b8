"""Decoding steps on a GPU as CUDA graphs.

A decoding step of a small model is a thousand launches of microseconds, and Python needs 6 us for each. A CUDA graph records
them once and launches them together, for inputs of fixed sizes. So the steps in which every row has one position are padded:
rows and pages to powers of 2. Each pair of sizes is recorded when it first occurs, which takes as long as one more step.

    rows of padding    position 0 of a page that no sequence owns
    pages of padding   page 0; attention hides them by position

All graphs share one memory pool, so the logits of a step hold only until the next one. Steps with prompts, drafts, scores or
adapters run as in `ModelRunner`, over the same cache. So do all steps of a model whose layers keep a state per sequence, and
of one that waits for the GPU within a step, as experts do to count their tokens.

Weights are updated in place, so a graph reads the new ones.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whorl.engine.cache.pages import InputBatch, PageIndex
from whorl.engine.model.runner import ModelRunner
from whorl.models import LanguageModel

log = logging.getLogger(__name__)


class GraphRunner(ModelRunner):
    """A `ModelRunner` that replays decoding steps; arguments as there."""

    def __init__(self, model: LanguageModel, pages: dict[int | None, int], *args: Any, **kwargs: Any) -> None:
        super().__init__(model, {window: n + 1 for window, n in pages.items()}, *args, **kwargs)
        self.spare_pages = [pages[window] for window in self.windows]  # of padded rows
        self.longest_table = -(-self.max_model_len // self.page_size)
        self.replays = not self.has_recurrent_layers and bool(self.windows)
        self._modules = list(self.model.modules())
        self._steps: dict[tuple[int, int], DecodeStep] = {}
        self._pool: Any = None

    @torch.inference_mode()
    def run(self, batch: InputBatch) -> Tensor:
        """As `ModelRunner.run`; the logits of a decoding step hold until the next step."""
        rows = len(batch.lengths)
        if not self.replays or batch.n_single < rows or batch.adapter_indices is not None or self._hooked():
            return super().run(batch)
        size = padded_size(rows), min(padded_size(batch.pages[0].shape[1]), self.longest_table)
        if size not in self._steps:
            try:
                self._steps[size] = DecodeStep(self, *size, pool=self._pool)
            except RuntimeError as error:
                log.info("decoding without CUDA graphs: %s", str(error).split("\n")[0])
                self.replays = False
                return super().run(batch)
            self._pool = self._steps[size].pool
        logits = self._steps[size].run(batch)[:rows]
        return logits if len(batch.logit_indices) == rows else logits[batch.logit_indices.to(logits.device)]

    def _hooked(self) -> bool:
        """Whether a forward hook must see each step."""
        return any(module._forward_hooks for module in self._modules)


def padded_size(n: int) -> int:
    """Return the power of 2 that is at least `n`."""
    return 1 << (n - 1).bit_length()


class DecodeStep:
    """A decoding step of fixed sizes: its inputs, and on a GPU its graph.

    Args:
        rows, pages: sizes. pool: memory of other graphs, or None.

    Raises:
        RuntimeError: the step waits for the GPU, so it cannot be recorded.
    """

    def __init__(self, runner: GraphRunner, rows: int, pages: int, pool: Any = None) -> None:
        self.runner, self.rows, self.pages, self.pool = runner, rows, pages, pool
        on_gpu, context = runner.device != "cpu", runner.ngram_context
        # One tensor, so one copy: ids and positions [B], the ids before them [B, K], and a table [B, P] of each group.
        widths = [1, 1, context, *[pages] * len(runner.windows)]
        self._on_host = torch.zeros(rows * sum(widths), dtype=torch.int64, pin_memory=on_gpu)
        self._inputs = torch.zeros(len(self._on_host), dtype=torch.int64, device=runner.device)
        sizes = [rows * width for width in widths]
        views = [part.numpy() for part in torch.split(self._on_host, sizes)]
        self._ids, self._positions = views[:2]
        self._previous = views[2].reshape(rows, context)
        self._tables = [part.reshape(rows, pages) for part in views[3:]]
        parts = torch.split(self._inputs, sizes)
        self._device_inputs = parts[0], parts[1], parts[2].view(rows, context) if context else None
        self._device_tables = [part.view(rows, pages) for part in parts[3:]]
        self._fill_padding(0)
        self._graph: torch.cuda.CUDAGraph | None = None
        if on_gpu:
            with torch.cuda.device(self._inputs.device):
                self._record()

    def run(self, batch: InputBatch) -> Tensor:
        """Return the logits [B, vocab] fp32 of a batch of up to B rows, padded; overwritten by the next step."""
        n = len(batch.lengths)
        self._ids[:n], self._positions[:n] = batch.ids.numpy(), batch.positions.numpy()
        if batch.previous_ids is not None:
            self._previous[:n] = batch.previous_ids.numpy()
        for table, pages in zip(self._tables, batch.pages, strict=True):
            np.maximum(pages, 0, out=table[:n, : pages.shape[1]], casting="same_kind")
            table[:n, pages.shape[1] :] = 0
        self._fill_padding(n)
        # The sampler waits for the step, so the host's tensor is free again.
        self._inputs.copy_(self._on_host, non_blocking=True)
        if self._graph is None:
            return self._compute()
        self._graph.replay()
        return self._logits

    def _fill_padding(self, n: int) -> None:
        self._ids[n:], self._positions[n:], self._previous[n:] = 0, 0, -1
        for table, spare in zip(self._tables, self.runner.spare_pages, strict=True):
            table[n:] = spare

    def _compute(self) -> Tensor:
        runner, (ids, positions, previous) = self.runner, self._device_inputs
        runner.caches.use_pages(
            [PageIndex.of_decode_rows(t, positions, runner.page_size) for t in self._device_tables]
        )
        return runner.logits(runner.forward(ids, positions, previous))

    def _record(self) -> None:
        self._inputs.copy_(self._on_host)
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        mode = torch.cuda.get_sync_debug_mode()
        with torch.cuda.stream(side):
            self._compute()  # kernels are loaded and chosen
            torch.cuda.set_sync_debug_mode("error")
            try:
                self._compute()
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=self.pool):
            self._logits = self._compute()
        self.pool = self._graph.pool()
