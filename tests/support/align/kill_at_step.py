"""Kills at a known step: of a run whose checkpoints are complete when `save` returns, or of its replicas."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from whorl.train.checkpoint.manager import CheckpointManager


class Killed(Exception):
    pass


class SynchronousCheckpoints(CheckpointManager):
    """A checkpoint manager that waits for its writer thread after each checkpoint."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **{**options, "thread": True})

    def due(self) -> bool:
        super().due()
        return True

    def save(self, *given: Any, **options: Any) -> float:
        waited = super().save(*given, **options)
        self.finish()
        return waited


def kill_replicas_at(step: int) -> Callable[[int], None]:
    """Return a callback that sends SIGKILL to the other replicas at that step."""

    def observe(done: int) -> None:
        if done == step:
            for child in psutil.Process().children():
                if "spawn_main" in " ".join(child.cmdline()):
                    os.kill(child.pid, signal.SIGKILL)

    return observe


def kill_at(step: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a callback that raises `Killed` at that step, after the previous step was saved."""
    monkeypatch.setattr("whorl.align.stage.trainer.CheckpointManager", SynchronousCheckpoints)

    def observe(done: int, metrics: dict[str, float]) -> None:
        if done == step:
            raise Killed

    return observe
