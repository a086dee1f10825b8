"""Build and load of this folder's C++ sources."""

from __future__ import annotations

import ctypes
import functools
import warnings
from pathlib import Path

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
NAMES = ("causal_attention", "cross_entropy", "mlp", "update", "orthogonalize", "weight_gradient")


def source(name: str) -> Path:
    """Return the path of `NAME.cpp`."""
    return Path(__file__).parent / f"{name}.cpp"


def sources() -> list[Source]:
    """Return every source of this folder with its flags, for `native_build.start_builds`."""
    return [(source(name), FLAGS) for name in NAMES]


def build_sources() -> None:
    """Compile the sources whose libraries are missing (`native_build.build_libraries`)."""
    build_libraries(sources())


@functools.cache
def native_library(name: str, *flags: str) -> ctypes.CDLL | None:
    """Return the library of `NAME.cpp`, compiled if needed; None (logged once) if that fails, or with WHORL_NATIVE=0."""
    if not is_enabled():
        return None
    try:
        return load_library(source(name), cache_folder(), (*FLAGS, *flags))
    except BuildError as error:
        warnings.warn(f"{name} by torch: {error}", RuntimeWarning, stacklevel=2)
        return None


def product_library(name: str) -> ctypes.CDLL | None:
    """Return the library of `NAME.cpp` as `native_library`, or None where it would multiply bf16 by plain loops.

    Where tiles are compiled, but not permitted (logged once), it is the library without them.
    """
    found = native_library(name)
    if found is not None and not found.whorl_products():
        warn_of_unused_amx()
        found = native_library(name, VECTORS)
    return found if found is not None and found.whorl_products() else None
