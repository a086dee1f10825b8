"""The runner: one step of the model over a batch of rows, from ids to logits.

It runs the trained network: `model.trunk` over [1, N, d_model], with paged states for its layers (`engine/cache/pages.py`).
No model code is duplicated, so every model that trains can be served. A test compares the logits with the training forward
for every family.

The number of torch threads is left alone; the caller measures the best one, since small steps may run faster on one thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whorl.engine.cache.kv_int8 import Int8KVPages
from whorl.engine.cache.pages import InputBatch, KVPages, LatentPages, PageIndex, RecurrentStates
from whorl.engine.model.multi_lora import Adapters
from whorl.engine.sequence import Sequence
from whorl.errors import ConfigError
from whorl.models import Decoder, LanguageModel, Transformer
from whorl.models.transformer_config import AttentionConfig, MLAConfig
from whorl.nn.attention.mla import MultiHeadLatentAttention
from whorl.nn.attention.multi_head import MultiHeadAttention

LayerState = KVPages | LatentPages | RecurrentStates


@dataclass
class PagedModelState:
    """The state that a model's `trunk` receives."""

    layers: list[Any]
    length: int = 0


def layer_windows(model: LanguageModel) -> list[int | None]:
    """Return the attention window of each layer; None for full attention, -1 for recurrent states.

    Raises:
        ConfigError: the engine does not support this type of model.
    """
    if isinstance(model, Decoder):
        return [None] * model.config.n_layers
    if not isinstance(model, Transformer):
        raise ConfigError(
            f"the engine cannot run a {type(model).__name__}", expected="a Decoder or a Transformer"
        )
    windows: list[int | None] = []
    for mixer in model.config.layer_mixers():
        if isinstance(mixer, AttentionConfig):
            windows.append(mixer.window if mixer.block is None else None)
        else:
            windows.append(None if isinstance(mixer, MLAConfig) else -1)
    return windows


class ModelRunner:
    """A model with the tensors of its cache.

    Args:
        model: in its compute dtype, `eval()`.
        pages: of each layer group, in the order of `windows`.
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
        self.max_model_len = capacity
        self.adapters = adapters
        self.device = str(model.embedding.device)
        windows = layer_windows(model)
        self.windows = sorted({k for k in windows if k != -1}, key=lambda w: (w is not None, w or 0))
        self.has_recurrent_layers = -1 in windows
        int8 = dtype == torch.int8
        cache_type = model.dtype if dtype is None or int8 else dtype
        page_class = Int8KVPages if int8 else KVPages
        self.layers: list[LayerState] = []
        self.group_of: list[int] = []  # group of each layer; -1 for recurrent states
        self._shared_kv_layers: set[int] = set()  # layers that read another layer's pages and have none
        for block, window in zip(model.blocks, windows, strict=True):
            mixer: Any = block.attention if isinstance(model, Decoder) else block.mixer
            self.group_of.append(-1 if window == -1 else self.windows.index(window))
            if window == -1:
                self.layers.append(RecurrentStates(mixer, n_slots, capacity, model.dtype, self.device))
            elif isinstance(mixer, MultiHeadLatentAttention):
                width = mixer.kv_rank + mixer.rope_dim
                self.layers.append(LatentPages(pages[window], page_size, width, cache_type, self.device))
            else:
                has_kv = not isinstance(mixer, MultiHeadAttention) or mixer.has_kv_proj
                if not has_kv:
                    self._shared_kv_layers.add(len(self.layers))
                sizes = pages[window] if has_kv else 1, mixer.n_kv_heads, page_size, mixer.head_dim
                keep_raw_keys = mixer.smear is not None
                self.layers.append(page_class(*sizes, cache_type, self.device, keep_raw_keys))

    @property
    def ngram_context(self) -> int:
        """Ids before a position that its embedding reads."""
        return self.model.ngram_context

    @property
    def n_bytes(self) -> int:
        """Bytes of the cache."""
        return sum(layer.n_bytes for layer in self.layers)

    @torch.inference_mode()
    def run(self, batch: InputBatch) -> Tensor:
        """Return logits [W, vocab] fp32 at `logit_indices`; the cache then holds all N positions."""
        if self.invariant:
            return torch.cat([self.logits(self.hidden(one)[one.logit_indices]) for one in batch.split_rows()])
        return self.logits(self.hidden(batch)[batch.logit_indices])

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [W, vocab] fp32 of hidden states [W, d_model]."""
        return self.model.logits(hidden)

    @torch.inference_mode()
    def hidden(self, batch: InputBatch) -> Tensor:
        """Return normalized hidden states [N, d_model] in the compute dtype."""
        page_indices = [
            PageIndex(batch, g, self.page_size, w, self.device) for g, w in enumerate(self.windows)
        ]
        for layer, group in zip(self.layers, self.group_of, strict=True):
            if isinstance(layer, RecurrentStates):
                layer.batch = batch
            else:
                layer.page_index = page_indices[group]
        state, model = PagedModelState(self.layers), self.model
        x, where = model.prepare_joined(batch.ids, batch.positions, batch.previous_ids, self.max_model_len)
        if batch.adapter_indices is None or self.adapters is None:
            return model.trunk(x, where, None, state)[0]
        with self.adapters.active(self.adapters.expand_to_positions(batch.adapter_indices, batch.starts)):
            return model.trunk(x, where, None, state)[0]

    def refresh(self) -> None:
        """Called after the model's weights have changed."""

    def swap_out(self, sequence: Sequence) -> None:
        """Copy a sequence's cache contents to `swapped`."""
        used = -(-sequence.n_computed // self.page_size)
        contents = [
            self.read_pages(g, [max(page, 0) for page in pages[:used]])
            for g, pages in enumerate(sequence.pages)
        ]
        states = [layer.read(sequence.slot) for layer in self.recurrent_states()]
        sequence.swapped = [[t.cpu() for t in group] for group in contents], states

    def swap_in(self, sequence: Sequence) -> None:
        """Copy `swapped` back into the sequence's current pages and slot."""
        contents, states = sequence.swapped
        sequence.swapped = None
        used = -(-sequence.n_computed // self.page_size)
        for g, group in enumerate(contents):
            self.write_pages(g, sequence.pages[g][:used], group)
        for layer, state in zip(self.recurrent_states(), states, strict=True):
            layer.write(sequence.slot, state)

    def read_pages(self, group: int, pages: list[int]) -> list[Tensor]:
        """Return copies of the contents of `pages` in every layer of the group, layer by layer, tensor by tensor."""
        index = torch.tensor(pages, device=self.device)
        return [t[index] for t in self.page_tensors(group)]

    def write_pages(self, group: int, pages: list[int], contents: list[Tensor]) -> None:
        """Write contents that `read_pages` returned into any pages."""
        index = torch.tensor(pages, device=self.device)
        for t, c in zip(self.page_tensors(group), contents, strict=True):
            t[index] = c.to(t.device)

    def page_tensors(self, group: int) -> list[Tensor]:
        """Page tensors of all layers of a group; the first dimension is the page."""
        return [
            t
            for number, (layer, g) in enumerate(zip(self.layers, self.group_of, strict=True))
            if g == group and not isinstance(layer, RecurrentStates) and number not in self._shared_kv_layers
            for t in layer.tensors
        ]

    def recurrent_states(self) -> list[RecurrentStates]:
        """The layers with recurrent states."""
        return [layer for layer in self.layers if isinstance(layer, RecurrentStates)]
