"""The structures of `model.h`, field by field, and memory for packed matrices.

A test compares the sizes with those of the compiler, so a field added on one side only is detected.
"""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_float, c_int32, c_int64, c_void_p
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from whorl.errors import ConfigError, one_of

WeightKind = Literal["float32", "bfloat16", "int8", "int4"]
KINDS: dict[str, int] = {name: n for n, name in enumerate(get_args(WeightKind))}
ACTIVATIONS = {
    name: n for n, name in enumerate(("relu2", "gelu", "gelu_tanh", "quick_gelu", "swiglu", "geglu"), 1)
}
MAX_NGRAM_ORDERS = 4  # of n-gram tables
MATRIX_ALIGNMENT = 64  # bytes: alignment of every matrix
TILE_BYTES = 64  # of k in a tile register (amx.h)
METHODS: dict[str, int] = {"vectors": 0, "tiles": 1, "emulated tiles": 2}  # of a product; Method in packed.h
TILES_FEATURE = 8  # bit of `whorl_features`

Fields = list[tuple[str, Any]]


class Matrix(Structure):
    _fields_: ClassVar[Fields] = [
        *((name, c_int32) for name in ("kind", "inputs", "group", "scale_kind")),
        *((name, c_int64) for name in ("n", "k")),
        *((name, c_int32) for name in ("gated", "method")),
        *((name, c_void_p) for name in ("data", "scales", "moved", "bias")),
    ]


class Norm(Structure):
    _fields_: ClassVar[Fields] = [("gain", c_void_p), ("bias", c_void_p), ("eps", c_float), ("kind", c_int32)]


class Heads(Structure):
    _fields_: ClassVar[Fields] = [
        *((name, c_int32) for name in ("n_heads", "n_kv_heads", "head_dim", "page_size")),
        ("window", c_int64),
        *((name, c_float) for name in ("scale", "softcap")),
        ("sink", c_void_p),
    ]


class Layer(Structure):
    _fields_: ClassVar[Fields] = [
        *((name, Norm) for name in ("mixer_norm", "mixer_after", "mlp_norm", "mlp_after")),
        *((name, Matrix) for name in ("qkv", "out", "up", "down")),
        ("heads", Heads),
        *((name, Norm) for name in ("q_norm", "k_norm")),
        *((name, c_void_p) for name in ("smear", "cos", "sin")),
        ("rotary_dim", c_int64),
        *((name, c_int32) for name in ("interleaved", "activation")),
    ]


class ModelStruct(Structure):
    _fields_: ClassVar[Fields] = [
        *((name, c_int64) for name in ("vocab", "d_model", "n_layers")),
        *((name, c_void_p) for name in ("embedding", "positions")),
        *((name, c_float) for name in ("embedding_scale", "logit_softcap")),
        *((name, Norm) for name in ("first_norm", "final_norm")),
        ("head", Matrix),
        ("layers", c_void_p),
        *((name, c_int64) for name in ("parallel", "n_orders")),
        ("orders", c_int64 * MAX_NGRAM_ORDERS),
        ("buckets", c_int64),
        ("tables", c_void_p * MAX_NGRAM_ORDERS),
        ("table_scales", c_void_p * MAX_NGRAM_ORDERS),
    ]


class LayerCache(Structure):
    _fields_: ClassVar[Fields] = [
        *((name, c_void_p) for name in ("k", "v", "raw", "k_scale", "v_scale")),
        *((name, c_int64) for name in ("page", "head", "position")),
        ("pages", c_void_p),
        *((name, c_int64) for name in ("pages_stride", "n_pages", "raw_bf16")),
    ]


class Batch(Structure):
    _fields_: ClassVar[Fields] = [
        *((name, c_int64) for name in ("n", "rows", "wanted", "cache_kind")),
        *((name, c_void_p) for name in ("ids", "starts", "lengths", "which", "before", "caches", "hidden")),
    ]


class Sampling(Structure):
    _fields_: ClassVar[Fields] = [
        ("most", c_int64),
        *(
            (name, c_void_p)
            for name in ("u", "temperature", "top_k", "top_p", "min_p", "limits", "banned", "stops")
        ),
        ("until_ended", c_int64),
        *((name, c_void_p) for name in ("ids", "log_probs", "raw", "counts")),
    ]


ABI_STRUCTURES = (
    Matrix,
    Norm,
    Layer,
    ModelStruct,
    LayerCache,
    Batch,
    Sampling,
)  # in the order of `whorl_sizeof`


def check_sizes(library: ctypes.CDLL) -> None:
    """Raise RuntimeError if a structure here differs from the compiled one."""
    for n, mirrored in enumerate(ABI_STRUCTURES):
        compiled_size = library.whorl_sizeof(n)
        if compiled_size != ctypes.sizeof(mirrored):
            raise RuntimeError(
                f"{mirrored.__name__} has {ctypes.sizeof(mirrored)} bytes here and {compiled_size} in model.h"
            )


def make_matrix(
    kind: str, group: int | None, n: int, k: int, gated: bool = False, scale_kind: WeightKind = "bfloat16"
) -> Matrix:
    """Return an empty matrix [n, k]. group: of the k inputs, how many share a scale; None for all of them.

    Raises:
        ConfigError: unknown `kind`.
    """
    if kind not in KINDS:
        raise ConfigError(f"weight_dtype is {kind!r}", expected=one_of(kind, list(KINDS)))
    unit = {"int8": 4, "int4": 8}.get(kind)
    if unit is None:
        return Matrix(KINDS[kind], 0, 0, 0, n, k, int(gated))
    inputs = group or k
    unit = unit if group else TILE_BYTES
    return Matrix(KINDS[kind], inputs, -(-inputs // unit) * unit, KINDS[scale_kind], n, k, int(gated))


def usable_methods(library: ctypes.CDLL, *kinds: str) -> tuple[str, ...]:
    """Return how matrices of `kinds` can be multiplied on this machine, the usually fastest way first.

    Tile registers need AMX, a compiler with support for it, and the kernel's permission.
    """
    tiles = set(kinds) != {"float32"} and library.whorl_features() & TILES_FEATURE
    return ("tiles", "vectors") if tiles else ("vectors",)


class Arena:
    """One block of memory on large pages for consecutive matrices, so that a pass over a model is one stream."""

    def __init__(self, library: ctypes.CDLL, matrices: list[Matrix]) -> None:
        sizes = []
        for matrix in matrices:
            parts = (c_int64 * 3)()
            library.whorl_packed_bytes(ctypes.byref(matrix), parts)
            sizes.append([-(-n // MATRIX_ALIGNMENT) * MATRIX_ALIGNMENT for n in parts])
        self.n_bytes = sum(map(sum, sizes))
        large = 1 << 21
        self._memory: Tensor = torch.empty(self.n_bytes + large, dtype=torch.uint8)
        at = -(-self._memory.data_ptr() // large) * large
        library.whorl_large_pages(at, self.n_bytes)
        self._memory.zero_()
        self.address = at
        for matrix, (data, scales, moved) in zip(matrices, sizes, strict=True):
            matrix.data, matrix.scales, matrix.moved = at, at + data, at + data + scales
            at += data + scales + moved
