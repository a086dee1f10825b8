"""From what mixers declare (`cache_spec`) to the memory of a model's layers, allocated once for all sequences.

A mixer that declares one of the specs of `nn/mixer.py` is served without a change here. `TokenCacheSpec` covers mixers that
keep tensors per token, `StateCacheSpec` those with a state per sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from whorl.engine.cache.kv_int8 import Int8KVPages
from whorl.engine.cache.pages import InputBatch, KVPages, LatentPages, PageIndex, RecurrentStates
from whorl.engine.cache.token_pages import TokenPages
from whorl.errors import ConfigError
from whorl.nn.mixer import (
    CacheSpec,
    KVCacheSpec,
    LatentCacheSpec,
    Mixer,
    SharedCacheSpec,
    StateCacheSpec,
    TokenCacheSpec,
)

PagedLayer = KVPages | LatentPages | TokenPages


def page_windows(specs: Iterable[CacheSpec]) -> list[int | None]:
    """Return the window of each group of layers with pages: None for full attention first, then ascending."""
    return sorted({s.window for s in specs if s.paged}, key=lambda w: (w is not None, w or 0))


class LayerCaches:
    """The memory of all layers.

    Attributes:
        layers: what each layer's mixer receives as its state; None where it reads the cache of another layer.
        windows: of the groups of layers with pages.
        group_of: group of each layer; -1 without pages.
        paged: the layers with pages, and their groups.
        recurrent: the layers with a state per sequence.

    Args:
        mixers: of each layer.
        pages: numbers of pages, by window.
        page_size: positions per page.
        n_slots: sequences at once.
        capacity: maximum positions of a sequence.
        dtype: of the activations.
        cache_dtype: of the pages; int8 applies to keys and values only; None: `dtype`.

    Raises:
        ConfigError: `cache_spec` returns something else than a spec of `nn/mixer.py`.
    """

    def __init__(
        self,
        mixers: Iterable[Mixer],
        pages: Mapping[int | None, int],
        page_size: int,
        n_slots: int,
        capacity: int,
        *,
        dtype: torch.dtype,
        cache_dtype: torch.dtype | None,
        device: str,
    ) -> None:
        mixers = list(mixers)
        self.windows = page_windows(mixer.cache_spec() for mixer in mixers)
        self.page_size, self.device = page_size, device
        self.layers: list[Any] = []
        self.group_of: list[int] = []
        self.paged: list[tuple[PagedLayer, int]] = []
        self.recurrent: list[RecurrentStates] = []
        int8 = cache_dtype == torch.int8
        page_dtype = dtype if cache_dtype is None or int8 else cache_dtype
        kv_class = Int8KVPages if int8 else KVPages
        for mixer in mixers:
            match mixer.cache_spec():
                case KVCacheSpec() as kv:
                    sizes = pages[kv.window], kv.n_kv_heads, page_size, kv.head_dim
                    self._add_paged(kv, kv_class(*sizes, page_dtype, device, kv.raw_keys))
                case LatentCacheSpec() as latent:
                    n_pages = pages[latent.window]
                    self._add_paged(latent, LatentPages(n_pages, page_size, latent.width, page_dtype, device))
                case TokenCacheSpec() as tokens:
                    n_pages = pages[tokens.window]
                    self._add_paged(tokens, TokenPages(tokens, n_pages, page_size, page_dtype, device))
                case StateCacheSpec():
                    states = RecurrentStates(mixer, n_slots, capacity, dtype, device)
                    self.recurrent.append(states)
                    self._add(states, -1)
                case SharedCacheSpec():
                    self._add(None, -1)
                case unknown:
                    raise ConfigError(
                        f"cache_spec of {type(mixer).__name__} returns {unknown!r}",
                        expected="one of the specs in whorl.nn.mixer",
                    )

    def _add(self, layer: Any, group: int) -> None:
        self.layers.append(layer)
        self.group_of.append(group)

    def _add_paged(self, spec: CacheSpec, layer: PagedLayer) -> None:
        group = self.windows.index(spec.window)
        self.paged.append((layer, group))
        self._add(layer, group)

    @property
    def n_bytes(self) -> int:
        """Bytes of all layers."""
        return sum(layer.n_bytes for layer in self.layers if layer is not None)

    def start_step(self, batch: InputBatch) -> None:
        """Point every layer to the pages or slots of the batch's rows."""
        self.use_pages(
            [
                PageIndex.of_batch(batch, g, self.page_size, window, self.device)
                for g, window in enumerate(self.windows)
            ]
        )
        for states in self.recurrent:
            states.batch = batch

    def use_pages(self, indices: Sequence[PageIndex]) -> None:
        """Point every layer with pages to the index of its group."""
        for layer, group in self.paged:
            layer.page_index = indices[group]

    def page_tensors(self, group: int) -> list[Tensor]:
        """Page tensors of all layers of a group; the first dimension is the page."""
        return [t for layer, g in self.paged if g == group for t in layer.tensors]
