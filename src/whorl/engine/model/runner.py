"""The runner: one step of the model over a batch of rows, from ids to logits.

It is the very network that was trained: `model.trunk` over [1, N, d_model] with a state for each layer that knows the pages
(`engine/cache/pages.py`). Nothing of a model is written a second time here, so whatever trains can be served; a test holds the
logits to the training forward for every family.

How many threads torch has is left alone: a step of few rows may be faster on one, and whoever starts the engine measures.
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
    """What a model's `trunk` is given as its state."""

    layers: list[Any]
    last_ids: Tensor | None = None
    length: int = 0


def layer_windows(model: LanguageModel) -> list[int | None]:
    """Of each layer the window that its cache may forget behind, None where all is kept; -1 for states of fixed size.

    Raises:
        ConfigError: a kind of model that the engine does not know.
    """
    if isinstance(model, Decoder):
        return [None] * model.config.n_layers
    if not isinstance(model, Transformer):
        raise ConfigError(
            f"the engine cannot run a {type(model).__name__}", expected="a Decoder or a Transformer"
        )
    kinds: list[int | None] = []
    for mixer in model.config.layer_mixers():
        if isinstance(mixer, AttentionConfig):
            kinds.append(mixer.window if mixer.block is None else None)
        else:
            kinds.append(None if isinstance(mixer, MLAConfig) else -1)
    return kinds


