"""The keeper and its tiers: what is taken when, what is kept where, and what is told of it."""

from __future__ import annotations

import json
import random
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.train.checkpoint_states import same, state
from tests.support.train.tiny import Notes, job, make_tokens

from whorl.train.checkpoint import writer
from whorl.train.checkpoint.format import NewerFormatError, load_latest
from whorl.train.checkpoint.manager import CheckpointManager, CheckpointStats
from whorl.train.checkpoint.remote import CheckpointConfig, RemoteStore
from whorl.train.checkpoint.size_report import bytes_per_parameter, format_line
from whorl.train.lm.pretrain import allocate_shared, pretrain


@pytest.mark.parametrize("thread", [False, True])
def test_a_checkpoint_is_of_the_moment_it_was_taken_whatever_happens_after(
    tmp_path: Path, thread: bool
) -> None:
    tensors = {"weights/a": torch.full((1 << 21,), 1.0), "weights/odd": torch.zeros(3)}
    account = CheckpointStats()
    with CheckpointManager(tmp_path, {"of": 1}, seconds=0.0, thread=thread, stats=account) as keeper:
        for step in range(1, 9):
            tensors["weights/a"].fill_(step)
            blocked = keeper.save(step, tensors, {"step": step})
            assert blocked >= 0
            tensors["weights/a"].fill_(-1)
    with CheckpointManager(tmp_path, {"of": 1}) as keeper:
        found = keeper.resume()
    assert found is not None and found.step == 8 == found.metadata["step"]
    assert bool((found.tensors["weights/a"] == 8).all()) and found.tensors.keys() == tensors.keys()
    assert (
        account.written == 8
        and account.last_bytes > 8 << 20
        and account.stall_seconds >= account.max_stall_seconds > 0
    )
    assert keeper.stats.resumes == 1 and keeper.stats.written == 7  # what was known when it was taken


def test_a_second_one_that_comes_too_soon_is_put_off_said_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = writer.write_checkpoint

    def slowly(*words: Any, **more: Any) -> Path:
        time.sleep(0.5)
        return really(*words, **more)

    monkeypatch.setattr(writer, "write_checkpoint", slowly)
    said: list[str] = []
    with CheckpointManager(tmp_path, {}, seconds=0.1, thread=True, log=said.append) as keeper:
        assert keeper.save(1, state()) < 0.4
        time.sleep(0.15)
        assert not keeper.due() and not keeper.due()
        assert keeper.stats.deferred == 1 and ["is late" in text for text in said] == [True]
        assert keeper.save(2, state(2)) > 0.2  # one that must be waits
        assert keeper.stats.written == 1
    assert keeper.stats.written == 2 and load_latest(tmp_path).step == 2  # type: ignore[union-attr]


