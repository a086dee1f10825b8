"""The checkpoint manager and remote storage: timing, retention, failures, statistics."""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from tests.support.train.checkpoint_states import load_latest, same, state
from tests.support.train.pretraining import train, train_notes
from tests.support.train.tiny import job

from whorl.machine import kernel_choice
from whorl.machine.kernel_choice import VARIABLE, fastest, time_candidates
from whorl.parallel.process_group import ProcessGroup
from whorl.train.checkpoint import writer
from whorl.train.checkpoint.format import NewerFormatError
from whorl.train.checkpoint.manager import CheckpointManager
from whorl.train.checkpoint.remote import RemoteStore
from whorl.train.checkpoint.size_report import bytes_per_parameter, format_line
from whorl.train.checkpoint.stats import CheckpointStats
from whorl.train.config import CheckpointConfig
from whorl.train.lm.build import allocate_shared, build_model
from whorl.train.resilience.rollback import RollbackStore, ensure_local_snapshot, restore_snapshot
from whorl.train.task import TrainCallback


@pytest.mark.parametrize("thread", [False, True])
def test_save_takes_snapshot_of_the_moment(tmp_path: Path, thread: bool) -> None:
    tensors = {"weights/a": torch.full((1 << 21,), 1.0), "weights/odd": torch.zeros(3)}
    stats = CheckpointStats()
    with CheckpointManager(tmp_path, {"of": 1}, seconds=0.0, thread=thread, stats=stats) as manager:
        for step in range(1, 9):
            tensors["weights/a"].fill_(step)
            assert manager.save(step, tensors, {"step": step}) >= 0
            tensors["weights/a"].fill_(-1)
    with CheckpointManager(tmp_path, {"of": 1}) as manager:
        found = manager.resume()
    assert found is not None and found.step == 8 == found.metadata["step"]
    assert bool((found.tensors["weights/a"] == 8).all()) and found.tensors.keys() == tensors.keys()
    assert stats.written == 8 and stats.last_bytes > 8 << 20
    assert stats.stall_seconds >= stats.max_stall_seconds > 0
    assert manager.stats.resumes == 1 and manager.stats.written == 7  # as of the last save


def delayed(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*words: Any, **more: Any) -> Any:
        time.sleep(0.5)
        return function(*words, **more)

    return call


def test_due_defers_while_writing_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, free = writer.write_checkpoint, threading.Event()
    monkeypatch.setattr(
        writer, "write_checkpoint", lambda *words, **more: free.wait(60) and write(*words, **more)
    )
    messages: list[str] = []
    with CheckpointManager(tmp_path, {}, seconds=0.1, thread=True, log=messages.append) as manager:
        manager.save(1, state())  # returns while the disk is not free
        time.sleep(0.15)
        assert not manager.due() and not manager.due()
        assert manager.stats.deferred == 1 and ["checkpoint deferred" in text for text in messages] == [True]
        threading.Timer(0.3, free.set).start()
        assert manager.save(2, state(2)) > 0.2  # an explicit save waits
        assert manager.stats.written == 1
    assert manager.stats.written == 2 and load_latest(tmp_path).step == 2  # type: ignore[union-attr]


class Disk:
    """A writer that takes `seconds` per checkpoint, on a simulated clock."""

    def __init__(self, clock: SimpleNamespace, seconds: float) -> None:
        self.clock, self.seconds = clock, seconds
        self.ends: list[float] = []
        self.told = 0

    def submit(self, order: dict[str, Any]) -> None:
        self.ends.append(self.clock.now + self.seconds)

    def poll_reply(self, timeout: float | None = 0.0) -> dict[str, Any] | None:
        if self.told == len(self.ends):
            return None
        if timeout is None:
            self.clock.now = max(self.clock.now, self.ends[self.told])
        if self.clock.now < self.ends[self.told]:
            return None
        self.told += 1
        return {"tier": "local", "seconds": self.seconds, "bytes": 1}

    def close(self, timeout: float) -> bool:
        return True


