"""An amount of memory as text: `2GB`, `1.5GiB`, `500MB`, a plain number of bytes, or a fraction, `25%`.

`MemoryText` is the type of a configuration field for it. It normalizes the text (`2GB` becomes `2000000000B`), so that
equal amounts have the same address. A fraction is resolved at use: of the device's memory, or, on a CPU, of the
container's limit if that is lower.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator

from whorl.errors import ConfigError
from whorl.machine.device_probe import ram_bytes

UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
         "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}  # fmt: skip
AMOUNT = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:e[+]?[0-9]+)?)\s*([a-z]+|%)?\s*", re.IGNORECASE)
LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True)
class Memory:
    """An amount: exactly one of the two is set. fraction: above 0, at most 1."""

    n_bytes: int | None = None
    fraction: float | None = None

    @classmethod
    def parse(cls, text: str) -> Memory:
        """Parse an amount. Raises ConfigError with the expected format."""
        match = AMOUNT.fullmatch(text)
        amount, unit = (float(match[1]), (match[2] or "b").lower()) if match else (0.0, "")
        if unit == "%" and 0 < amount <= 100:
            return cls(fraction=amount / 100)
        if unit in UNITS and math.isfinite(amount) and amount * UNITS[unit] >= 1:
            return cls(n_bytes=int(amount * UNITS[unit]))
        raise ConfigError(
            f"{text!r} is not an amount of memory",
            expected="bytes (2GB, 500MB, 1.5GiB) or a fraction (25%, at most 100%), above zero",
        )

    def resolve(self, total: int) -> int:
        """Return bytes, given `total`."""
        return self.n_bytes if self.n_bytes is not None else int((self.fraction or 0.0) * total)

    def halved(self) -> Memory:
        """Half of it, at least a byte."""
        if self.n_bytes is not None:
            return Memory(n_bytes=max(1, self.n_bytes // 2))
        return Memory(fraction=(self.fraction or 0.0) / 2)

    def __str__(self) -> str:
        return f"{self.n_bytes}B" if self.n_bytes is not None else f"{100 * (self.fraction or 0.0):g}%"


def device_memory(device: str) -> int:
    """Bytes of the device's memory; on a CPU limited by the container."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.get_device_properties(device).total_memory)
    limit = LIMIT.read_text().strip() if LIMIT.exists() else ""
    return min(ram_bytes(), int(limit)) if limit.isdigit() else ram_bytes()


def _normalize(text: str) -> str:
    try:
        return str(Memory.parse(text))
    except ConfigError as error:  # pydantic reports ValueErrors together with the field's name
        raise ValueError(f"{error.what}; expected {error.expected}") from error


def _as_text(value: object) -> object:
    """A plain number is in bytes."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


MemoryText = Annotated[str, BeforeValidator(_as_text), AfterValidator(_normalize)]


def memory_in_use() -> int:
    """Return the bytes held by this process and its children; shared pages count once where the system reports them."""
    import psutil

    parent = psutil.Process()
    total = 0
    for process in [parent, *parent.children(recursive=True)]:
        try:
            info = process.memory_full_info()
            total += getattr(info, "pss", 0) or info.uss
        except psutil.Error:
            continue  # the process ended in the meantime
    return total
