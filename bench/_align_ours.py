"""Ours as a contender of `align_grpo_step.py` and `align_sft.py`: the work and the report of `_align_trl.py`.

Not there yet: `align/` is being written.
"""

from __future__ import annotations

from pathlib import Path

import _align_work as work
from _turns import Gate

KINDS: tuple[str, ...] = ("float32", "bfloat16")


def grpo(
    gate: Gate, folder: Path, kind: str, prompts: list[str], group: int, n_new: int, beta: float
) -> None:
    """Steps of GRPO, halted behind each."""
    raise NotImplementedError


def sft(gate: Gate, folder: Path, kind: str, texts: work.Rows, rows: int, length: int) -> None:
    """Steps of SFT, halted behind each."""
    raise NotImplementedError