class ModelRunner:
    """A model with its cache's tensors.

    Args:
        model: in the type that it is to compute in, `eval()`.
        pages: of each layer group (`groups`), in the order of `windows`.
        page_size: positions a page.
        n_slots: sequences at once; capacity: the longest of them.
        dtype: of the cache; by default the model's compute type. int8: of keys and values alone (`kv_int8.py`).
        adapters: of `model`, for batches that name any.
        invariant: run each row by itself, so that no bit of it depends on who else is in the batch.
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
        kinds = layer_windows(model)
        self.windows = sorted({k for k in kinds if k != -1}, key=lambda w: (w is not None, w or 0))
        self.has_recurrent_layers = -1 in kinds
        int8 = dtype == torch.int8
        cache_type = model.dtype if dtype is None or int8 else dtype
        kind_of_pages = Int8KVPages if int8 else KVPages
        self.layers: list[LayerState] = []
        self.group_of: list[int] = []  # of each layer; -1 for slots
        self._shared_kv_layers: set[int] = (
            set()
        )  # layers that read another's pages and have none of their own
        for block, kind in zip(model.blocks, kinds, strict=True):
            mixer: Any = block.attention if isinstance(model, Decoder) else block.mixer
            self.group_of.append(-1 if kind == -1 else self.windows.index(kind))
            if kind == -1:
                self.layers.append(RecurrentStates(mixer, n_slots, capacity, model.dtype, self.device))
            elif isinstance(mixer, MultiHeadLatentAttention):
                width = mixer.kv_rank + mixer.rope_dim
                self.layers.append(LatentPages(pages[kind], page_size, width, cache_type, self.device))
            else:
                own = not isinstance(mixer, MultiHeadAttention) or mixer.has_kv_proj
                if not own:
                    self._shared_kv_layers.add(len(self.layers))
                sizes = pages[kind] if own else 1, mixer.n_kv_heads, page_size, mixer.head_dim
                smeared = mixer.smear is not None
                self.layers.append(kind_of_pages(*sizes, cache_type, self.device, smeared))

    @property
    def ngram_context(self) -> int:
        """Ids before a position that its embedding wants."""
        if isinstance(self.model, Decoder) and self.model.config.ngram_orders:
            return max(self.model.config.ngram_orders) - 1
        return 0

    @property
    def n_bytes(self) -> int:
        """Of the cache."""
        return sum(layer.n_bytes for layer in self.layers)

    @torch.inference_mode()
    def run(self, batch: InputBatch) -> Tensor:
        """-> logits [W, vocab] fp32 of the wanted positions; the cache holds all N afterwards."""
        if self.invariant:
            return torch.cat([self.logits(self.hidden(one)[one.logit_indices]) for one in batch.split_rows()])
        return self.logits(self.hidden(batch)[batch.logit_indices])

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[W, d_model] -> [W, vocab] fp32."""
        return self.model.logits(hidden)

    @torch.inference_mode()
    def hidden(self, batch: InputBatch) -> Tensor:
        """-> [N, d_model] normalised hidden states, in the compute type."""
        places = [PageIndex(batch, g, self.page_size, w, self.device) for g, w in enumerate(self.windows)]
        for layer, group in zip(self.layers, self.group_of, strict=True):
            if isinstance(layer, RecurrentStates):
                layer.batch = batch
            else:
                layer.page_index = places[group]
        ids, positions = batch.ids[None], batch.positions[None]
        state = PagedModelState(self.layers)
        model = self.model
        where: Any = positions
        if isinstance(model, Decoder):
            where = model.rotary_for(self.max_model_len).tables_at(positions)
            if batch.previous_ids is None:
                x = model.embed(ids)
            else:  # each position with the ids before it, as a row of its own
                state.last_ids = batch.previous_ids
                x = model.embed(batch.ids[:, None], None, state).transpose(0, 1)  # type: ignore[arg-type]
        else:
            x = model.embed(ids, positions)  # type: ignore[operator]
        if batch.adapter_indices is None or self.adapters is None:
            return model.trunk(x, where, None, state)[0]
        with self.adapters.active(self.adapters.expand_to_positions(batch.adapter_indices, batch.starts)):
            return model.trunk(x, where, None, state)[0]

    def refresh(self) -> None:
        """The model's weights have changed."""

    def swap_out(self, sequence: Sequence) -> None:
        """Keeps what the cache holds of a sequence beside it (`swapped`)."""
        used = -(-sequence.n_computed // self.page_size)
        contents = [
            self.read_pages(g, [max(page, 0) for page in pages[:used]])
            for g, pages in enumerate(sequence.pages)
        ]
        states = [layer.read(sequence.slot) for layer in self.recurrent_states()]
        sequence.swapped = [[t.cpu() for t in group] for group in contents], states

    def swap_in(self, sequence: Sequence) -> None:
        """Puts that back, into the pages and the slot that it has now."""
        contents, states = sequence.swapped
        sequence.swapped = None
        used = -(-sequence.n_computed // self.page_size)
        for g, group in enumerate(contents):
            self.write_pages(g, sequence.pages[g][:used], group)
        for layer, state in zip(self.recurrent_states(), states, strict=True):
            layer.write(sequence.slot, state)

    def read_pages(self, group: int, pages: list[int]) -> list[Tensor]:
        """Copies of the contents of `pages` in every layer of the group, layer by layer, tensor by tensor."""
        at = torch.tensor(pages, device=self.device)
        return [t[at] for t in self.page_tensors(group)]

    def write_pages(self, group: int, pages: list[int], contents: list[Tensor]) -> None:
        """Puts back what `read_pages` gave, into any pages."""
        at = torch.tensor(pages, device=self.device)
        for t, c in zip(self.page_tensors(group), contents, strict=True):
            t[at] = c.to(t.device)

    def page_tensors(self, group: int) -> list[Tensor]:
        """Of all layers of a group, whatever they keep in pages; pages are the first dimension."""
        return [
            t
            for number, (layer, g) in enumerate(zip(self.layers, self.group_of, strict=True))
            if g == group and not isinstance(layer, RecurrentStates) and number not in self._shared_kv_layers
            for t in layer.tensors
        ]

    def recurrent_states(self) -> list[RecurrentStates]:
        """The layers that keep a state of fixed size."""
        return [layer for layer in self.layers if isinstance(layer, RecurrentStates)]
