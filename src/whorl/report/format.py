"""Numbers for readers: three significant digits, SI prefixes, a true minus sign."""

from __future__ import annotations

import math

NBSP = "\N{NO-BREAK SPACE}"  # joins a number to its unit

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def format_number(value: float, digits: int = 3) -> str:
    """Return at least `digits` significant digits; with an exponent below 1e-4 and from 1e6 on."""
    if not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    size = int(exponent)  # after rounding: 0.9999 counts as 1
    if size >= 6 or size < -4:
        return f"{mantissa}e{size}".replace("-", "\N{MINUS SIGN}")
    return f"{value:,.{max(0, digits - 1 - size)}f}".replace("-", "\N{MINUS SIGN}")


def format_si(value: float, unit: str) -> str:
    """Return a value with an SI prefix: 1,048,576 parameters become "1.05 M"."""
    for factor, prefix in _PREFIXES:
        if abs(value) >= 0.9995 * factor:
            return f"{format_number(value / factor)}{NBSP}{prefix}{unit}"
    return f"{format_number(value) if value != int(value) else int(value)}{NBSP}{unit}".rstrip()


def format_duration(seconds: float) -> str:
    """Return a duration: "0.4 s", "42 s", "5 min 03 s", "2 h 10 min"."""
    whole = round(seconds)
    if seconds < 9.95:
        text = f"{seconds:.1f} s" if seconds >= 0.05 or seconds == 0 else "< 0.1 s"
    elif whole < 60:
        text = f"{whole} s"
    elif whole < 3600:
        text = f"{whole // 60} min {whole % 60:02d} s"
    else:
        text = f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return text.replace(" ", NBSP)


def format_percent(value: float) -> str:
    """Return a fraction in per cent; one decimal below 10 % and above 99 %."""
    per_cent = 100 * value
    digits = 1 if 0 < per_cent < 9.95 or 99 < per_cent < 99.95 else 0
    return f"{per_cent:.{digits}f}{NBSP}%"


def format_quantity(value: float | None, unit: str) -> str:
    """Return a value in the format of its unit; the units are those of a plan row."""
    if value is None:
        return "–"
    if unit == "s":
        return format_duration(value)
    if unit == "bytes":
        return format_si(value, "B")
    if unit == "share":
        return format_percent(value)
    if unit in ("FLOP", "FLOP/s"):
        return format_si(value, unit)
    if unit in ("tokens", "parameters"):
        return format_si(value, "")
    if unit == "tokens/s":
        return f"{value:,.0f}{NBSP}/s"
    return format_number(value) if value != int(value) else f"{int(value):,}"
