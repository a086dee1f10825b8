"""Heartbeat, stall detection, and advice after out of memory."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.children import children
from tests.support.train.pretraining import train
from tests.support.train.tiny import Notes, job

from whorl.machine import process
from whorl.parallel import process_group
from whorl.parallel.process_group import ProcessGroup, ReplicaError, spawn_replicas
from whorl.train.lm.objective import LMObjective
from whorl.train.resilience.heartbeat import Heartbeat, register_stack_dump, stacks_file
from whorl.train.resilience.oom_advice import OutOfMemoryError, is_out_of_memory, suggest


def wait_for(what: Any, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not what() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert what()


def _stuck_here(world: ProcessGroup, folder: Path) -> None:
    kept = register_stack_dump(folder, world.rank)
    world.all_gather_scalars()
    world.all_gather_scalars()
    assert kept is not None


def _sleeps(world: ProcessGroup, folder: Path) -> None:
    (folder / "sleeps").touch()
    time.sleep(60)


def test_stall_dumps_stacks_of_all_replicas(tmp_path: Path) -> None:
    messages: list[str] = []
    with closing(spawn_replicas(2, _stuck_here, tmp_path)) as world:
        world.all_gather_scalars()
        more = {"replicas": world.children, "phase": lambda: "backward", "log": messages.append}
        with Heartbeat(tmp_path, 9, stall_seconds=0.2, **more) as pulse:
            pulse.beat(1)
            pulse.beat(2)
            wait_for(lambda: messages)
            assert re.search("no progress for.* after step 2.* in phase backward", messages[0])
            theirs = stacks_file(tmp_path, 1, world.children[0].pid)
            wait_for(lambda: "_stuck_here" in theirs.read_text())
            assert "in all_gather_scalars" in theirs.read_text()
            mine = stacks_file(tmp_path, 0, os.getpid()).read_text()
            assert "test_stall_dumps" in mine and "_watch" in mine, "all threads"
            wait_for(lambda: json.loads((tmp_path / "heartbeat.json").read_text())["state"] == "stalled")
            assert pulse.beat(3) == messages[:1] and not pulse.beat(3), "reported once"
            wait_for(lambda: len(messages) == 2)
            assert "training resumed: step 3" in messages[1]
        world.all_gather_scalars()


def test_stall_limit_follows_usual_step(tmp_path: Path) -> None:
    pulse = Heartbeat(tmp_path, 9, stall_seconds=120.0, first_step_seconds=600.0)
    assert pulse.stall_limit() == 600.0
    pulse.step_seconds.extend([0.1] * 5)
    assert pulse.stall_limit() == 120.0
    pulse.step_seconds.extend([60.0] * 20)
    assert pulse.stall_limit() == 1200.0


def test_heartbeat_written_and_crash_reported(tokens: Path, tmp_path: Path) -> None:
    messages: list[str] = []
    train(job(tokens), tmp_path / "a", heartbeat_dir=tmp_path / "watch", log=messages.append)
    file = tmp_path / "watch" / "heartbeat.json"
    beat = json.loads(file.read_text())
    assert beat["state"] == "ended" and beat["step"] == beat["steps"] == 12 and beat["memory_bytes"] > 1e7
    assert not messages and not list((tmp_path / "watch").glob("stacks-*")), "nothing to look at"
    beat |= {"state": "training", "pid": 2**22 + 1, "step": 7}
    file.write_text(json.dumps(beat))
    train(job(tokens), tmp_path / "b", heartbeat_dir=tmp_path / "watch", log=messages.append)
    (line,) = [line for line in messages if "ended without a final heartbeat after step 7" in line]
    assert "out of memory" in line


OUT_OF_MEMORY = [
    MemoryError(),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("unable to mmap 4096 bytes from file </torch_1>: Cannot allocate memory (12)"),
    ReplicaError("training replica 1 failed:\nTraceback ...\nMemoryError"),
]  # fmt: skip


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda e: type(e).__name__)
def test_oom_errors_are_recognized(tokens: Path, error: BaseException) -> None:
    assert is_out_of_memory(error)
    words = str(suggest(error, job(tokens, replicas=2)))
    assert "pretrain.train.micro_batch_size=2 (now 4" in words and "plan.data.batch_size=4 (now 8" in words
    assert "plan.data.seq_len=16 (now 32" in words and "plan.replicas=1" in words


def test_advice_for_a_killed_replica_begins_with_the_same_command(tokens: Path) -> None:
    killed = ReplicaError("training replica 1 died")
    killed.killed = True
    assert "do: one of: run the same command again, which continues from the last checkpoint; --set" in str(
        suggest(killed, job(tokens, replicas=2))
    )


def test_other_errors_get_no_oom_advice(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_out_of_memory(ValueError("out of memory")) and not is_out_of_memory(RuntimeError("a shape"))

    def broken(*_: object) -> None:
        raise RuntimeError("a shape")

    monkeypatch.setattr(LMObjective, "__call__", broken)
    with pytest.raises(RuntimeError, match="a shape"):
        train(job(tokens), tmp_path)


def test_torch_allocator_error_gets_oom_advice(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def greedy(*_: object) -> None:
        torch.empty(1 << 60)

    monkeypatch.setattr(LMObjective, "__call__", greedy)
    with pytest.raises(OutOfMemoryError, match=r"pretrain\.train\.micro_batch_size=4 \(now 8"):
        train(job(tokens), tmp_path)
    with pytest.raises(OutOfMemoryError) as raised:
        train(job(tokens, batch_size=1), tmp_path / "one")
    words = str(raised.value)
    assert "micro_batch_size" not in words and "plan.data.seq_len=16" in words, "what is left to change"


KILLS = [
    (signal.SIGKILL, OutOfMemoryError, r"killed by SIGKILL(.|\n)*plan\.data\.batch_size=4"),
    (signal.SIGABRT, ReplicaError, "killed by SIGABRT"),
]


@pytest.mark.parametrize(("number", "error", "message"), KILLS)
def test_replica_killed_raises_with_oom_advice_for_sigkill(
    number: int, error: type[Exception], message: str, tokens: Path, tmp_path: Path
) -> None:
    class Killer(Notes):
        def on_step(self, step: int, metrics: dict[str, float]) -> None:
            if step == 3:
                (child,) = children("replica")
                child.send_signal(number)

    with pytest.raises(error, match=message):
        train(job(tokens, replicas=2, steps=400), tmp_path, Killer())


def test_stopped_replica_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "STOPPED_SECONDS", 0.05)
    monkeypatch.setattr(process_group, "REPLICA_TIMEOUT", 0.3)
    messages: list[str] = []
    monkeypatch.setattr(process_group, "SHUTDOWN_TIMEOUT", 0.1)
    with closing(spawn_replicas(2, _sleeps, tmp_path)) as world:
        wait_for((tmp_path / "sleeps").exists)
        (child,) = world.children
        os.kill(child.pid, signal.SIGSTOP)
        with Heartbeat(tmp_path, 9, stall_seconds=0.1, replicas=[child], log=messages.append) as pulse:
            pulse.beat(1)
            pulse.beat(2)
            with (
                pytest.warns(RuntimeWarning, match=r"replica 1 \(process \d+\) is stopped by a signal"),
                pytest.raises(ReplicaError, match=r"replica 1 did not respond.*a signal has stopped it"),
            ):
                world.all_gather_scalars()
            wait_for(lambda: messages)
            assert messages[0].endswith("; stopped replicas: 1")