@pytest.mark.parametrize("write", [0.0, 0.5, 4.0])
def test_kill_costs_at_most_one_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: float
) -> None:
    """Simulated: intervals of 8 s, steps of 0.1 s, writes of up to half an interval."""
    clock = SimpleNamespace(now=100.0)
    simulated = SimpleNamespace(monotonic=lambda: clock.now, time=lambda: clock.now)
    monkeypatch.setattr("whorl.train.checkpoint.manager.time", simulated)
    manager = CheckpointManager(tmp_path, {}, seconds=8.0)
    disk = Disk(clock, write)
    manager.writer = disk  # type: ignore[assignment]
    taken, lost = [clock.now], list[float]()
    for step in range(1, 1000):
        clock.now += 0.1
        whole = [100.0, *(at for at, end in zip(taken[1:], disk.ends, strict=True) if end <= clock.now)]
        lost.append(clock.now - whole[-1])
        if manager.due():
            taken.append(clock.now)
            manager.save(step, state())
    assert 6.0 < max(lost) <= 8.0 + 0.1 + 1e-6
    assert 12 <= manager.stats.written <= 25 and not manager.stats.deferred
    manager.close()


def test_resume_restores_global_rng_states(tmp_path: Path) -> None:
    def draw() -> tuple[float, float, float]:
        return float(torch.rand(())), random.random(), float(np.random.rand())

    with CheckpointManager(tmp_path, {}) as manager:
        manager.save(1, state())
        first = draw()
    draw()
    with CheckpointManager(tmp_path, {}) as manager:
        assert manager.resume() is not None
    assert draw() == first


def remote_config(folder: Path, **more: Any) -> CheckpointConfig:
    """Upload every checkpoint into `folder`."""
    return CheckpointConfig(**{"remote_url": f"file://{folder}", "remote_interval": 0.0, **more})


def resumed_step(folder: Path, config: CheckpointConfig, log: Any = print, of: int = 1) -> int | None:
    """The step from which a job resumes in `folder`; its tensors must be those of the step."""
    with CheckpointManager(folder, {"of": of}, config=config, log=log) as manager:
        found = manager.resume()
    assert found is None or same(found.tensors, state(found.step))
    return None if found is None else found.step


def run(
    folder: Path, config: CheckpointConfig, steps: range, log: Any = print, **more: Any
) -> CheckpointManager:
    """Save these steps and wait for each upload."""
    with CheckpointManager(folder, {"of": 1}, seconds=0.0, config=config, log=log, **more) as manager:
        for number, step in enumerate(steps, start=1):
            manager.save(step, state(step))
            manager.finish()
            deadline = time.monotonic() + 20
            while manager.stats.remote_written + manager.stats.remote_failed < number:
                assert time.monotonic() < deadline
                manager._poll_writer(0.05)
    return manager


def remote_steps(remote: RemoteStore) -> list[int]:
    return [found.step for found in remote.list_checkpoints()[0]]


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_remote_checkpoint_used_on_new_machine(tmp_path: Path, scheme: str) -> None:
    url = f"file://{tmp_path}/far" if scheme == "file" else f"memory://{tmp_path.name}"
    config = remote_config(tmp_path, remote_url=url, remote_keep=2)
    # a memory file system is local to its process
    manager = run(tmp_path / "near", config, range(1, 5), thread=scheme == "memory")
    assert manager.stats.remote_written == 4 and not manager.stats.remote_failed
    remote = RemoteStore(config.remote_url, manager.job_id)
    whole, begun = remote.list_checkpoints()
    assert [f.step for f in whole] == [4, 3] and not begun
    assert resumed_step(tmp_path / "other machine", config) == 4
    # damaged: the previous one is used; without an index: ignored; newer local checkpoints win
    remote.fs.pipe_file(f"{remote.root}/{whole[0].name}/state.safetensors", b"x")
    remote.fs.makedirs(f"{remote.root}/step-00000009.1.aa")
    remote.fs.pipe_file(f"{remote.root}/step-00000009.1.aa/state.safetensors", b"x")
    messages: list[str] = []
    assert resumed_step(tmp_path / "third", config, messages.append) == 3
    assert "rejected step-00000004" in messages[0]
    assert resumed_step(tmp_path / "near", config) == 4
    remote.prune(config)
    assert not remote.list_checkpoints()[1]  # started in 1970 and never finished
    assert resumed_step(tmp_path / "another job", config, of=2) is None  # jobs may share a URL


def test_remote_prune_by_age(tmp_path: Path) -> None:
    remote = RemoteStore(f"file://{tmp_path}/far", "job")
    for step, began in ((1, 1000), (2, 2000), (3, int(time.time()) - 7200)):
        folder = tmp_path / "far" / "job" / f"step-0000000{step}.{began}.ab"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text("{}")
    remote.prune(CheckpointConfig(remote_url="x", remote_keep=2, remote_keep_hours=1.0))
    assert remote_steps(remote) == [3]  # too old, but the newest


