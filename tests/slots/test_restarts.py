"""A producer that is killed is started again: nothing lost, nothing twice, nothing half; and not for ever."""

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
from tests.support.slots.examples import Draws, Fails, Numbers

from whorl.errors import ProducerError
from whorl.slots import (
    Board,
    FIFOReader,
    ProducerProcess,
    ReplayReader,
    SerialProducer,
    SlotRing,
    SlotState,
    Spec,
)

SPEC = Spec.from_dataclass(Numbers, N=5)
Told = tuple[int, int, bytes]


def told(slot: Any) -> Told:
    assert int(slot.data.label) == slot.sequence
    return slot.sequence, slot.length, slot.data.values.tobytes()


def read(drain: FIFOReader[Numbers], n: int) -> list[Told]:
    return [told(next(drain)) for _ in range(n)]


def undisturbed(n: int, producers: int = 1) -> list[Told]:
    ring = SlotRing(SPEC, producers)
    with FIFOReader(
        ring, [SerialProducer(ring, Draws(), seed=7, number=i) for i in range(producers)]
    ) as drain:
        return read(drain, n)


def until(true: Any) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("slots", [1, 3])
def test_one_killed_while_it_fills_is_started_again(slots: int) -> None:
    """From outside, in the middle of a record; with one slot the reader waits for that very record."""
    ring, said = SlotRing(SPEC, slots, poison=True), list[str]()
    producer = ProducerProcess(ring, Draws(0.05), seed=7, restarts=1, log=said.append)
    with FIFOReader(ring, [producer]) as drain:
        got = read(drain, 3)
        thread = threading.Thread(target=kill_at_work, args=(producer, ring))
        thread.start()
        got += read(drain, 5)
        thread.join()
        got += read(drain, 2)
        assert drain.pop_stats().metrics()["worker_restarts"] == 1 and drain.pop_stats().restarts == 0
    assert got == undisturbed(10)
    assert len(said) == 1 and "was killed by signal SIGKILL in slot" in said[0] and "started again" in said[0]


def kill_at_work(producer: ProducerProcess, ring: SlotRing[Numbers]) -> None:
    until(lambda: any(slot.state == SlotState.WRITING for slot in ring.slots))
    os.kill(producer.pid, signal.SIGKILL)


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("when", ["begun", "whole", "forked", "unpickled"])
def test_whatever_it_held_when_it_died(when: str, slots: int, tmp_path: Path) -> None:
    ring = SlotRing(SPEC, slots, poison=True)
    producer = ProducerProcess(ring, Dies(folder=tmp_path, when=when), seed=7, restarts=1, timeout=60)
    with FIFOReader(ring, [producer]) as drain:
        assert read(drain, 6) == undisturbed(6)
        assert drain.pop_stats().restarts == 1
    if when == "forked":
        until(lambda: gone(int((tmp_path / "child").read_text())))


def test_one_killed_while_it_reads_the_board(tmp_path: Path) -> None:
    """A reader holds nothing of the board's; the next one acts with the newest weights."""
    ring = SlotRing(SPEC, 1)
    board = Board.from_tensors({"a": torch.full((9,), 1.0), "b": torch.zeros(9)})
    with FIFOReader(ring, [ProducerProcess(ring, DiesReading(tmp_path), board=board, restarts=1)]) as drain:
        until((tmp_path / "reading").exists)
        board.publish({"a": torch.full((9,), 2.0), "b": torch.zeros(9)}, 1)
        slot = next(drain)
        assert slot.policy_version == 1 and (slot.data.values == 2).all()
        assert drain.pop_stats().restarts == 1


def test_what_it_told_before_it_died_is_not_made_again() -> None:
    ring = SlotRing(SPEC, 3)
    producer = ProducerProcess(ring, Draws(), seed=7, restarts=1)
    with FIFOReader(ring, [producer]) as drain:
        until(lambda: all(slot.state == SlotState.READY for slot in ring.slots))
        time.sleep(0.05)  # the last word may be on its way
        idle = ring.slots[0].idle
        os.kill(producer.pid, signal.SIGKILL)
        assert told(slot := next(drain)) == undisturbed(1)[0] and slot.idle == idle
        assert read(drain, 6) == undisturbed(7)[1:]
        assert drain.pop_stats().restarts == 1


def test_too_many_deaths_end_the_run(tmp_path: Path) -> None:
    ring, said, got = SlotRing(SPEC, 1), list[str](), list[Told]()
    dies = Dies(folder=tmp_path, when="always")
    with (
        pytest.raises(ProducerError, match=r"SIGKILL in slot 0, record 2, after 2 restarts that brought no"),
        FIFOReader(ring, [ProducerProcess(ring, dies, seed=7, restarts=2, log=said.append)]) as drain,
    ):
        for slot in drain:
            got.append(told(slot))
    assert got == undisturbed(2) and len(said) == 2


