"""Variants of the C++ kernels under test."""

from __future__ import annotations

import ctypes

import pytest

from whorl.machine.native_build import BuildError, cache_folder, load_library
from whorl.nn.native.library import FLAGS, source

# Products by plain loops and by tiles in plain C++, which run everywhere, and by the CPU's own instructions.
VARIANTS = {
    "plain": ("-DWHORL_PLAIN",),
    "emulated tiles": ("-DWHORL_EMULATED",),
    "vectors": ("-DWHORL_VECTORS",),
    "tiles": (),
}


def build_variant(name: str, variant: str) -> ctypes.CDLL:
    """Compile `NAME.cpp` in one of VARIANTS; skips the test where the CPU or the compiler lacks its instructions."""
    try:
        found = load_library(source(name), cache_folder(), (*FLAGS, *VARIANTS[variant]))
    except BuildError as error:
        pytest.skip(str(error))
    needed = {"vectors": 1, "tiles": 2}.get(variant, 0)
    if found.whorl_products() != needed:
        pytest.skip(f"this CPU has no {variant} of bf16")
    return found