def test_remote_not_writable_is_logged_and_retried(tmp_path: Path) -> None:
    (tmp_path / "far").write_text("a file, not a folder")
    config, messages = remote_config(tmp_path / "far"), list[str]()
    stats = run(tmp_path / "near", config, range(1, 4), messages.append).stats
    assert stats.written == 3 and stats.remote_failed == 3 and stats.remote_error
    assert sum("is not writable" in text and "training continues" in text for text in messages) == 1
    assert "0 in remote storage (3 failed, the last: " in stats.summary()
    (tmp_path / "far").unlink()
    messages.clear()
    log = messages.append
    with CheckpointManager(tmp_path / "near", {"of": 1}, seconds=0.0, config=config, log=log) as again:
        assert again.resume() is not None and again.stats.remote_failed >= 2
        again.save(4, state(4))
        again.finish()
        again._poll_writer(10.0)
    assert again.stats.remote_written == 1 and not again.stats.remote_error
    assert any("is writable again" in text for text in messages)
    assert "and succeeded later" in again.stats.summary()


@pytest.mark.parametrize("url", ["nosuch://far", "file:///proc/nowhere"])
def test_remote_unreachable_does_not_stop_training(tokens: Path, tmp_path: Path, url: str) -> None:
    config, stats = remote_config(tmp_path, remote_url=url), CheckpointStats()
    saved = {"checkpoint_seconds": 0.0, "checkpoint_config": config, "checkpoint_stats": stats}
    notes = train_notes(job(tokens), tmp_path / "s", **saved)
    assert notes.checkpoints == list(range(1, 13)) and stats.written == 12
    assert stats.remote_failed and stats.remote_error
    assert stats.summary() and "failed" in stats.summary()


