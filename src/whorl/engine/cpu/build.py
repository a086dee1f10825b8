"""The native library of the decoding step, compiled on the machine (`machine/native_build.py`) while a model loads."""

from __future__ import annotations

import ctypes
import functools
import warnings
from pathlib import Path

from whorl.engine.cpu.layout import TILES_FEATURE
from whorl.machine import native_build
from whorl.machine.identity import warn_of_unused_amx
from whorl.machine.native_build import BuildError, cache_folder

SOURCE = Path(__file__).parent / "native.cpp"


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the library, compiled if needed; None (logged once) if the build fails or WHORL_CHOOSE=cpu=torch."""
    if not native_build.is_enabled():
        return None
    try:
        found = load_library(cache_folder())
    except BuildError as error:
        warnings.warn(f"decoding by torch: {error}", RuntimeWarning, stacklevel=2)
        return None
    if not found.whorl_features() & TILES_FEATURE:
        warn_of_unused_amx()
    return found


def is_compiled() -> bool:
    """Whether `library` need not compile, since that has been done on this machine."""
    try:
        return native_build.library_file(SOURCE, cache_folder()).exists()
    except BuildError:
        return False


def load_library(folder: Path) -> ctypes.CDLL:
    """Load the library from `folder`; compiles it if it is missing.

    Raises:
        BuildError: there is no compiler, it fails, or its output cannot be loaded.
    """
    return declare_signatures(native_build.load_library(SOURCE, folder))


def declare_signatures(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the argument types of the library's functions and return it."""
    p, i32, i64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    for name, result, arguments in (
        ("features", i32, []),
        ("sizeof", i64, [i32]),
        ("packed_bytes", None, [p, p]),
        ("large_pages", None, [p, i64]),
        ("pack", None, [p, p, p, p, i32]),
        ("open", p, []),
        ("close", None, [p]),
        ("product", i32, [p, p, p, i64, p, i32, ctypes.c_float, i32]),
        ("step", i32, [p, p, p, p, i32]),
        ("sample", i32, [p, p, i64, i64, p, i32]),
        ("decode", i32, [p, p, p, p, p, i32]),
        ("read", None, [p, p, i64, i32]),
        ("summarize", None, [p, p, i64, i64, i64, p, p, i32]),
    ):
        function = getattr(library, f"whorl_{name}")
        function.restype, function.argtypes = result, arguments
    return library
