"""Restarts of killed producers: no record is lost, repeated or partial, and restarts are limited."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from tests.support.slots.dying_producers import CannotBegin, Dies, DiesReading, Leaves
from tests.support.slots.examples import SPEC, Draws, Fails, Numbers

from whorl.errors import ProducerError
from whorl.slots import Board, FIFOReader, ProducerProcess, ReplayReader, SerialProducer, SlotRing, SlotState

RecordRead = tuple[int, int, bytes]


def record_read(slot: Any) -> RecordRead:
    assert int(slot.data.label) == slot.sequence
    return slot.sequence, slot.length, slot.data.values.tobytes()


def read(reader: FIFOReader[Numbers], n: int) -> list[RecordRead]:
    return [record_read(next(reader)) for _ in range(n)]


def expected_records(n: int, producers: int = 1) -> list[RecordRead]:
    ring = SlotRing(SPEC, producers)
    with FIFOReader(
        ring, [SerialProducer(ring, Draws(), seed=7, number=i) for i in range(producers)]
    ) as reader:
        return read(reader, n)


def wait_until(true: Any) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def has_exited(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("slots", [1, 3])
def test_restart_after_kill_during_fill(slots: int) -> None:
    """Killed from outside during a fill; with one slot the reader waits for that record."""
    ring, messages = SlotRing(SPEC, slots, poison=True), list[str]()
    producer = ProducerProcess(ring, Draws(0.05), seed=7, restarts=1, log=messages.append)
    with FIFOReader(ring, [producer]) as reader:
        got = read(reader, 3)
        thread = threading.Thread(target=kill_at_work, args=(producer, ring))
        thread.start()
        got += read(reader, 5)
        thread.join()
        got += read(reader, 2)
        assert reader.pop_stats().metrics()["worker_restarts"] == 1 and reader.pop_stats().restarts == 0
    assert got == expected_records(10)
    assert (
        len(messages) == 1
        and "was killed by signal SIGKILL in slot" in messages[0]
        and "restarted (" in messages[0]
    )


def kill_at_work(producer: ProducerProcess, ring: SlotRing[Numbers]) -> None:
    wait_until(lambda: any(slot.state == SlotState.WRITING for slot in ring.slots))
    os.kill(producer.pid, signal.SIGKILL)


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("when", ["begun", "whole", "forked", "unpickled"])
def test_restart_after_death_at_any_point(when: str, slots: int, tmp_path: Path) -> None:
    ring = SlotRing(SPEC, slots, poison=True)
    producer = ProducerProcess(ring, Dies(folder=tmp_path, when=when), seed=7, restarts=1, timeout=60)
    with FIFOReader(ring, [producer]) as reader:
        assert read(reader, 6) == expected_records(6)
        assert reader.pop_stats().restarts == 1
    if when == "forked":
        wait_until(lambda: has_exited(int((tmp_path / "child").read_text())))


def test_restart_after_kill_during_board_read(tmp_path: Path) -> None:
    """A dead reader does not block the board; the next process uses the newest weights."""
    ring = SlotRing(SPEC, 1)
    board = Board.from_tensors({"a": torch.full((9,), 1.0), "b": torch.zeros(9)})
    with FIFOReader(ring, [ProducerProcess(ring, DiesReading(tmp_path), board=board, restarts=1)]) as reader:
        wait_until((tmp_path / "reading").exists)
        board.publish({"a": torch.full((9,), 2.0), "b": torch.zeros(9)}, 1)
        slot = next(reader)
        assert slot.policy_version == 1 and (slot.data.values == 2).all()
        assert reader.pop_stats().restarts == 1


def test_restart_keeps_reported_records() -> None:
    ring = SlotRing(SPEC, 3)
    producer = ProducerProcess(ring, Draws(), seed=7, restarts=1)
    with FIFOReader(ring, [producer]) as reader:
        wait_until(lambda: all(slot.state == SlotState.READY for slot in ring.slots))
        time.sleep(0.05)  # its last message may be in transit
        idle = ring.slots[0].idle
        os.kill(producer.pid, signal.SIGKILL)
        assert record_read(slot := next(reader)) == expected_records(1)[0] and slot.idle == idle
        assert read(reader, 6) == expected_records(7)[1:]
        assert reader.pop_stats().restarts == 1


def test_restart_limit_raises(tmp_path: Path) -> None:
    ring, messages, got = SlotRing(SPEC, 1), list[str](), list[RecordRead]()
    dies = Dies(folder=tmp_path, when="always")
    with (
        pytest.raises(ProducerError, match=r"SIGKILL in slot 0, record 2, after 2 restarts without a record"),
        FIFOReader(ring, [ProducerProcess(ring, dies, seed=7, restarts=2, log=messages.append)]) as reader,
    ):
        for slot in reader:
            got.append(record_read(slot))
    assert got == expected_records(2) and len(messages) == 2


def test_restart_count_resets_after_a_record(tmp_path: Path) -> None:
    ring = SlotRing(SPEC, 1)
    dies = Dies(folder=tmp_path, records=(0, 1, 2))
    with FIFOReader(ring, [ProducerProcess(ring, dies, seed=7, restarts=1)]) as reader:
        assert read(reader, 4) == expected_records(4)
        assert reader.pop_stats().restarts == 3


@pytest.mark.parametrize(
    ("producer", "words"),
    [
        (Fails(), "record two cannot be made"),
        (CannotBegin(), "it cannot begin"),
        (Leaves(), "exit code 3 in slot 0, record 0"),
    ],
)
def test_producer_that_exits_is_not_restarted(producer: Draws, words: str) -> None:
    ring, messages = SlotRing(SPEC, 2), list[str]()
    with (
        pytest.raises(ProducerError, match=words),
        FIFOReader(ring, [ProducerProcess(ring, producer, restarts=3, log=messages.append)]) as reader,
    ):
        read(reader, 5)
    assert not messages


@pytest.mark.parametrize("ends", ["hung", "closed"])
def test_ended_producer_takes_forked_children_along(ends: str, tmp_path: Path) -> None:
    ring = SlotRing(SPEC, 1)
    dies, place = Dies(folder=tmp_path, records=(1,), when="never"), tmp_path / "child"
    with FIFOReader(ring, [ProducerProcess(ring, dies, restarts=3, timeout=60)]) as reader:
        read(reader, 1)
        reader._recycle(reader._reading, 1)  # type: ignore[arg-type]  # asked for the next, and not waited for
        wait_until(lambda: place.exists() and place.read_text())
        if ends == "hung":
            reader.producers[0].timeout = 0.1
            with pytest.raises(ProducerError, match="wrote no record for"):
                reader.producers[0].receive()
    wait_until(lambda: has_exited(int(place.read_text())))


def test_restart_without_process_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = SlotRing(SPEC, 1)
    producer = ProducerProcess(ring, Draws(), restarts=3)

    def full(*given: Any, **options: Any) -> None:
        raise BlockingIOError("no process is left")

    with FIFOReader(ring, [producer]) as reader:
        read(reader, 1)
        monkeypatch.setattr(subprocess, "Popen", full)
        os.kill(producer.pid, signal.SIGKILL)
        with pytest.raises(ProducerError, match=r"SIGKILL.*, and cannot be restarted: no process is left"):
            read(reader, 2)


def test_replay_continues_after_restart(tmp_path: Path) -> None:
    ring = SlotRing(SPEC, 5)
    producers = [ProducerProcess(ring, Dies(folder=tmp_path), seed=7, number=i, restarts=1) for i in range(2)]
    with ReplayReader(ring, producers, 3, np.random.default_rng(0), learning_starts=2) as reader:
        expected = expected_records(8, producers=2)
        assert all(
            record_read(slot) == expected[slot.sequence] for _ in range(6) for slot in next(reader).slots
        )
    assert (tmp_path / "2").exists()


@pytest.mark.parametrize("order", ["sequence", "ready"])
@pytest.mark.parametrize("seed", range(2))
def test_kills_at_random_moments_lose_no_record(order: Any, seed: int) -> None:
    """Two producers on five slots, killed at random moments."""
    ring, strikes = SlotRing(SPEC, 5, poison=True), 6
    producers = [ProducerProcess(ring, Draws(0.02), seed=7, number=i, restarts=strikes) for i in range(2)]
    draw = random.Random(seed)

    def strike() -> None:
        for _ in range(strikes):
            time.sleep(draw.uniform(0.0, 0.8))
            with suppress(ProcessLookupError):
                os.kill(draw.choice(producers).pid, signal.SIGKILL)

    thread, got = threading.Thread(target=strike), list[tuple[int, RecordRead]]()
    with FIFOReader(ring, producers, order=order) as reader:
        thread.start()
        calm = 0
        while calm < 20:
            slot = next(reader)
            got.append((slot.index, record_read(slot)))
            calm += not thread.is_alive()
        assert 1 <= reader.pop_stats().restarts <= strikes
    expected = expected_records(max(one[0] for _, one in got) + 1, producers=2)
    assert all(one == expected[one[0]] for _, one in got)
    for index in range(
        5
    ):  # each slot got its records once and in order: three slots belong to one producer, two to the other
        mine = [one[0] for i, one in got if i == index]
        assert mine == [index + k * 2 * (2 if index % 2 else 3) for k in range(len(mine))]
    assert order == "ready" or [one[0] for _, one in got] == list(range(len(got)))