def test_resume_keeps_the_kernels_of_the_start(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Timing on a busy machine may choose otherwise after a kill, and other kernels have other last bits."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(kernel_choice, "timed_choice", lambda name, ways, **_: time_candidates(name, ways))
    found, options = list[str](), {"slow": lambda: time.sleep(0.002), "quick": lambda: None}

    class Choose(TrainCallback):
        def on_step(self, step: int, metrics: dict[str, float]) -> None:
            found.append(fastest("resumed 1x1", options))

    for stop in (3, 6):
        train(job(tokens), tmp_path / "run", Choose(), stop_after=stop, checkpoint_seconds=0.0)
        options["slow"], options["quick"] = options["quick"], options["slow"]
        kernel_choice._chosen.clear()  # as in a new process
    assert set(found) == {"quick"} and len(found) > 1 and VARIABLE not in os.environ


def test_metrics_after_resume_cover_all_steps(tokens: Path, tmp_path: Path) -> None:
    """The first report after a resume covers the steps before the kill too."""
    wanted = job(tokens, steps=1500, batch_size=1)  # reports every third step
    whole = train_notes(wanted, tmp_path / "a", stop_after=12).steps
    train(wanted, tmp_path / "b", stop_after=8, checkpoint_seconds=0.0)
    shutil.rmtree(tmp_path / "b" / "step-00000008")  # as if killed after step 7
    rest = train_notes(wanted, tmp_path / "b", stop_after=12).steps
    names = ("loss", "nll", "grad_norm")
    assert [[m[n] for n in names] for m in rest] == [[m[n] for n in names] for m in whole[2:]]


def test_bytes_per_parameter_sums_and_explains(tokens: Path) -> None:
    wanted = job(tokens, ema=0.9)
    model = build_model(wanted)
    shared = allocate_shared(model, wanted)
    shared.allocate_averages(1)
    tensors = shared.tensors()
    count = model.params()["total"]
    parts = {p["part"]: p for p in bytes_per_parameter(tensors, count)}
    assert parts["weights"]["per_parameter"] == pytest.approx(4.0) == parts["averages"]["per_parameter"]
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    assert sum(p["bytes"] for p in parts.values()) == total
    momentum = sum(t.numel() * 4 for n, t in tensors.items() if n.endswith("/momentum"))
    assert parts["state/momentum"]["bytes"] == momentum
    text = format_line(list(parts.values()))
    assert text.startswith(f"{total / count:.1f} bytes per parameter: ") and "master weights" in text


@pytest.mark.parametrize("damaged", [1, 2])
def test_damaged_checkpoint_does_not_displace_new_ones(tmp_path: Path, damaged: int) -> None:
    """Retention counts by step: a damaged checkpoint of a high step must not displace later saves."""
    config = CheckpointConfig(keep=damaged)
    with CheckpointManager(tmp_path, {}, seconds=0.0, config=CheckpointConfig(keep=3)) as manager:
        for step in (80, 90, 100):
            manager.save(step, state(step))
    for path in sorted(tmp_path.glob("step-*"))[-damaged:]:
        (path / "state.safetensors").write_bytes(b"x")
    with CheckpointManager(tmp_path, {}, seconds=0.0, config=config) as manager:
        found = manager.resume()
        assert found is not None and found.step == 100 - 10 * damaged
        manager.save(found.step + 5, state(1))
        manager.finish()
        assert "rejected: step-" in manager.stats.summary()
    with CheckpointManager(tmp_path, {}) as again:
        last = again.resume()
    assert last is not None and last.step == found.step + 5
    assert len([*tmp_path.glob("damaged-*")]) == 1, "one is kept to be looked at"


def test_failed_download_falls_back_to_older(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, really, messages = remote_config(tmp_path / "far"), LocalFileSystem.get_file, list[str]()
    run(tmp_path / "near", config, range(1, 4))

    def get_file(self: LocalFileSystem, source: str, *more: Any) -> None:
        if "step-00000001" not in source:
            raise OSError("the line is dead")
        really(self, source, *more)

    monkeypatch.setattr(LocalFileSystem, "get_file", get_file)
    assert resumed_step(tmp_path / "elsewhere", config, messages.append) == 1
    assert sum("the line is dead" in text for text in messages) == 2


def test_remote_newer_format_raises_and_is_kept(tmp_path: Path) -> None:
    """As for local ones: skipping it would train its steps again, and retention would remove it."""
    config = remote_config(tmp_path / "far")
    remote = RemoteStore(config.remote_url, run(tmp_path / "near", config, range(1, 3)).job_id)
    newest_one = remote.list_checkpoints()[0][0]
    index = b'{"body": {"format": 99, "step": 2}}'
    remote.fs.pipe_file(f"{remote.root}/{newest_one.name}/state.json", index)
    words = r"checkpoint format 99(.|\n)*use the version that wrote it"
    for _ in range(2):  # the second time a local copy exists
        with pytest.raises(NewerFormatError, match=words):
            resumed_step(tmp_path / "elsewhere", config)
    assert remote_steps(remote) == [2, 1]


def test_last_save_is_uploaded_after_earlier_upload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RemoteStore, "upload", delayed(RemoteStore.upload))
    config = remote_config(tmp_path / "far")
    with CheckpointManager(tmp_path / "near", {}, seconds=0.0, config=config, thread=True) as manager:
        manager.save(1, state(1))
        manager.save(2, state(2), upload=True)
        assert not manager.needs_upload(2) and manager.needs_upload(3)
    assert remote_steps(RemoteStore(config.remote_url, manager.job_id))[0] == 2


def test_last_upload_time_survives_resume(tmp_path: Path) -> None:
    config = remote_config(tmp_path / "far", remote_interval=1000.0)
    with CheckpointManager(tmp_path / "near", {}, seconds=0.0, config=config) as manager:
        manager.stats.last_remote_time -= 600
        manager.save(1, state(1))
    with CheckpointManager(tmp_path / "near", {}, seconds=0.0, config=config) as manager:
        manager.resume()
        manager.stats.last_remote_time -= 600  # 1,200 s in total, more than in either start
        manager.save(2, state(2))
        assert not manager.needs_upload(2)


def test_remote_resume_makes_local_snapshot(tmp_path: Path) -> None:
    """The snapshot is on the other machine: the restored state replaces it."""
    record = {"spike_guard": {"snapshot_step": 40, "bad_steps": [], "diverged_steps": 0}}
    troubled = {"spike_guard": {**record["spike_guard"], "bad_steps": ["spike"]}}
    with CheckpointManager(tmp_path, {}, seconds=0.0) as manager:
        here = ensure_local_snapshot(manager, record, 50, state(5))
        assert here["spike_guard"]["snapshot_step"] == 50 and record["spike_guard"]["snapshot_step"] == 40
        manager.finish()
        assert ensure_local_snapshot(manager, here, 60, state(6)) is here, "it has one that is here"
        tensors = state(0)
        restore_snapshot(RollbackStore(manager), 50, tensors, ProcessGroup())
        assert same(tensors, state(5))
        assert ensure_local_snapshot(manager, troubled, 70, state(7))["spike_guard"]["snapshot_step"] is None
