"""Build and load of this folder's C++ sources."""

from __future__ import annotations

import ctypes
import functools
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whorl.machine.identity import warn_of_unused_amx
from whorl.machine.native_build import (
    BuildError,
    Source,
    build_libraries,
    cache_folder,
    is_enabled,
    load_library,
)

FLAGS = ("-fopenmp-simd",)
VECTORS = "-DWHORL_VECTORS"  # products by vectors of bf16 pairs, also on a CPU with tiles
FP32 = "-DWHORL_FP32"  # for matrices of fp32 in place of bf16
PRODUCTS = ("causal_attention", "mlp", "orthogonalize", "weight_gradient")  # a library for each type
NAMES = (*PRODUCTS, "cross_entropy", "update")


def source(name: str) -> Path:
    """Return the path of `NAME.cpp`."""
    return Path(__file__).parent / f"{name}.cpp"


def sources(dtype: torch.dtype) -> list[Source]:
    """Return every source of this folder with its flags for steps in this type, for `native_build.start_builds`."""
    return [(source(name), (*FLAGS, *_type_flags(dtype)) if name in PRODUCTS else FLAGS) for name in NAMES]


def build_sources(dtype: torch.dtype) -> None:
    """Compile the sources whose libraries are missing (`native_build.build_libraries`)."""
    build_libraries(sources(dtype))


def choice_table() -> dict[Any, bool]:
    """Return a new table of shapes, with types, that a kernel computes; others are torch's. `clear_choices` empties it."""
    _tables.append({})
    return _tables[-1]


def clear_choices() -> None:
    """Leave all shapes to torch."""
    for table in _tables:
        table.clear()


_tables: list[dict[Any, bool]] = []


def is_supported(x: Tensor) -> bool:
    """Return whether kernels of this folder compute with tensors like x: bf16 or fp32 on a CPU."""
    return x.dtype in (torch.bfloat16, torch.float32) and x.device.type == "cpu"


def short_name(dtype: torch.dtype) -> str:
    """Return the type's name in choices: "bf16" or "fp32"."""
    return "bf16" if dtype == torch.bfloat16 else "fp32"


def _type_flags(dtype: torch.dtype) -> tuple[str, ...]:
    return (FP32,) if dtype == torch.float32 else ()


@functools.cache
def native_library(name: str, *flags: str) -> ctypes.CDLL | None:
    """Return the library of `NAME.cpp`, compiled if needed; None (logged once) if that fails, or with cpu=torch forced."""
    if not is_enabled():
        return None
    try:
        return load_library(source(name), cache_folder(), (*FLAGS, *flags))
    except BuildError as error:
        warnings.warn(f"{name} by torch: {error}", RuntimeWarning, stacklevel=2)
        return None


def product_library(name: str, dtype: torch.dtype) -> ctypes.CDLL | None:
    """Return the library of `NAME.cpp` for bf16 or fp32 as `native_library`, or None where it would emulate tiles.

    Where tiles are compiled, but not permitted (logged once), it is the library without them.
    """
    found = native_library(name, *_type_flags(dtype))
    if found is not None and not found.whorl_products():
        warn_of_unused_amx()
        found = native_library(name, VECTORS)
    return found if found is not None and found.whorl_products() else None
