"""Kills at a known step, and the checks that a killed run resumes and that replicas equal one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.children import children
from whorl.train.checkpoint.manager import CheckpointManager

# Metrics that differ with the number of micro-batches, or with the clock.
VARYING = ("time/", "noise_scale/", "stats_overhead", "update_ratio/memory")
History = list[dict[str, float]]


class Killed(BaseException):
    pass


def save_each_step(*given: Any, **options: Any) -> CheckpointManager:
    """Return a checkpoint manager that saves after each step; a save waits for the previous one."""
    return CheckpointManager(*given, **{**options, "seconds": 0.0, "thread": True})


def record(kill: int = 0, at: Callable[[int], None] | None = None) -> tuple[History, Callable[..., None]]:
    """Return a list, and a callback that appends the metrics of each step to it.

    kill: step that raises `Killed`. at: called after each step.
    """
    history: History = []

    def callback(step: int, metrics: dict[str, float], *_: Any) -> None:
        history.append(metrics)
        if at is not None:
            at(step)
        if step == kill:
            raise Killed

    return history, callback


def kill_replicas_at(step: int) -> Callable[[int], None]:
    """Return a callback that sends SIGKILL to the other replicas at that step."""

    def observe(done: int) -> None:
        if done == step:
            for child in children("replica"):
                child.kill()

    return observe


def same_weights(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    """Return whether all parameters and buffers have equal bits."""
    pairs = zip(a.state_dict().items(), b.state_dict().items(), strict=True)
    return all(name == other and torch.equal(p, q) for (name, p), (other, q) in pairs)


def check_resume(train: Any, folder: Path, error: Any = Killed, match: Any = None, **killer: Any) -> None:
    """Check that a killed run continues at its last checkpoint, and ends with the bits of a whole run.

    train(**options) returns a network and the metrics of each step. `killer` are the options that kill it.
    """
    whole, history, *_ = train()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(error, match=match):
        patch.setattr("whorl.train.resume.CheckpointManager", save_each_step)
        train(checkpoint_dir=folder, **killer)
    messages: list[str] = []
    again, rest, *_ = train(checkpoint_dir=folder, log=messages.append)
    assert 0 < len(rest) < len(history)
    assert any(text.startswith(f"continues at step {len(history) - len(rest)} of") for text in messages)
    assert same_weights(whole, again)


def check_replicas(train: Callable[[int], tuple[torch.nn.Module, History]]) -> History:
    """Check that `train(n)` gives the same weights and metrics for 1 and 2 replicas, up to the rounding of sums."""
    one, history = train(1)
    two, history_two = train(2)
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=2e-5)
    for x, y in zip(history, history_two, strict=True):
        x, y = ({n: v for n, v in each.items() if not n.startswith(VARYING)} for each in (x, y))
        assert set(x) == set(y) and y["loss_tokens"] == x["loss_tokens"]
        for name in set(x) - {"grad_norm"}:
            if "clip_fraction" not in name:  # a fraction jumps at the limit
                assert y[name] == pytest.approx(x[name], rel=1e-3, abs=1e-4), name
        assert y["grad_norm"] == pytest.approx(x["grad_norm"], rel=1e-2, abs=1e-5)
    return history_two
