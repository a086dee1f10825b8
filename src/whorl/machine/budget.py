"""A compute budget as text: `90s`, `5m`, `2h`, an amount of arithmetic, `1e15flops`, or money on a device, `3usd@h100`.

`BudgetText` is the type of a configuration field for it. It normalizes the text (`5m` becomes `300s`), so that equal
budgets have the same address.

A size of any step shrinks with a `--budget` below the recipe's if its field has `json_schema_extra={"shrinks_to": minimum}`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel

from whorl.errors import ConfigError

MIN_SECONDS = 5.0  # of a training budget: less than processes take to start
SECONDS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
NUMBER = re.compile(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]+)\s*(?:@\s*([a-z0-9-]+)\s*)?", re.IGNORECASE)


@dataclass(frozen=True)
class Budget:
    """A budget: exactly one of the three is set. device: that the money rents (`plan/dial/price.py` converts it)."""

    seconds: float | None = None
    flops: float | None = None
    usd: float | None = None
    device: str = ""

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Parse a budget. Raises ConfigError with the expected format."""
        match = NUMBER.fullmatch(text)
        unit = match[2].lower() if match else ""
        try:
            amount = float(match[1]) if match else 0.0
        except ValueError:
            amount = 0.0
        device = (match[3] or "").lower() if match else ""
        known = unit in (("usd",) if device else (*SECONDS, "flop", "flops"))
        if not known or not math.isfinite(amount) or amount <= 0:
            raise ConfigError(
                f"{text!r} is not a budget",
                expected="a time (90s, 5m, 2h), FLOPs (1e15flops) or dollars on a device (3usd@h100), above zero",
            )
        if device:
            return cls(usd=amount, device=device)
        if unit in SECONDS:
            return cls(seconds=amount * SECONDS[unit])
        return cls(flops=amount)

    def scaled(self, factor: float) -> Budget:
        """Return `factor` times the seconds or FLOPs."""
        return Budget(self.seconds and factor * self.seconds, self.flops and factor * self.flops)

    def __str__(self) -> str:
        if self.usd is not None:
            return f"{self.usd:g}usd@{self.device}"
        return f"{self.seconds:g}s" if self.seconds is not None else f"{self.flops:g}flops"


def _normalize(text: str) -> str:
    try:
        return str(Budget.parse(text))
    except ConfigError as error:  # pydantic reports ValueErrors together with the field's name
        raise ValueError(f"{error.what}; expected {error.expected}") from error


BudgetText = Annotated[str, AfterValidator(_normalize)]


def budget_ratio(given: str, config: type[BaseModel], values: Mapping[str, Any]) -> float:
    """Return a given budget over that of a step's settings; 1 if they have none, or one of the two is no time."""
    if "budget" not in config.model_fields:
        return 1.0
    try:
        usual = Budget.parse(values.get("budget", config.model_fields["budget"].default)).seconds
        seconds = Budget.parse(given).seconds
    except (ConfigError, TypeError):  # refused where the settings are validated
        return 1.0
    return seconds / usual if seconds is not None and usual is not None else 1.0


def shrink_sizes(config: type[BaseModel], values: dict[str, Any], ratio: float) -> dict[str, float]:
    """Multiply the sizes among a step's settings (`shrinks_to`) by `ratio`, at most 1; return those that have changed.

    Integers stay integers, and a size below its minimum does not change.
    """
    found = dict[str, float]()
    for name, field in config.model_fields.items():
        extra = field.json_schema_extra
        minimum = extra.get("shrinks_to") if isinstance(extra, dict) else None
        value = values.get(name, field.default)
        if not isinstance(minimum, int | float) or not isinstance(value, int | float):
            continue
        smaller = max(minimum, value * ratio)
        smaller = round(smaller) if isinstance(value, int) else round(smaller, 4)
        if smaller < value:
            found[name] = values[name] = smaller
    return found
