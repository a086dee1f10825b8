"""A spike guard and step metrics for tests."""

from __future__ import annotations

import math
from typing import Any

from whorl.train.config import SpikeGuardConfig
from whorl.train.resilience.spike_guard import SpikeGuard


def make_guard(state: dict[str, Any] | None = None, first: int = 0, **settings: Any) -> SpikeGuard:
    config = SpikeGuardConfig(**{"window": 32, "patience": 3, **settings})
    return SpikeGuard(config, uniform_loss=math.log(300), steps=1000, first=first, state=state)


def step_metrics(loss: float = 2.0, norm: float = 0.5, count: float = 8.0) -> dict[str, float]:
    return {"loss": loss, "nll": loss, "grad_norm": norm, "loss_tokens": count}
