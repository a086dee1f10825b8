"""The model step as one native call: the same function as the runner's torch path, for CPUs.

    step = NativeStep(model, page_size=32, weight_dtype="bfloat16", threads=2)
    logits = step.run(batch, layers, group_of)     [W, vocab] fp32; the pages of `layers` then hold all N positions

`engine/model/runner.py` is the reference; a test compares the two for each weight format and model option. `autotune`
measures which of them is faster, and with how many threads, when the engine starts.

Overhead: a step of a small model is tens of microseconds of arithmetic in hundreds of operations, and torch adds a few
microseconds of Python and dispatch to each. Here Python fills one structure with addresses and makes one call, which
releases the interpreter lock.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whorl.engine.cache.kv_int8 import Int8KVPages
from whorl.engine.cache.pages import InputBatch, KVPages
from whorl.engine.cpu import build, layout
from whorl.engine.cpu.weights import PackedWeights, unsupported_model_reason
from whorl.errors import ConfigError
from whorl.models import LanguageModel

ERROR_MESSAGES = {
    1: "a token id outside of the vocabulary",
    2: "a row whose page table does not hold its positions",
    3: "no memory",
}
MIN_ROTARY_POSITIONS = 1024  # positions of the first rotary tables


def unsupported_reason(model: LanguageModel, compile_native: bool = True) -> str | None:
    """Return the reason why the native step cannot run `model` here, or None.

    compile_native: False never compiles the library here and now.
    """
    if (reason := unsupported_model_reason(model)) is not None:
        return reason
    if not compile_native and not build.is_compiled():
        return "the native library is not compiled yet"
    return "the native library could not be built" if build.library() is None else None


class NativeStep:
    """Runs the steps of one model in the native library.

    Args:
        model: its current weights are packed; see `refresh`.
        page_size: of the cache.
        weight_dtype: of the packed weights: float32, bfloat16, int8, int4; default: the codes of a quantized model,
            unchanged, and the model's compute dtype otherwise.
        weight_group_size: for int8 and int4, how many inputs share a scale; default all for int8, 32 for int4.
        threads: default torch's number.
        max_positions: of a row; with a trained length, longer rows have other rotary tables.

    Raises:
        ConfigError: the model is not supported (`unsupported_reason`); unknown weight_dtype or group size.
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
            raise ConfigError(f"the native step cannot run this model: {reason}", do="WHORL_CHOOSE=cpu=torch")
        layout.check_sizes(library)
        self.library, self.threads = library, threads or torch.get_num_threads()
        self.weights = PackedWeights(
            library, model, weight_dtype, weight_group_size, page_size, self.threads, max_positions
        )
        self.weight_dtype, self.group_size = "+".join(self.weights.kinds), weight_group_size
        self.methods = layout.usable_methods(library, *self.weights.kinds)
        self.method = self.methods[0]
        self.vocab_size = model.config.vocab_size
        self.uses_ngrams = model.ngram_context > 0
        self._caches = (layout.LayerCache * len(self.weights.layers))()
        self._bound_layers: Sequence[Any] | None = None
        self._rotary_length = 0
        self._rotary_tables: list[Tensor] = []
        self.handle = library.whorl_open()
        weakref.finalize(self, library.whorl_close, self.handle)
        self._extend_rotary(
            MIN_ROTARY_POSITIONS
            if model.max_positions is None
            else min(MIN_ROTARY_POSITIONS, model.max_positions)
        )

    @property
    def method(self) -> str:
        """How the matrices are multiplied: a key of `layout.METHODS`. It changes the last bits of bfloat16 products."""
        return self._method

    @method.setter
    def method(self, method: str) -> None:
        self.weights.set_method(method)
        self._method = method

    @property
    def n_bytes(self) -> int:
        """Bytes of the packed weights."""
        return self.weights.arena.n_bytes

    def refresh(self) -> None:
        """Pack the model's weights again; must not run during a step."""
        self.weights.refresh()

    def run(
        self,
        batch: InputBatch,
        layers: Sequence[KVPages],
        group_of: Sequence[int],
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Return logits [W, vocab] fp32 at `logit_indices`.

        Args:
            layers: the cache, float32, bfloat16 or int8.
            group_of: index into `batch.pages` of each layer.
            hidden: [N, d_model] fp32, filled with the normalized hidden states, or None.

        Raises:
            ConfigError: an id or a page does not exist; nothing has been written then.
        """
        with self.prepared(batch, layers, group_of, max(batch.lengths), hidden) as c_batch:
            logits = torch.empty(c_batch.wanted, self.vocab_size)
            status = self.library.whorl_step(
                self.handle, ctypes.byref(self.weights.struct), ctypes.byref(c_batch), logits.data_ptr(), self.threads
            )  # fmt: skip
        self.check(status)
        return logits

    @contextmanager
    def prepared(
        self,
        batch: InputBatch,
        layers: Sequence[KVPages],
        group_of: Sequence[int],
        longest: int,
        hidden: Tensor | None = None,
    ) -> Iterator[layout.Batch]:
        """Yield the structure of a batch; `longest`: positions of a row, at most."""
        if self._bound_layers is not layers:
            self._bind_cache(layers)
        if longest > self._rotary_length:
            self._extend_rotary(longest)
        # Named, because arrays that a structure points to must outlive the call.
        pages = [np.ascontiguousarray(table, dtype=np.int32) for table in batch.pages]
        addresses = [table.ctypes.data for table in pages]
        for cache, group in zip(self._caches, group_of, strict=True):
            cache.pages, cache.pages_stride = addresses[group], pages[group].shape[1]
        starts, lengths = np.array(batch.starts, np.int32), np.array(batch.lengths, np.int32)
        ids, logit_indices = batch.ids.contiguous(), batch.logit_indices.contiguous()
        previous_ids = (
            batch.previous_ids.contiguous() if self.uses_ngrams and batch.previous_ids is not None else None
        )
        yield layout.Batch(
            len(ids), len(lengths), len(logit_indices), layout.KINDS[str(layers[0].k.dtype).removeprefix("torch.")],
            ids.data_ptr(), starts.ctypes.data, lengths.ctypes.data, logit_indices.data_ptr(),
            None if previous_ids is None else previous_ids.data_ptr(), ctypes.addressof(self._caches),
            None if hidden is None else hidden.data_ptr(),
        )  # fmt: skip

    @staticmethod
    def check(status: int) -> None:
        """Raise ConfigError for a result code of the library."""
        if status:
            raise ConfigError(
                f"the native step was given {ERROR_MESSAGES[status]}", expected="a batch of this engine"
            )

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [W, vocab] fp32 of hidden states [W, d_model], by the packed head."""
        x = hidden.float().contiguous()
        logits = torch.empty(len(x), self.vocab_size)
        struct = self.weights.struct
        head, cap = ctypes.addressof(struct) + layout.ModelStruct.head.offset, struct.logit_softcap
        self.library.whorl_product(
            self.handle, head, x.data_ptr(), len(x), logits.data_ptr(), 0, cap, self.threads
        )
        return logits

    def _bind_cache(self, layers: Sequence[KVPages]) -> None:
        """Store the addresses of the cache's tensors."""
        dtypes = {t.dtype for layer in layers for t in (layer.k, layer.v)}
        if len(dtypes) != 1 or not dtypes <= {torch.float32, torch.bfloat16, torch.int8}:
            raise ConfigError(
                f"the cache is of {sorted(map(str, dtypes))}",
                expected="float32, bfloat16 or int8, in all layers",
            )
        for cache, layer in zip(self._caches, layers, strict=True):
            if not all(t.is_contiguous() for t in layer.tensors):
                raise ConfigError(
                    "keys and values are not contiguous", expected="[n_pages, KV, page_size, d]"
                )
            cache.k, cache.v = layer.k.data_ptr(), layer.v.data_ptr()
            if layer.raw_keys is not None:
                cache.raw = layer.raw_keys.data_ptr()
                cache.raw_bf16 = int(layer.raw_keys.dtype == torch.bfloat16)
            if isinstance(layer, Int8KVPages):
                cache.k_scale, cache.v_scale = layer.k_scale.data_ptr(), layer.v_scale.data_ptr()
            cache.page, cache.head, cache.position = layer.k.stride()[:3]
            cache.n_pages = len(layer.k)
            for tensor in layer.tensors:
                self.library.whorl_large_pages(tensor.data_ptr(), tensor.nbytes)
        self._bound_layers = layers

    def _extend_rotary(self, stop: int) -> None:
        """Extend the rotary tables in fp32 (same values as the model's) to at least `stop` positions."""
        self._rotary_tables = []
        for rotary, layers in self.weights.rotaries.values():
            cos, sin = (t.float().contiguous() for t in rotary.tables_upto(stop, torch.device("cpu")))
            self._rotary_tables += [cos, sin]
            stop = len(cos)
            for layer in layers:
                layer.cos, layer.sin = cos.data_ptr(), sin.data_ptr()
        self._rotary_length = stop
