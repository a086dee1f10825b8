"""Variants of the C++ kernels under test."""

from __future__ import annotations

import ctypes

import pytest
import torch

from whorl.machine.native_build import BuildError, cache_folder, load_library
from whorl.nn.cpu.library import FLAGS, FP32, source

# Products of bf16 by tiles in plain C++, which run everywhere, and by the CPU's own instructions; of fp32.
VARIANTS = {
    "emulated tiles": ("-DWHORL_EMULATED",), "vectors": ("-DWHORL_VECTORS",), "tiles": (), "fp32": (FP32,),
}  # fmt: skip


def build_variant(name: str, variant: str) -> ctypes.CDLL:
    """Compile `NAME.cpp` in one of VARIANTS; skips the test where the CPU or the compiler lacks its instructions."""
    try:
        found = load_library(source(name), cache_folder(), (*FLAGS, *VARIANTS[variant]))
    except BuildError as error:
        pytest.skip(str(error))
    needed = {"vectors": 1, "tiles": 2, "fp32": 1}.get(variant, 0)
    if found.whorl_products() != needed:
        pytest.skip(f"this CPU does not multiply by {variant}")
    return found


def dtype_of(variant: str) -> torch.dtype:
    """Return the type whose matrices a variant multiplies."""
    return torch.float32 if variant == "fp32" else torch.bfloat16
