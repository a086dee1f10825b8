"""The runner: one step of the model over a batch of rows, from ids to logits.

It runs the trained network: `model.trunk` over [1, N, d_model], with a state over the engine's memory for each layer, as its
mixer declares it (`engine/cache/layer_cache.py`).
No model code is duplicated, so every model that trains can be served. A test compares the logits with the training forward
for every family.

The number of torch threads is left alone; the caller measures the best one, since small steps may run faster on one thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from whorl.engine.cache.layer_cache import LayerCaches
from whorl.engine.cache.pages import InputBatch
from whorl.engine.model.multi_lora import Adapters
from whorl.engine.model.token_scores import TokenScores, score_tokens
from whorl.engine.sampling.cpu_sampler import Summarize
from whorl.engine.sequence import Sequence
from whorl.models import LanguageModel


@dataclass
class PagedModelState:
    """The state that a model's `trunk` receives."""

    layers: list[Any]
    length: int = 0


@dataclass
class StepOutput:
    """logits: [W, vocab] fp32 at `logit_indices`. scores: at `score_indices`. hidden: [N, d_model] of all positions."""

    logits: Tensor
    scores: TokenScores | None = None
    hidden: Tensor | None = None


def without_cudnn_attention(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which torch's attention uses other kernels than cuDNN's.

    cuDNN prepares a plan for each new shape, 1.7 ms on an H200, and the keys of a step grow with every page.
    """
    if device.type != "cuda":
        return nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


class ModelRunner:
    """A model with the tensors of its cache.

    Args:
        model: in its compute dtype, `eval()`.
        pages: numbers of pages, by the window of a group of layers.
        page_size: positions per page.
        n_slots: sequences at once.
        capacity: maximum positions of a sequence.
        dtype: of the cache; default the model's compute dtype. int8 applies to keys and values only (`kv_int8.py`).
        adapters: of `model`, for batches that use them.
        invariant: run each row separately, so that its bits do not depend on the batch.
    """

    def __init__(
        self,
        model: LanguageModel,
        pages: dict[int | None, int],
        page_size: int,
        n_slots: int,
        capacity: int,
        dtype: torch.dtype | None = None,
        invariant: bool = False,
        adapters: Adapters | None = None,
    ) -> None:
        self.model, self.page_size, self.invariant = model, page_size, invariant
        self.summarize: Summarize | None = None  # of rows of logits; None uses torch
        self.max_model_len = capacity
        self.adapters = adapters
        self.device = str(model.embedding.device)
        self.caches = LayerCaches(
            model.layer_mixers(), pages, page_size, n_slots, capacity,
            dtype=model.dtype, cache_dtype=dtype, device=self.device,
        )  # fmt: skip
        self.windows, self.layers, self.group_of = (
            self.caches.windows,
            self.caches.layers,
            self.caches.group_of,
        )

    @property
    def has_recurrent_layers(self) -> bool:
        """Whether a layer keeps a state per sequence, of which no prefix can be shared."""
        return bool(self.caches.recurrent)

    @property
    def ngram_context(self) -> int:
        """Ids before a position that its embedding reads."""
        return self.model.ngram_context

    @property
    def n_bytes(self) -> int:
        """Bytes of the cache."""
        return self.caches.n_bytes

    @torch.inference_mode()
    def run(self, batch: InputBatch) -> Tensor:
        """Return logits [W, vocab] fp32 at `logit_indices`; the cache then holds all N positions."""
        logits = [
            self.logits(self.hidden(one)[one.logit_indices.to(self.device)]) for one in self._parts(batch)
        ]
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    @torch.inference_mode()
    def run_step(self, batch: InputBatch, *, needs_hidden: bool = False) -> StepOutput:
        """Run a step that may score ids; returns hidden states only if they are needed."""
        if batch.score_indices is None and not needs_hidden:
            return StepOutput(self.run(batch))
        # Drafts, which need hidden states, are not allowed in an invariant engine.
        parts = [batch] if needs_hidden else list(self._parts(batch))
        hidden = [self.hidden(one) for one in parts]
        logits = [
            self.logits(x[one.logit_indices.to(self.device)]) for x, one in zip(hidden, parts, strict=True)
        ]
        scores = [
            score
            for x, one in zip(hidden, parts, strict=True)
            if (score := score_tokens(self.logits, x, one, self.summarize)) is not None
        ]
        return StepOutput(
            torch.cat(logits),
            TokenScores.cat(scores) if scores else None,
            hidden[0] if needs_hidden else None,
        )

    def _parts(self, batch: InputBatch) -> Iterable[InputBatch]:
        """Return the batches whose products run separately."""
        return batch.split_rows() if self.invariant else [batch]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [W, vocab] fp32 of hidden states [W, d_model]."""
        return self.model.logits(hidden)

    @torch.inference_mode()
    def hidden(self, batch: InputBatch) -> Tensor:
        """Return normalized hidden states [N, d_model] in the compute dtype."""
        self.caches.start_step(batch)
        previous = None if batch.previous_ids is None else batch.previous_ids.to(self.device)
        inputs = batch.ids.to(self.device), batch.positions.to(self.device), previous
        if batch.adapter_indices is None or self.adapters is None:
            return self.forward(*inputs)
        with self.adapters.active(self.adapters.expand_to_positions(batch.adapter_indices, batch.starts)):
            return self.forward(*inputs)

    def forward(self, ids: Tensor, positions: Tensor, previous_ids: Tensor | None) -> Tensor:
        """Return hidden states [N, d_model] of joined rows on the device; the layers' caches are set up."""
        x, where = self.model.prepare_joined(ids, positions, previous_ids, self.max_model_len)
        with without_cudnn_attention(x.device):
            return self.model.trunk(x, where, None, PagedModelState(self.layers))[0]

    def refresh(self) -> None:
        """Called after the model's weights have changed."""

    def swap_out(self, sequence: Sequence) -> None:
        """Copy a sequence's cache contents to `swapped`."""
        used = -(-sequence.n_computed // self.page_size)
        contents = [
            self.read_pages(g, [max(page, 0) for page in pages[:used]])
            for g, pages in enumerate(sequence.pages)
        ]
        states = [layer.read(sequence.slot) for layer in self.caches.recurrent]
        sequence.swapped = [[t.cpu() for t in group] for group in contents], states

    def swap_in(self, sequence: Sequence) -> None:
        """Copy `swapped` back into the sequence's current pages and slot."""
        contents, states = sequence.swapped
        sequence.swapped = None
        used = -(-sequence.n_computed // self.page_size)
        for g, group in enumerate(contents):
            self.write_pages(g, sequence.pages[g][:used], group)
        for layer, state in zip(self.caches.recurrent, states, strict=True):
            layer.write(sequence.slot, state)

    def read_pages(self, group: int, pages: list[int]) -> list[Tensor]:
        """Return copies of the contents of `pages` in every layer of the group, layer by layer, tensor by tensor."""
        index = torch.tensor(pages, device=self.device)
        return [t[index] for t in self.caches.page_tensors(group)]

    def write_pages(self, group: int, pages: list[int], contents: list[Tensor]) -> None:
        """Write contents that `read_pages` returned into any pages."""
        index = torch.tensor(pages, device=self.device)
        for t, c in zip(self.caches.page_tensors(group), contents, strict=True):
            t[index] = c.to(t.device)
