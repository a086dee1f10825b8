"""Number formats: bits, range and spacing.

A format with e exponent bits, m mantissa bits and the bias b = 2^(e - 1) - 1 has the numbers (1 + k / 2^m) 2^(x - b) for
0 <= k < 2^m. An IEEE format keeps its highest exponent for infinities. The format e4m3 keeps only one pattern, for NaN, so
its maximum is 448 (Micikevicius et al. 2022, arXiv:2209.05433). In memory, tf32 has 32 bits. An integer has no exponent.
"""

from __future__ import annotations

from typing import NamedTuple

from whorl.errors import ConfigError, one_of


class NumberFormat(NamedTuple):
    """bits: in memory. max: largest finite number. smallest_normal: with all bits of its mantissa. spacing: after 1."""

    bits: int
    max: float
    smallest_normal: float
    spacing: float


def _format(name: str, bits: int, exponent: int, mantissa: int) -> NumberFormat:
    if not exponent:
        return NumberFormat(bits, 2.0 ** (bits - 1) - 1, 1.0, 1.0)
    lost = 1 if name == "fp8_e4m3" else 0  # it has the highest exponent, without the last mantissa
    highest = (2 - (1 + lost) * 2.0**-mantissa) * 2.0 ** float(2 ** (exponent - 1) - 1 + lost)
    return NumberFormat(bits, highest, 2.0 ** float(2 - 2 ** (exponent - 1)), 2.0**-mantissa)


_BITS = {  # in memory, exponent, mantissa
    "fp32": (32, 8, 23), "tf32": (32, 8, 10), "bf16": (16, 8, 7), "fp16": (16, 5, 10),
    "fp8_e4m3": (8, 4, 3), "fp8_e5m2": (8, 5, 2), "int8": (8, 0, 0), "int4": (4, 0, 0),
}  # fmt: skip
FORMATS = {name: _format(name, *bits) for name, bits in _BITS.items()}


def number_format(name: str) -> NumberFormat:
    """Return a format by its name. Raises ConfigError: it is unknown."""
    if name not in FORMATS:
        raise ConfigError(f"number format {name!r} is unknown", expected=one_of(name, list(FORMATS)))
    return FORMATS[name]
