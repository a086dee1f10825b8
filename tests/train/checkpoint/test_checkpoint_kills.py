"""Killed processes and full disks: the last complete checkpoint stays valid, and the run resumes."""

from __future__ import annotations

import os
import random
import resource
import signal
import time
from pathlib import Path

import pytest
from tests.support.train.checkpoint_states import load_latest, state
from tests.support.train.child_runs import start
from tests.support.train.pretraining import assert_equal, train
from tests.support.train.tiny import job

from whorl.errors import CheckpointError
from whorl.machine.process import Child
from whorl.train.checkpoint.manager import CheckpointManager


def start_saving(folder: Path, graceful: bool = False) -> Child:
    child = start("save_each_step", folder, 24, graceful)
    assert child.channel.recv() == "ready"
    return child


def wait_for(folder: Path, pattern: str) -> None:
    deadline = time.monotonic() + 20
    while not [*folder.glob(pattern)] and time.monotonic() < deadline:
        time.sleep(0.0001)


def whole(folder: Path) -> int:
    """Return the newest valid step, and check its contents."""
    found = load_latest(folder)
    if found is None:
        return 0
    for name in ("weights/a", "state/a/mean"):
        assert bool((found.tensors[name] == found.step).all()), f"{name} is not of step {found.step}"
    return found.step


@pytest.mark.parametrize("how", ["kill", "kill the group", "terminate the group"])
def test_kill_at_any_moment_leaves_valid_checkpoint(tmp_path: Path, how: str) -> None:
    rng, reached = random.Random(how), 0
    for _ in range(2):
        process, before = start_saving(tmp_path), reached
        wait_for(tmp_path, f"step-{before + 2:08d}")
        time.sleep(rng.uniform(0, 0.1))
        if how == "terminate the group":  # during a write
            wait_for(tmp_path, "writing-*/state.safetensors")
        number = signal.SIGTERM if how.startswith("term") else signal.SIGKILL
        (os.kill if how == "kill" else os.killpg)(process.pid, number)
        assert (process.wait(20) or 0) < 0
        reached = whole(tmp_path)
        assert reached >= before + 2
    _no_writer_is_left(process.pid)


def test_sigterm_lets_writer_finish(tmp_path: Path) -> None:
    process = start_saving(tmp_path, graceful=True)
    wait_for(tmp_path, "writing-*/state.safetensors")
    os.killpg(process.pid, signal.SIGTERM)  # the writer receives it too and ignores it
    assert process.wait(20) == 0
    assert whole(tmp_path) >= 1 and not list(tmp_path.glob("writing-*"))
    _no_writer_is_left(process.pid)


def _no_writer_is_left(group: int) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError("a process of the group is alive")


def test_writer_death_raises(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, {}, seconds=0.0)
    manager.save(1, state())
    manager.finish()
    assert manager.writer is not None and manager.writer.process is not None
    manager.writer.process.kill()
    manager.writer.process.wait()
    with (
        pytest.raises(CheckpointError, match=r"the checkpoint writer died: .* was killed by SIGKILL"),
        manager,
    ):
        manager.save(2, state())
        manager.save(3, state())
    assert load_latest(tmp_path).step == 1  # type: ignore[union-attr]


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="no such limit here")
def test_disk_full_stops_run_and_resume_is_exact(tokens: Path, tmp_path: Path) -> None:
    wanted = job(tokens, steps=12, replicas=2)
    undisturbed = train(wanted, tmp_path / "a")
    child = start("fill_disk", tokens, tmp_path / "b")
    assert "no space left" in child.channel.recv() and child.wait(60) == 0
    assert not list((tmp_path / "b").glob("writing-*"))
    found = load_latest(tmp_path / "b")
    assert found is not None and 4 <= found.step <= 5
    messages: list[str] = []
    assert_equal(undisturbed, train(wanted, tmp_path / "b", log=messages.append))
    assert f"continues at step {found.step} of 12" in messages[0]
