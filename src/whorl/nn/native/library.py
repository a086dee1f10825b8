"""Build and load of this folder's C++ sources."""

from __future__ import annotations

import ctypes
import functools
import warnings
from pathlib import Path

from whorl.machine.identity import cpu_identity, warn_of_unused_amx
from whorl.machine.native_build import BuildError, Source, cache_folder, is_enabled, load_library

FLAGS = ("-fopenmp-simd",)
NAMES = ("causal_attention", "cross_entropy", "mlp", "update", "orthogonalize")
TILE_NAMES = ("weight_gradient",)  # of use on a CPU with AMX only


def source(name: str) -> Path:
    """Return the path of `NAME.cpp`."""
    return Path(__file__).parent / f"{name}.cpp"


def sources() -> list[Source]:
    """Return every source of this folder that this CPU can use, with its flags, for `native_build.start_builds`."""
    return [(source(name), FLAGS) for name in (*NAMES, *(TILE_NAMES if cpu_identity().amx else ()))]


@functools.cache
def native_library(name: str) -> ctypes.CDLL | None:
    """Return the library of `NAME.cpp`, compiled if needed; None (logged once) if that fails, or with WHORL_NATIVE=0."""
    if not is_enabled():
        return None
    try:
        return load_library(source(name), cache_folder(), FLAGS)
    except BuildError as error:
        warnings.warn(f"{name} by torch: {error}", RuntimeWarning, stacklevel=2)
        return None


def tile_library(name: str) -> ctypes.CDLL | None:
    """Return the library of `NAME.cpp` as `native_library`, or None (logged once) where its tiles cannot be used."""
    found = native_library(name)
    if found is not None and not found.whorl_tiles():
        warn_of_unused_amx()
        return None
    return found
