"""Variants of the C++ kernels under test."""

from __future__ import annotations

from whorl.nn.native.library import FLAGS


def variant_flags(variant: str) -> tuple[str, ...]:
    """Flags of a build: "tiles" where the CPU has them, "plain" with loops instead, which run everywhere."""
    return (*FLAGS, "-DWHORL_PLAIN") if variant == "plain" else FLAGS
