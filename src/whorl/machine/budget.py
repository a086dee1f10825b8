"""A compute budget as text: `90s`, `5m`, `2h`, or an amount of arithmetic, `1e15flops`.

`BudgetText` is the type of a configuration field for it. It normalizes the text (`5m` becomes `300s`), so that equal
budgets have the same address.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator

from whorl.errors import ConfigError

SECONDS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
NUMBER = re.compile(r"\s*([0-9.]+(?:e[+]?[0-9]+)?)\s*([a-z]+)\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Budget:
    """A budget: exactly one of the two is set."""

    seconds: float | None = None
    flops: float | None = None

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Parse a budget. Raises ConfigError with the expected format."""
        match = NUMBER.fullmatch(text)
        unit = match[2].lower() if match else ""
        try:
            amount = float(match[1]) if match else 0.0
        except ValueError:
            amount = 0.0
        known = unit in SECONDS or unit in ("flop", "flops")
        if not known or not math.isfinite(amount) or amount <= 0:
            raise ConfigError(
                f"{text!r} is not a budget",
                expected="a time (90s, 5m, 2h) or an amount of arithmetic (1e15flops), above zero",
            )
        if unit in SECONDS:
            return cls(seconds=amount * SECONDS[unit])
        return cls(flops=amount)

    def __str__(self) -> str:
        return f"{self.seconds:g}s" if self.seconds is not None else f"{self.flops:g}flops"


def _normalize(text: str) -> str:
    try:
        return str(Budget.parse(text))
    except ConfigError as error:  # pydantic reports ValueErrors together with the field's name
        raise ValueError(f"{error.what}; expected {error.expected}") from error


BudgetText = Annotated[str, AfterValidator(_normalize)]
