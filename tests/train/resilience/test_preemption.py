"""SIGTERM at any moment: a checkpoint, an exit code, and equal bits after the resume."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tests.support.train.checkpoint_states import load_latest
from tests.support.train.child_runs import start
from tests.support.train.pretraining import assert_equal, raw_text, train, train_notes
from tests.support.train.tiny import Notes, job

from whorl.tokens.loader import TokenProducer
from whorl.tokens.stream import StreamProducer
from whorl.train.checkpoint import manager as keeper
from whorl.train.learner.learner import UpdateState
from whorl.train.lm.objective import LMObjective
from whorl.train.metrics.validation import Validator
from whorl.train.resilience.preemption import PreemptedError


def on_call(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, number: int, *, late: bool = False
) -> None:
    """Send SIGTERM just before (or after) the `number`-th call of a function."""
    plain, calls = getattr(owner, name), [0]

    def call(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        found = plain(*args, **options) if late else None
        if calls[0] == number:
            signal.raise_signal(signal.SIGTERM)
        return found if late else plain(*args, **options)

    monkeypatch.setattr(owner, name, call)


MOMENTS = {
    "a batch is waited for": (TokenProducer, "fill", 7, False),
    "forward": (LMObjective, "__call__", 7, False),
    "backward": (torch.Tensor, "backward", 7, True),
    "the update": (UpdateState, "step", 7, True),
    "a look at held-out text": (Validator, "__call__", 1, False),
    "a record in the log": (Notes, "on_step", 7, False),
    "a checkpoint": (keeper, "copy_to_staging", 4, False),
    "a copy put aside": (keeper.CheckpointManager, "save_named", 1, True),
}


@pytest.mark.parametrize(("moment", "raw"), [*((m, False) for m in MOMENTS), ("a batch is waited for", True)])
def test_sigterm_at_any_moment_saves_and_resumes(
    tokens: Path, tmp_path: Path, moment: str, raw: bool
) -> None:
    owner, name, number, late = MOMENTS[moment]
    if raw and owner is TokenProducer:
        owner, number = StreamProducer, 2
    stream = {**raw_text(tokens, tmp_path), "shuffle_bytes": 3000, "block_bytes": 1000} if raw else None
    wanted = job(tokens, stream=stream)
    undisturbed = train(wanted, tmp_path / "a")
    before = signal.getsignal(signal.SIGTERM)
    seconds = 0.0 if moment == "a checkpoint" else 1e9
    with pytest.MonkeyPatch.context() as patched, pytest.raises(PreemptedError) as raised:
        on_call(patched, owner, name, number, late=late)
        train(wanted, tmp_path / "b", checkpoint_seconds=seconds)
    assert raised.value.exit_code == 143 and "run the same command again" in str(raised.value)
    assert signal.getsignal(signal.SIGTERM) is before
    found = load_latest(tmp_path / "b")
    assert found is not None and 0 < found.step < 12
    assert f"after step {found.step} of 12; a checkpoint of step {found.step} is written" in str(raised.value)
    messages: list[str] = []
    assert_equal(undisturbed, train(wanted, tmp_path / "b", log=messages.append))
    assert any(f"continues at step {found.step}" in line for line in messages)


def test_sigterm_in_last_step_raises(tokens: Path, tmp_path: Path) -> None:
    class Last(Notes):
        def on_step(self, step: int, metrics: dict[str, float]) -> None:
            if step == 12:
                signal.raise_signal(signal.SIGTERM)

    with pytest.raises(PreemptedError, match="step 12 of 12"):
        train(job(tokens), tmp_path / "b", Last())
    found = load_latest(tmp_path / "b")
    assert found is not None and found.step == 12
    whole, rest = (train_notes(job(tokens), tmp_path / name) for name in "ab")
    assert rest.evaluations == whole.evaluations[-1:], "the look that was broken off"


def test_sigterm_to_group_interrupts_long_phase(tokens: Path, tmp_path: Path) -> None:
    """Sent to all processes, as schedulers do. The phase of a minute must be interrupted."""
    scratch = tmp_path / "scratch"
    run = start("train_with_slow_phase", tokens, scratch)
    assert run.channel.recv() == "slow"
    time.sleep(0.3)
    family = psutil.Process(run.pid).children(recursive=True)
    assert len(family) >= 3
    os.killpg(run.pid, signal.SIGTERM)
    assert "a checkpoint of step" in run.channel.recv()
    assert run.wait(20) == 143
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    found = load_latest(scratch)
    assert found is not None and found.step == 25
    wanted = job(tokens, replicas=2, steps=60, evaluations=6)
    assert_equal(train(wanted, tmp_path / "whole"), train(wanted, scratch))