class Disk:
    """A writer that takes `seconds` for a checkpoint, by the clock of a test."""

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
def test_a_kill_at_any_moment_costs_one_interval_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: float
) -> None:
    """By a clock of its own: intervals of 8 s, steps of 0.1 s, writing that takes up to half an interval."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(
        "whorl.train.checkpoint.manager.time",
        SimpleNamespace(monotonic=lambda: clock.now, time=lambda: clock.now),
    )
    keeper = CheckpointManager(tmp_path, {}, seconds=8.0)
    disk = Disk(clock, write)
    keeper.writer = disk  # type: ignore[assignment]
    taken, lost = [clock.now], list[float]()
    for step in range(1, 1000):
        clock.now += 0.1
        whole = [100.0, *(at for at, end in zip(taken[1:], disk.ends, strict=True) if end <= clock.now)]
        lost.append(clock.now - whole[-1])
        if keeper.due():
            taken.append(clock.now)
            keeper.save(step, state())
    assert 6.0 < max(lost) <= 8.0 + 0.1 + 1e-6
    assert 12 <= keeper.stats.written <= 25 and not keeper.stats.deferred
    keeper.close()


def test_generators_that_belong_to_nobody_go_on(tmp_path: Path) -> None:
    def draw() -> tuple[float, float, float]:
        return float(torch.rand(())), random.random(), float(np.random.rand())

    with CheckpointManager(tmp_path, {}) as keeper:
        keeper.save(1, state())
        first = draw()
    draw()
    with CheckpointManager(tmp_path, {}) as keeper:
        assert keeper.resume() is not None
    assert draw() == first


def durable(url: str, **more: Any) -> CheckpointConfig:
    return CheckpointConfig(remote_url=url, remote_interval=0.0, **more)


def run(
    folder: Path, tiers: CheckpointConfig, steps: range, said: list[str] | None = None, **more: Any
) -> CheckpointManager:
    """Saves a few, letting each upload end."""
    say = said.append if said is not None else lambda _: None
    with CheckpointManager(folder, {"of": 1}, seconds=0.0, config=tiers, log=say, **more) as keeper:
        for step in steps:
            keeper.save(step, state(step))
            keeper.finish()
            deadline = time.monotonic() + 20
            want = step - steps[0] + 1
            while keeper.stats.remote_written + keeper.stats.remote_failed < want:
                assert time.monotonic() < deadline
                keeper._poll_writer(0.05)
    return keeper


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_the_durable_tier_takes_over_when_the_machine_is_gone(tmp_path: Path, scheme: str) -> None:
    url = f"file://{tmp_path}/far" if scheme == "file" else f"memory://{tmp_path.name}"
    tiers = durable(url, remote_keep=2)
    keeper = run(tmp_path / "near", tiers, range(1, 5), thread=scheme == "memory")  # memory is of one process
    assert keeper.stats.remote_written == 4 and not keeper.stats.remote_failed
    far = RemoteStore(url, keeper.job_id)
    whole, begun = far.list_checkpoints()
    assert [f.step for f in whole] == [4, 3] and not begun
    with CheckpointManager(tmp_path / "other machine", {"of": 1}, config=tiers) as other:
        found = other.resume()
        assert found is not None and found.step == 4 and same(found.tensors, state(4))
    # a damaged one is passed over for the one before; one without its index is not there; newer local ones win
    far.fs.pipe_file(f"{far.root}/{whole[0].name}/state.safetensors", b"x")
    far.fs.makedirs(f"{far.root}/step-00000009.1.aa")
    far.fs.pipe_file(f"{far.root}/step-00000009.1.aa/state.safetensors", b"x")
    said: list[str] = []
    with CheckpointManager(tmp_path / "third", {"of": 1}, config=tiers, log=said.append) as third:
        found = third.resume()
    assert found is not None and found.step == 3 and "passed over step-00000004" in said[0]
    with CheckpointManager(tmp_path / "near", {"of": 1}, config=tiers) as near:
        found = near.resume()
        assert found is not None and found.step == 4
    far.prune(tiers)
    assert not far.list_checkpoints()[1]  # begun in 1970 and never finished
    with CheckpointManager(tmp_path / "another job", {"of": 2}, config=tiers) as another:
        assert another.resume() is None  # jobs share a URL without meeting


def test_the_durable_tier_forgets_by_age(tmp_path: Path) -> None:
    far = RemoteStore(f"file://{tmp_path}/far", "job")
    for step, began in ((1, 1000), (2, 2000), (3, int(time.time()) - 7200)):
        folder = tmp_path / "far" / "job" / f"step-0000000{step}.{began}.ab"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text("{}")
    far.prune(CheckpointConfig(remote_url="x", remote_keep=2, remote_keep_hours=1.0))
    assert [f.step for f in far.list_checkpoints()[0]] == [3]  # too old, but the newest


def test_a_durable_tier_that_cannot_be_written_is_reported_and_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / "far").write_text("a file, not a folder")
    said: list[str] = []
    keeper = run(tmp_path / "near", durable(f"file://{tmp_path}/far"), range(1, 4), said)
    account = keeper.stats
    assert account.written == 3 and account.remote_failed == 3 and account.remote_error
    assert sum("cannot be written" in text and "training goes on" in text for text in said) == 1
    assert "0 in the durable tier (3 failed, the last: " in account.summary()
    (tmp_path / "far").unlink()
    said.clear()
    with CheckpointManager(
        tmp_path / "near", {"of": 1}, seconds=0.0, config=keeper.config, log=said.append
    ) as again:
        assert again.resume() is not None and again.stats.remote_failed >= 2
        again.save(4, state(4))
        again.finish()
        again._poll_writer(10.0)
    assert again.stats.remote_written == 1 and not again.stats.remote_error
    assert (
        any("can be written again" in text for text in said)
        and "and succeeded later" in again.stats.summary()
    )


@pytest.mark.parametrize("url", ["nosuch://far", "file:///proc/nowhere"])
def test_a_durable_tier_that_cannot_be_reached_stops_nothing(tmp_path: Path, url: str) -> None:
    tokens = make_tokens(tmp_path / "tokens")
    account, said, notes = CheckpointStats(), list[str](), Notes()
    pretrain(job(tokens), tmp_path / "s", notes, checkpoint_seconds=0.0, checkpoint_config=durable(url), checkpoint_stats=account,
             log=said.append)  # fmt: skip
    assert notes.checkpoints == list(range(1, 13)) and account.written == 12
    assert account.remote_failed and account.remote_error
    assert account.summary() and "failed" in account.summary()


def test_figures_after_a_kill_are_of_all_their_steps(tmp_path: Path) -> None:
    """The first report after going on covers the steps before the kill too, as in an undisturbed run."""
    tokens = make_tokens(tmp_path / "tokens")
    wanted = job(tokens, steps=1500, batch_size=1)  # reported every third step
    whole, parts = Notes(), Notes()
    pretrain(wanted, tmp_path / "a", whole, stop_after=12)
    pretrain(wanted, tmp_path / "b", parts, stop_after=8, checkpoint_seconds=0.0)
    parts.steps = parts.steps[:2]  # steps 3 and 6; a stop reports at once
    shutil.rmtree(tmp_path / "b" / "step-00000008")  # as if killed after step 7
    pretrain(wanted, tmp_path / "b", parts, stop_after=12)
    names = ("loss", "nll", "grad_norm")
    assert [[s[n] for n in names] for s in parts.steps[2:]] == [
        [s[n] for n in names] for s in whole.steps[2:]
    ]


def test_bytes_per_parameter_are_told_and_explained(tmp_path: Path) -> None:
    from whorl.train.lm.pretrain import build_model

    wanted = job(make_tokens(tmp_path / "tokens"), ema=0.9)
    model = build_model(wanted)
    tensors = allocate_shared(model, wanted).tensors()
    count = model.params()["total"]
    parts = {p["part"]: p for p in bytes_per_parameter(tensors, count)}
    assert parts["weights"]["per_parameter"] == pytest.approx(4.0) == parts["averages"]["per_parameter"]
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    assert sum(p["bytes"] for p in parts.values()) == total
    assert parts["state/momentum"]["bytes"] == sum(
        t.numel() * 4 for n, t in tensors.items() if n.endswith("/momentum")
    )
    text = format_line(list(parts.values()))
    assert text.startswith(f"{total / count:.1f} bytes a parameter: ") and "master weights" in text


@pytest.mark.parametrize("damaged", [1, 2])
def test_damaged_ones_do_not_cost_the_whole_ones_that_come_after(tmp_path: Path, damaged: int) -> None:
    """Retention goes by numbers: a damaged checkpoint with a high one must not outlive what is written next."""
    tiers = CheckpointConfig(keep=damaged)
    with CheckpointManager(tmp_path, {}, seconds=0.0, config=CheckpointConfig(keep=3)) as keeper:
        for step in (80, 90, 100):
            keeper.save(step, state(step))
    for path in sorted(tmp_path.glob("step-*"))[-damaged:]:
        (path / "state.safetensors").write_bytes(b"x")
    with CheckpointManager(tmp_path, {}, seconds=0.0, config=tiers) as keeper:
        found = keeper.resume()
        assert found is not None and found.step == 100 - 10 * damaged
        keeper.save(found.step + 5, state(1))
        keeper.finish()
        assert "passed over: step-" in keeper.stats.summary()
    with CheckpointManager(tmp_path, {}) as again:
        last = again.resume()
    assert last is not None and last.step == found.step + 5
    assert len([*tmp_path.glob("damaged-*")]) == 1, "one is kept to be looked at"


def test_a_download_that_fails_does_not_hide_the_ones_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = durable(f"file://{tmp_path}/far")
    run(tmp_path / "near", tiers, range(1, 4))
    really, said = RemoteStore.download, list[str]()

    def fetch(self: RemoteStore, each: Any, folder: Path) -> Path:
        if each.step > 1:
            monkeypatch.setattr(
                self.fs, "get_file", lambda *_: (_ for _ in ()).throw(OSError("the line is dead"))
            )
        else:
            monkeypatch.undo()
        return really(self, each, folder)

    monkeypatch.setattr(RemoteStore, "download", fetch)
    with CheckpointManager(tmp_path / "elsewhere", {"of": 1}, config=tiers, log=said.append) as keeper:
        found = keeper.resume()
    assert found is not None and found.step == 1 and sum("the line is dead" in text for text in said) == 2


def test_one_of_a_newer_format_in_the_durable_tier_is_told_and_neither_trained_over_nor_removed(
    tmp_path: Path,
) -> None:
    """As a local one: to pass over it would train its steps again beside it, and retention would remove it then."""
    tiers = durable(f"file://{tmp_path}/far")
    keeper = run(tmp_path / "near", tiers, range(1, 3))
    far = RemoteStore(f"file://{tmp_path}/far", keeper.job_id)
    newest_one = far.list_checkpoints()[0][0]
    index = {"body": {"format": 99, "step": 2}}
    far.fs.pipe_file(f"{far.root}/{newest_one.name}/state.json", json.dumps(index).encode())
    for _ in range(2):  # the second time a copy of it is on the local disk
        with (
            pytest.raises(NewerFormatError, match="checkpoint format 99") as raised,
            CheckpointManager(tmp_path / "elsewhere", {"of": 1}, config=tiers) as keeper,
        ):
            keeper.resume()
        assert "use the version that wrote it" in str(raised.value)
    assert [f.step for f in far.list_checkpoints()[0]] == [2, 1]


def test_the_last_before_the_end_is_uploaded_even_behind_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = RemoteStore.upload

    def slowly(self: RemoteStore, *words: Any) -> str:
        time.sleep(0.5)
        return really(self, *words)

    monkeypatch.setattr(RemoteStore, "upload", slowly)
    tiers = durable(f"file://{tmp_path}/far")
    with CheckpointManager(tmp_path / "near", {}, seconds=0.0, config=tiers, thread=True) as keeper:
        keeper.save(1, state(1))
        keeper.save(2, state(2), upload=True)
        assert not keeper.needs_upload(2) and keeper.needs_upload(3)
    assert [f.step for f in RemoteStore(f"file://{tmp_path}/far", keeper.job_id).list_checkpoints()[0]][
        :1
    ] == [2]


def test_the_time_of_the_last_upload_outlives_a_kill(tmp_path: Path) -> None:
    tiers = CheckpointConfig(remote_url=f"file://{tmp_path}/far", remote_interval=1000.0)
    with CheckpointManager(tmp_path / "near", {}, seconds=0.0, config=tiers) as keeper:
        keeper.stats.last_remote_time -= 600
        keeper.save(1, state(1))
    with CheckpointManager(tmp_path / "near", {}, seconds=0.0, config=tiers) as keeper:
        keeper.resume()
        keeper.stats.last_remote_time -= 600  # 1,200 s in all: neither start alone would have come that far
        keeper.save(2, state(2))
        assert not keeper.needs_upload(2)


def test_a_run_from_far_away_may_still_go_back(tmp_path: Path) -> None:
    """Its anchor stayed on the other machine: the state that was restored takes its place."""
    from whorl.train.resilience.rollback import RollbackStore, ensure_local_snapshot

    with CheckpointManager(tmp_path, {}, seconds=0.0) as keeper:
        record = {"spike_guard": {"snapshot_step": 40, "bad_steps": [], "diverged_steps": 0}}
        here = ensure_local_snapshot(keeper, record, 50, state(5))
        assert here["spike_guard"]["snapshot_step"] == 50 and record["spike_guard"]["snapshot_step"] == 40
        keeper.finish()
        assert ensure_local_snapshot(keeper, here, 60, state(6)) is here, "it has one that is here"
        tensors = state(0)
        RollbackStore(keeper).restore(50, tensors)
        assert same(tensors, state(5))
        troubled = {"spike_guard": {"snapshot_step": 40, "bad_steps": ["spike"], "diverged_steps": 0}}
        assert ensure_local_snapshot(keeper, troubled, 70, state(7))["spike_guard"]["snapshot_step"] is None
