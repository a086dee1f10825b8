"""A spike guard, step metrics, and a job whose checkpoint has NaN weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from tests.support.train.tiny import job
from whorl.train.checkpoint.manager import CheckpointManager
from whorl.train.config import SpikeGuardConfig
from whorl.train.job import Job, identity
from whorl.train.lm.build import allocate_shared, build_model
from whorl.train.resilience.spike_guard import SpikeGuard


def make_guard(state: dict[str, Any] | None = None, first: int = 0, **settings: Any) -> SpikeGuard:
    config = SpikeGuardConfig(**{"window": 32, "patience": 3, **settings})
    return SpikeGuard(config, uniform_loss=math.log(300), steps=1000, first=first, state=state)


def step_metrics(loss: float = 2.0, norm: float = 0.5, count: float = 8.0) -> dict[str, float]:
    return {"loss": loss, "nll": loss, "grad_norm": norm, "loss_tokens": count}


def poisoned(tokens: Path, scratch: Path, *, ids: slice | int = 120, **change: object) -> Job:
    """Return a job whose checkpoint of step 0 in `scratch` has NaN embeddings for `ids` (120: the letter x)."""
    watch = {"max_skipped": 1.0, "patience": 1000}
    wanted = job(tokens, **{"steps": 48, "spike_guard": watch, **change})
    shared = allocate_shared(build_model(wanted), wanted)
    shared.weights["embedding"][ids] = torch.nan
    with CheckpointManager(scratch, identity(wanted), thread=True) as keeper:
        keeper.save(0, shared.tensors())
    return wanted
