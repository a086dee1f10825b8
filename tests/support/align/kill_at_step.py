"""Kills at a step that is known: of a run whose checkpoints are whole when `save` returns, or of the replicas of one."""

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


class Prompt(CheckpointManager):
    """A keeper that waits for its writer, a thread, after each checkpoint."""

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
    """An observer that kills -9 the replicas beside the first at that step."""

    def observe(done: int) -> None:
        if done == step:
            for child in psutil.Process().children():
                if "spawn_main" in " ".join(child.cmdline()):
                    os.kill(child.pid, signal.SIGKILL)

    return observe


def kill_at(step: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An observer that raises `Killed` at that step, when the one before has been kept."""
    monkeypatch.setattr("whorl.align.stage.trainer.CheckpointManager", Prompt)

    def observe(done: int, metrics: dict[str, float]) -> None:
        if done == step:
            raise Killed

    return observe
