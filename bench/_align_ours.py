"""Ours as a contender of `align_grpo_step.py` and `align_sft.py`: the work and the report of `_align_trl.py`.

Each is the room's own loop (`align/sft.py`, `align/learn.py`), halted where it tells its observer of a step. The optimiser
is AdamW on both sides, though the house's own would be Muon; the loss's average is over tokens.
"""

from __future__ import annotations

from pathlib import Path

import _align_work as work
import numpy as np
import torch
from _turns import Gate

from whorl.align.config import SFTConfig
from whorl.align.network import Network
from whorl.align.sft import fine_tune
from whorl.align.texts import Text
from whorl.train.config import OptimConfig, ScheduleConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CONSTANT = ScheduleConfig(kind="constant", warmup=0.0)
SHARE = work.RATE / OptimConfig().adamw_rate


def _parts(metrics: dict[str, float]) -> dict[str, float]:
    """The seconds that a loop tells of."""
    return {name.removeprefix("seconds_"): s for name, s in metrics.items() if name.startswith("seconds_")}


def grpo(
    gate: Gate, folder: Path, kind: str, prompts: list[str], group: int, n_new: int, beta: float
) -> None:
    """Steps of GRPO, halted behind each."""
    raise NotImplementedError


def sft(gate: Gate, folder: Path, kind: str, texts: work.Rows, rows: int, length: int) -> None:
    """Steps of `fine_tune`, halted behind each. folder: not looked at, the weights are `_align_work.model`'s."""

    def observe(step: int, metrics: dict[str, float]) -> None:
        gate(
            {
                "parts": _parts(metrics), "loss": metrics["nll"], "norm": metrics["gradient_norm"],
                "tokens": int(metrics["count"]),
            }
        )  # fmt: skip

    made = []
    for ids in texts:
        mask = np.ones(len(ids), np.bool_)
        mask[0] = False
        made.append(Text(np.array(ids, np.int64), mask))
    config = SFTConfig(
        epochs=1e6, length=length, batch_rows=rows, matrices="adamw", share=SHARE, schedule=CONSTANT
    )
    fine_tune(Network(work.model(DTYPES[kind])), made, config, pad_id=work.PAD, observe=observe)
