"""A model packed for the native step: matrices packed, vectors in fp32, its shape in structures.

The native step supports dense models: a `Transformer` of attention and dense MLPs, with the options of
`nn/attention/multi_head.py` and `nn/mlp.py` except those that `unsupported_model_reason` lists. Other models use torch.

Queries, keys and values are one matrix, so one product computes all three. Vectors (gains, biases, fractions) are copied in
fp32; the embedding is read in place. `refresh` packs again in place after a change of weights: addresses stay the same.

The int8 and int4 codes of a quantized model are packed unchanged, with their scales and groups, unless another format is
requested. Its other weights (fp8, or another format) are dequantized and rounded like any others.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from whorl.engine.cpu import layout
from whorl.models import LanguageModel
from whorl.nn.attention import MultiHeadAttention
from whorl.nn.experts import MixtureOfExperts
from whorl.nn.linear import Linear
from whorl.nn.ngram import NGramEmbedding
from whorl.nn.norm import LayerNorm, RMSNorm
from whorl.nn.quantized_linear import QuantizedLinear, QuantizedNGramEmbedding
from whorl.nn.rotary import Rotary

RMS_NORM, LAYER_NORM = 1, 2  # of NormKind in model.h
MAX_HEAD_DIM, MAX_NGRAM_ORDER = 1024, 32  # sizes of arrays in step.h

TensorGetter = Callable[[], Tensor | None]


def unsupported_model_reason(model: LanguageModel) -> str | None:
    """Return the reason why the native step cannot run this model, or None."""
    if model.embedding.device.type != "cpu":
        return f"the model is on {model.embedding.device.type}"
    if model.config.masked is not None:
        return "masked diffusion, whose attention is not causal"
    if any(isinstance(m, Linear) and m.matmul is not None for m in model.modules()):
        return "its matrix products are replaced (fp8)"
    if (memory := model.memory) is not None:
        if not isinstance(memory, NGramEmbedding | QuantizedNGramEmbedding):
            return f"its n-gram embedding is a {type(memory).__name__}"
        if len(memory.orders) > layout.MAX_NGRAM_ORDERS or max(memory.orders) > MAX_NGRAM_ORDER:
            return f"n-grams of orders {memory.orders}"
    blocks: list[Any] = list(model.blocks)
    return next(filter(None, map(_unsupported_block_reason, blocks)), None)


def _unsupported_block_reason(block: Any) -> str | None:
    if isinstance(block.mlp, MixtureOfExperts):
        return "a mixture of experts"
    if block.post_norm:
        return "norms after the residual sums (post_norm)"
    mixer = block.mixer
    if type(mixer) is not MultiHeadAttention:  # nor a subclass, whose forward may differ
        return f"a layer with {type(mixer).__name__}"
    if not mixer.has_kv_proj:
        return "keys shared between layers (kv_sharing_factor)"
    options = {"stride": mixer.mask.stride, "block": mixer.mask.block, "alibi": mixer.slopes}
    if mixer.norm_all_heads and mixer.q_norm is not None:
        return "a norm of queries and keys over all heads together (qk_norm)"
    for name, value in options.items():
        if value is not None:
            return f"attention with {name}"
    return f"head_dim is {mixer.head_dim}" if mixer.head_dim > MAX_HEAD_DIM else None


class PackedWeights:
    """The packed weights of `model`.

    Args:
        weight_dtype, group_size: of every matrix (`layout.make_matrix`); default: stored codes or the model's dtype.
        page_size: of the cache.
        threads: for packing.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        model: LanguageModel,
        weight_dtype: str | None,
        group_size: int | None,
        page_size: int,
        threads: int,
        max_positions: int = 0,
    ) -> None:
        self.max_positions = max_positions
        self.library, self.model, self.weight_dtype, self.group_size = (
            library,
            model,
            weight_dtype,
            group_size,
        )
        self.page_size, self.threads = page_size, threads
        self._vectors: list[tuple[Tensor, TensorGetter]] = []
        # Each with what it is packed from: weights, or layers with codes.
        self._matrices: list[tuple[layout.Matrix, TensorGetter | list[QuantizedLinear]]] = []
        self.rotaries: dict[int, tuple[Rotary, list[layout.Layer]]] = {}
        self._blocks: list[Any] = list(model.blocks)
        self.layers = (layout.Layer * len(self._blocks))()
        self.struct = layout.ModelStruct()
        with torch.no_grad():
            for block, layer in zip(self._blocks, self.layers, strict=True):
                self._layer(block, layer)
            self._set_model_fields()
            self.arena = layout.Arena(library, [m for m, _ in self._matrices])
            self.refresh()

    @property
    def kinds(self) -> list[str]:
        """The weight formats of the matrices."""
        names = list(layout.KINDS)
        return sorted({names[matrix.kind] for matrix, _ in self._matrices})

    @property
    def n_stored(self) -> int:
        """Number of matrices with the codes of a quantized model."""
        return sum(isinstance(source, list) for _, source in self._matrices)

    def set_method(self, method: str) -> None:
        """Set how every matrix is multiplied: a key of `layout.METHODS`. Packed weights serve all of them."""
        for matrix, _ in self._matrices:
            matrix.method = layout.METHODS[method]

    def refresh(self) -> None:
        """Pack the model's current weights."""
        with torch.no_grad():
            for copy, getter in self._vectors:
                value = getter()
                assert value is not None
                copy.copy_(value.reshape(copy.shape))
            for matrix, source in self._matrices:
                to = ctypes.byref(matrix)
                if isinstance(source, list):
                    codes = torch.cat([layer.unpacked_codes for layer in source])
                    scales = torch.cat([layer.scales.float() for layer in source])
                    self.library.whorl_pack(to, None, codes.data_ptr(), scales.data_ptr(), self.threads)
                else:
                    value = source()
                    assert value is not None
                    dense = value.float().contiguous()
                    self.library.whorl_pack(to, dense.data_ptr(), None, None, self.threads)
            self._set_table_pointers()

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _vector(self, source: TensorGetter) -> int | None:
        """Return the address of a copy of what `source` returns; `refresh` updates it."""
        value = source()
        if value is None:
            return None
        copy = value.detach().float().clone().contiguous()
        self._vectors.append((copy, source))
        return copy.data_ptr()

    def _set_layers(self, to: layout.Matrix, layers: Sequence[Linear], gated: bool = False) -> None:
        """Make `to` (a field of a structure) the matrix of `layers`, one below the other."""
        stored = [layer for layer in layers if isinstance(layer, QuantizedLinear)]
        if len(stored) == len(layers) and all(self._takes(layer) for layer in stored):
            first, n = stored[0], sum(layer.d_out for layer in stored)
            matrix = layout.make_matrix(first.kind, first.group_size, n, first.d_in, gated, "float32")
            ctypes.memmove(ctypes.byref(to), ctypes.byref(matrix), ctypes.sizeof(matrix))
            self._matrices.append((to, stored))
        else:
            self._set_matrix(to, lambda: torch.cat([layer.weight for layer in layers]), gated)
        to.bias = self._vector(lambda: _bias(layers))

    def _takes(self, layer: QuantizedLinear) -> bool:
        """Whether the codes of `layer` are packed unchanged."""
        if self.weight_dtype is None:
            return layer.kind in layout.KINDS
        return layer.kind == self.weight_dtype and self.group_size in (None, layer.group_size)

    def _set_matrix(self, to: layout.Matrix, source: TensorGetter, gated: bool = False) -> None:
        """Make `to` (a field of a structure) the matrix that `source` returns, [n, k]."""
        value = source()
        assert value is not None
        kind = self.weight_dtype or str(self.model.dtype).removeprefix("torch.")
        group = 32 if kind == "int4" and self.group_size is None else self.group_size
        n, k = value.shape
        matrix = layout.make_matrix(kind, group, n, k, gated)
        ctypes.memmove(ctypes.byref(to), ctypes.byref(matrix), ctypes.sizeof(matrix))
        self._matrices.append((to, source))

    def _norm(self, module: nn.Module, heads: int = 1) -> layout.Norm:
        """heads: how many times the gain is repeated, one copy per head."""
        if isinstance(module, RMSNorm):
            offset = module.offset
            return layout.Norm(
                self._vector(lambda: (module.weight + offset).repeat(heads)), None, module.eps, RMS_NORM
            )
        if isinstance(module, LayerNorm):
            bias = module.bias
            gain = self._vector(lambda: module.weight)
            return layout.Norm(gain, self._vector(lambda: bias), module.eps, LAYER_NORM)
        return layout.Norm()

    def _layer(self, block: Any, layer: layout.Layer) -> None:
        a, mlp = block.mixer, block.mlp
        layer.mixer_norm, layer.mixer_after = self._norm(block.mixer_norm), self._norm(block.mixer_after)
        layer.mlp_norm, layer.mlp_after = self._norm(block.mlp_norm), self._norm(block.mlp_after)
        parts = (a.q, a.k, a.v) if a.qkv is None else (a.qkv,)
        self._set_layers(layer.qkv, parts)
        self._set_layers(layer.out, (a.out,))
        self._mlp(mlp, layer)
        scale = a.head_dim**-0.5 if a.scale is None else a.scale
        layer.heads = layout.Heads(
            a.n_heads, a.n_kv_heads, a.head_dim, self.page_size, a.mask.window or 0, scale, a.softcap or 0.0,
            self._vector(lambda: a.sink),
        )  # fmt: skip
        if a.temperature is not None:  # the gain of the queries' norm
            gain = self._vector(lambda: a.temperature.expand(-1, a.head_dim))
            layer.q_norm = layout.Norm(gain, None, a.eps, RMS_NORM)
            layer.k_norm = layout.Norm(None, None, a.eps, RMS_NORM)
        elif a.q_norm is not None:
            layer.q_norm, layer.k_norm = self._norm(a.q_norm, a.n_heads), self._norm(a.k_norm, a.n_kv_heads)
        layer.smear = self._vector(lambda: None if a.smear is None else torch.sigmoid(a.smear.share))
        if a.rotary is not None:
            self._rotary(a.rotary.for_capacity(self.max_positions), layer)

    def _mlp(self, mlp: Any, layer: layout.Layer) -> None:
        layer.activation = layout.ACTIVATIONS[mlp.kind]
        gated = mlp.kind in ("swiglu", "geglu")
        self._set_layers(layer.up, (mlp.up,), gated)
        self._set_layers(layer.down, (mlp.down,))

    def _rotary(self, rotary: Rotary, layer: layout.Layer) -> None:
        layer.rotary_dim, layer.interleaved = rotary.rotary_dim, int(rotary.layout == "interleaved")
        self.rotaries.setdefault(id(rotary), (rotary, []))[1].append(layer)

    def _set_model_fields(self) -> None:
        """Set the fields that a model has once."""
        model, c, to = self.model, self.model.config, self.struct
        to.vocab, to.d_model, to.n_layers = c.vocab_size, c.d_model, len(self._blocks)
        to.logit_softcap = model.logit_softcap or 0.0
        to.embedding_scale = float(torch.tensor(c.embedding_scale, dtype=model.dtype))
        to.parallel = int(c.parallel)
        to.final_norm = self._norm(model.final_norm)
        to.layers = ctypes.addressof(self.layers)
        to.first_norm = self._norm(model.embedding_norm)
        if c.ngram is not None:
            to.n_orders, to.buckets = len(c.ngram.orders), c.ngram.buckets
            to.orders[: to.n_orders] = c.ngram.orders
        if isinstance(product := getattr(model, "head_product", None), QuantizedLinear):
            self._set_layers(to.head, (product,))
        else:
            self._set_matrix(to.head, lambda: model.head_weight)

    def _set_table_pointers(self) -> None:
        """Set the addresses of the id and position tables."""
        model, to = self.model, self.struct
        positions: nn.Parameter | None = getattr(model, "positions", None)
        found = [model.embedding, *([] if positions is None else [positions])]
        memory, codes = model.memory, []
        if isinstance(memory, NGramEmbedding):
            found += list(memory.tables)
        elif isinstance(memory, QuantizedNGramEmbedding):
            codes = [getattr(memory, f"codes_{order}").contiguous() for order in memory.orders]
            found += [getattr(memory, f"scales_{order}") for order in memory.orders]
        # No copy of fp32 tables.
        tables = [t.detach().float().contiguous() for t in found]
        self._table_tensors = tables + codes
        to.embedding = tables[0].data_ptr()
        if positions is not None:
            to.positions = tables[1].data_ptr()
        if to.n_orders:
            addresses = [t.data_ptr() for t in tables[-to.n_orders :]]
            to.tables[: to.n_orders] = [t.data_ptr() for t in codes] or addresses
            to.table_scales[: to.n_orders] = addresses if codes else [None] * to.n_orders


def _bias(layers: Sequence[Linear]) -> Tensor | None:
    """Return the biases of `layers`, one after the other, or None."""
    biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    return torch.cat(biases) if biases else None