def test_deaths_with_a_record_in_between_do_not_add_up(tmp_path: Path) -> None:
    ring = SlotRing(SPEC, 1)
    dies = Dies(folder=tmp_path, records=(0, 1, 2))
    with FIFOReader(ring, [ProducerProcess(ring, dies, seed=7, restarts=1)]) as drain:
        assert read(drain, 4) == undisturbed(4)
        assert drain.pop_stats().restarts == 3


@pytest.mark.parametrize(
    ("producer", "words"),
    [
        (Fails(), "record two cannot be made"),
        (CannotBegin(), "it cannot begin"),
        (Leaves(), "exit code 3 in slot 0, record 0"),
    ],
)
def test_one_that_ends_by_itself_is_not_started_again(producer: Draws, words: str) -> None:
    ring, said = SlotRing(SPEC, 2), list[str]()
    with (
        pytest.raises(ProducerError, match=words),
        FIFOReader(ring, [ProducerProcess(ring, producer, restarts=3, log=said.append)]) as drain,
    ):
        read(drain, 5)
    assert not said


@pytest.mark.parametrize("ends", ["hung", "closed"])
def test_one_that_is_ended_takes_with_it_what_it_forked(ends: str, tmp_path: Path) -> None:
    ring = SlotRing(SPEC, 1)
    dies, place = Dies(folder=tmp_path, records=(1,), when="never"), tmp_path / "child"
    with FIFOReader(ring, [ProducerProcess(ring, dies, restarts=3, timeout=60)]) as drain:
        read(drain, 1)
        drain._recycle(drain._reading, 1)  # type: ignore[arg-type]  # asked for the next, and not waited for
        until(lambda: place.exists() and place.read_text())
        if ends == "hung":
            drain.producers[0].timeout = 0.1
            with pytest.raises(ProducerError, match="wrote nothing for"):
                drain.producers[0].receive()
    until(lambda: gone(int(place.read_text())))


def test_where_no_process_can_be_started_the_death_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = SlotRing(SPEC, 1)
    producer = ProducerProcess(ring, Draws(), restarts=3)

    def full(*given: Any, **options: Any) -> None:
        raise BlockingIOError("no process is left")

    with FIFOReader(ring, [producer]) as drain:
        read(drain, 1)
        monkeypatch.setattr(subprocess, "Popen", full)
        os.kill(producer.pid, signal.SIGKILL)
        with pytest.raises(
            ProducerError, match=r"SIGKILL.*, and cannot be started again: no process is left"
        ):
            read(drain, 2)


def test_a_pool_goes_on_too(tmp_path: Path) -> None:
    ring = SlotRing(SPEC, 5)
    producers = [ProducerProcess(ring, Dies(folder=tmp_path), seed=7, number=i, restarts=1) for i in range(2)]
    with ReplayReader(ring, producers, 3, np.random.default_rng(0), learning_starts=2) as reader:
        expected = undisturbed(8, producers=2)
        assert all(told(slot) == expected[slot.sequence] for _ in range(6) for slot in next(reader).slots)
    assert (tmp_path / "2").exists()


@pytest.mark.parametrize("order", ["sequence", "ready"])
@pytest.mark.parametrize("seed", range(2))
def test_kills_at_any_moment_lose_nothing(order: Any, seed: int) -> None:
    """Two producers on five slots, and somebody who kills one or the other at moments that nobody chose."""
    ring, strikes = SlotRing(SPEC, 5, poison=True), 6
    producers = [ProducerProcess(ring, Draws(0.02), seed=7, number=i, restarts=strikes) for i in range(2)]
    draw = random.Random(seed)

    def strike() -> None:
        for _ in range(strikes):
            time.sleep(draw.uniform(0.0, 0.8))
            with suppress(ProcessLookupError):
                os.kill(draw.choice(producers).pid, signal.SIGKILL)

    thread, got = threading.Thread(target=strike), list[tuple[int, Told]]()
    with FIFOReader(ring, producers, order=order) as drain:
        thread.start()
        calm = 0
        while calm < 20:
            slot = next(drain)
            got.append((slot.index, told(slot)))
            calm += not thread.is_alive()
        assert 1 <= drain.pop_stats().restarts <= strikes
    expected = undisturbed(max(one[0] for _, one in got) + 1, producers=2)
    assert all(one == expected[one[0]] for _, one in got)
    for index in range(
        5
    ):  # of each slot every record came once, in order: three are the one's, two the other's
        mine = [one[0] for i, one in got if i == index]
        assert mine == [index + k * 2 * (2 if index % 2 else 3) for k in range(len(mine))]
    assert order == "ready" or [one[0] for _, one in got] == list(range(len(got)))
