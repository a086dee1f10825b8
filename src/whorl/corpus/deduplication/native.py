"""The native functions of this package (`native.cpp`), compiled on the machine; numpy computes the same without them."""

from __future__ import annotations

import ctypes
import functools
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whorl.machine.native_build import BuildError, cache_folder, is_enabled, load_library

SOURCE = Path(__file__).parent / "native.cpp"
FLAGS = ("-Wno-psabi",)


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the library, compiled if needed; None (logged once) if the build fails or WHORL_CHOOSE=cpu=torch."""
    if not is_enabled():
        return None
    try:
        found = load_library(SOURCE, cache_folder(), FLAGS)
    except BuildError as error:
        warnings.warn(f"deduplication by numpy: {error}", RuntimeWarning, stacklevel=2)
        return None
    p, i32, i64, real = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_double
    for name, arguments in (
        ("shingles", [p, p, p, i64, p, p, i32, i32, p, p, p]),
        ("minhash", [p, p, i64, p, p, i32, p]),
        ("band_keys", [p, i64, i32, i32, i32, p]),
        ("partition", [p, i64, i32, i32, p, p, p]),
        ("digest", [p, i64, i64, p]),
        ("unique", [p, p, i64]),
        ("sort", [p, p, i64, p, p]),
        ("join", [p, p, i64, p, p, i64, i32, i32, i64, p, p]),
        ("remove", [i64, p, p, p, p, p, p, p, i32, i32, i32, real, p, p]),
    ):
        function = getattr(found, f"whorl_{name}")
        function.restype, function.argtypes = None, arguments
    return found


def pointer(array: NDArray[Any]) -> int:
    """Return the address of a contiguous array."""
    assert array.flags.c_contiguous
    return array.ctypes.data


def pointers(arrays: list[NDArray[Any]]) -> NDArray[np.uint64]:
    """Return the addresses of contiguous arrays."""
    return np.array([array.ctypes.data for array in arrays], np.uint64)
