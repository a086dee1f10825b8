"""The step of the model as one call: what the runner's torch path does, on a CPU's own terms.

    step = NativeStep(model, page_size=32, kind="bfloat16", threads=2)
    logits = step.run(batch, layers, group_of)          [W, vocab] fp32; the pages of `layers` then hold all N positions

`engine/model/runner.py` is the reference, and a test holds the two together for each kind of weight and each thing that a model
may have. Which of them is faster, with how many threads, is measured where the engine starts (`fastest`).

What it costs beside its products. A step of a small model is tens of microseconds of arithmetic in some hundred pieces; by
torch each piece costs a few microseconds of Python and dispatch. Here Python fills one structure with addresses, and that is
all: the interpreter's lock is free meanwhile.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whorl.engine.cache.pages import InputBatch, KVPages
from whorl.engine.native import build, layout
from whorl.engine.native.weights import PackedWeights, unsupported_model_reason
from whorl.errors import ConfigError
from whorl.models import Decoder, LanguageModel

ERROR_MESSAGES = {
    1: "a token id outside of the vocabulary",
    2: "a row whose page table does not hold its positions",
    3: "no memory",
}
MIN_ROTARY_POSITIONS = 1024  # positions of the first rotary tables


def unsupported_reason(model: LanguageModel) -> str | None:
    """Why the native step cannot run `model` here; None if it can."""
    return unsupported_model_reason(model) or (
        "there is no native library" if build.library() is None else None
    )


class NativeStep:
    """See the top of this file.

    Args:
        model: its weights are packed as they are now; see `refresh`.
        page_size: of the cache.
        kind: of the packed weights: float32, bfloat16, int8, int4; by default the model's compute type.
        group: for int8 and int4, how many inputs share a scale; by default all for int8, 32 for int4.
        threads: by default torch's number.
        room: positions that a row may come to; our own decoder turns long rows by other tables.

    Raises:
        ConfigError: `supports` says why not; a kind or group that there is not.
    """

    def __init__(
        self,
        model: LanguageModel,
        page_size: int,
        weight_dtype: str | None = None,
        weight_group_size: int | None = None,
        threads: int | None = None,
        max_positions: int = 0,
    ) -> None:
        reason, library = unsupported_reason(model), build.library()
        if reason is not None or library is None:
            raise ConfigError(f"the native step cannot run this model: {reason}", do="WHORL_NATIVE=0")
        layout.check_sizes(library)
        self.weight_dtype = weight_dtype or str(model.dtype).removeprefix("torch.")
        if self.weight_dtype == "int4" and weight_group_size is None:
            weight_group_size = 32
        self.library, self.threads = library, threads or torch.get_num_threads()
        self.weights = PackedWeights(
            library, model, self.weight_dtype, weight_group_size, page_size, self.threads, max_positions
        )
        self.vocab_size = model.config.vocab_size
        self.uses_ngrams = isinstance(model, Decoder) and bool(model.config.ngram_orders)
        self._caches = (layout.LayerCache * len(self.weights.layers))()
        self._bound_layers: Sequence[Any] | None = None
        self._rotary_length = 0
        self._rotary_tables: list[Tensor] = []
        self._step = library.whorl_open()
        weakref.finalize(self, library.whorl_close, self._step)
        self._extend_rotary(
            MIN_ROTARY_POSITIONS
            if model.max_positions is None
            else min(MIN_ROTARY_POSITIONS, model.max_positions)
        )

    @property
    def n_bytes(self) -> int:
        """Of the packed weights."""
        return self.weights.arena.n_bytes

    def refresh(self) -> None:
        """Packs the model's weights anew; not while a step runs."""
        self.weights.refresh()

    def run(
        self,
        batch: InputBatch,
        layers: Sequence[KVPages],
        group_of: Sequence[int],
        hidden: Tensor | None = None,
    ) -> Tensor:
        """-> logits [W, vocab] fp32 of the wanted positions.

        Args:
            layers: the cache, float32 or bfloat16; group_of: which of `batch.pages` is each layer's.
            hidden: [N, d_model] fp32, filled with the normalised hidden states, where somebody wants them.

        Raises:
            ConfigError: an id or a page that there is not; nothing has been written then.
        """
        if self._bound_layers is not layers:
            self._bind_cache(layers)
        longest = max(batch.lengths)
        if longest > self._rotary_length:
            self._extend_rotary(longest)
        # Held in names: what a structure points to must outlive the call.
        pages = [np.ascontiguousarray(table, dtype=np.int32) for table in batch.pages]
        where = [table.ctypes.data for table in pages]
        for cache, group in zip(self._caches, group_of, strict=True):
            cache.pages, cache.pages_stride = where[group], pages[group].shape[1]
        starts, lengths = np.array(batch.starts, np.int32), np.array(batch.lengths, np.int32)
        ids, wanted = batch.ids.contiguous(), batch.logit_indices.contiguous()
        before = (
            batch.previous_ids.contiguous() if self.uses_ngrams and batch.previous_ids is not None else None
        )
        logits = torch.empty(len(wanted), self.vocab_size)
        given = layout.Batch(
            len(ids), len(lengths), len(wanted), int(layers[0].k.dtype == torch.bfloat16),
            ids.data_ptr(), starts.ctypes.data, lengths.ctypes.data, wanted.data_ptr(),
            None if before is None else before.data_ptr(), ctypes.addressof(self._caches),
            None if hidden is None else hidden.data_ptr(),
        )  # fmt: skip
        answer = self.library.whorl_step(
            self._step,
            ctypes.byref(self.weights.struct),
            ctypes.byref(given),
            logits.data_ptr(),
            self.threads,
        )
        if answer:
            raise ConfigError(
                f"the native step was given {ERROR_MESSAGES[answer]}", expected="a batch of this engine"
            )
        return logits

    def logits(self, hidden: Tensor) -> Tensor:
        """[W, d_model] -> [W, vocab] fp32, by the packed head."""
        x = hidden.float().contiguous()
        logits = torch.empty(len(x), self.vocab_size)
        struct = self.weights.struct
        head, cap = ctypes.addressof(struct) + layout.Model.head.offset, struct.logit_softcap
        self.library.whorl_product(
            self._step, head, x.data_ptr(), len(x), logits.data_ptr(), 0, cap, self.threads
        )
        return logits

    def _bind_cache(self, layers: Sequence[KVPages]) -> None:
        """Remembers where the cache's tensors are."""
        kinds = {t.dtype for layer in layers for t in layer.tensors}
        if len(kinds) != 1 or not kinds <= {torch.float32, torch.bfloat16}:
            raise ConfigError(
                f"the cache is of {sorted(map(str, kinds))}", expected="float32 or bfloat16, in all layers"
            )
        for cache, layer in zip(self._caches, layers, strict=True):
            if layer.k.stride() != layer.v.stride() or layer.k.stride(3) != 1:
                raise ConfigError("keys and values lie differently", expected="[n_pages, KV, page_size, d]")
            cache.k, cache.v = layer.k.data_ptr(), layer.v.data_ptr()
            cache.raw = None if layer.raw_keys is None else layer.raw_keys.data_ptr()
            cache.page, cache.head, cache.position = layer.k.stride()[:3]
            cache.n_pages = len(layer.k)
            for tensor in layer.tensors:
                self.library.whorl_large_pages(tensor.data_ptr(), tensor.nbytes)
        self._bound_layers = layers

    def _extend_rotary(self, stop: int) -> None:
        """Rotary tables in fp32 (of the values that the model's own have) of at least `stop` positions."""
        self._rotary_tables = []
        for rotary, layers in self.weights.rotaries.values():
            cos, sin = (t.float().contiguous() for t in rotary.tables_upto(stop, torch.device("cpu")))
            self._rotary_tables += [cos, sin]
            stop = len(cos)
            for layer in layers:
                layer.cos, layer.sin = cos.data_ptr(), sin.data_ptr()
        self._rotary_length = stop
