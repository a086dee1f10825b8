"""Restarts of killed producers: no record is lost, repeated or partial, and restarts are limited."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.slots.dying_producers import CannotBegin, Dies, DiesReading, Leaves
from tests.support.slots.examples import Draws, Fails, expected_records, open_reader, read, record_read
from tests.support.slots.processes import has_exited, wait_until

from whorl.errors import ProducerError
from whorl.slots import Board, SlotState


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("when", ["begun", "whole", "forked", "unpickled"])
def test_restart_after_death_at_any_point(when: str, slots: int, tmp_path: Path) -> None:
    dies, messages = Dies(folder=tmp_path, when=when), list[str]()
    with open_reader(dies, slots=slots, restarts=1, timeout=60, log=messages.append) as reader:
        assert read(reader, 6) == expected_records(6)
        assert reader.pop_stats().metrics()["worker_restarts"] == 1 and reader.pop_stats().restarts == 0
    (message,) = messages
    assert "was killed by SIGKILL" in message and "restarted (" in message
    assert "SIGKILL in slot" in message or when != "begun"
    if when == "forked":
        wait_until(lambda: has_exited(int((tmp_path / "child").read_text())))


def test_restart_after_kill_during_board_read(tmp_path: Path) -> None:
    """A dead reader does not block the board; the next process uses the newest weights."""
    board = Board.from_tensors({"a": torch.full((9,), 1.0), "b": torch.zeros(9)})
    with open_reader(DiesReading(tmp_path), board=board, restarts=1) as reader:
        wait_until((tmp_path / "reading").exists)
        board.publish({"a": torch.full((9,), 2.0), "b": torch.zeros(9)}, 1)
        slot = next(reader)
        assert slot.policy_version == 1 and (slot.data.values == 2).all()
        assert reader.pop_stats().restarts == 1


def test_restart_keeps_reported_records() -> None:
    with open_reader(Draws(), slots=3, restarts=1) as reader:
        wait_until(lambda: all(slot.state == SlotState.READY for slot in reader.ring.slots))
        time.sleep(0.05)  # its last message may be in transit
        idle = reader.ring.slots[0].idle
        os.kill(reader.producers[0].pid, signal.SIGKILL)
        assert record_read(slot := next(reader)) == expected_records(1)[0] and slot.idle == idle
        assert read(reader, 6) == expected_records(7)[1:]
        assert reader.pop_stats().restarts == 1


def test_restart_limit_raises(tmp_path: Path) -> None:
    messages, got, dies = list[str](), list[Any](), Dies(folder=tmp_path, when="always")
    words = "SIGKILL in slot 0, record 2, after 2 restarts without a record"
    reader = open_reader(dies, restarts=2, log=messages.append)
    with pytest.raises(ProducerError, match=words), reader:
        for slot in reader:
            got.append(record_read(slot))
    assert got == expected_records(2) and len(messages) == 2


def test_restart_count_resets_after_a_record(tmp_path: Path) -> None:
    with open_reader(Dies(folder=tmp_path, records=(0, 1, 2)), restarts=1) as reader:
        assert read(reader, 4) == expected_records(4)
        assert reader.pop_stats().restarts == 3


EXITS = [(Fails(), "cannot be made"), (CannotBegin(), "it cannot begin"), (Leaves(), "exit code 3 in slot 0")]


@pytest.mark.parametrize(("producer", "words"), EXITS)
def test_producer_that_exits_is_not_restarted(producer: Draws, words: str) -> None:
    messages = list[str]()
    reader = open_reader(producer, slots=2, restarts=3, log=messages.append)
    with pytest.raises(ProducerError, match=words), reader:
        read(reader, 5)
    assert not messages


@pytest.mark.parametrize("ends", ["hung", "closed"])
def test_ended_producer_takes_forked_children_along(ends: str, tmp_path: Path) -> None:
    dies, place = Dies(folder=tmp_path, records=(1,), when="never"), tmp_path / "child"
    with open_reader(dies, restarts=3, timeout=60) as reader:
        read(reader, 1)
        reader._recycle(reader._reading, 1)  # type: ignore[arg-type]  # asked for the next, and not waited for
        wait_until(lambda: place.exists() and place.read_text())
        if ends == "hung":
            reader.producers[0].timeout = 0.1
            with pytest.raises(ProducerError, match="wrote no record for"):
                reader.producers[0].receive()
    wait_until(lambda: has_exited(int(place.read_text())))


def test_restart_without_process_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any, **options: Any) -> None:
        raise BlockingIOError("no process is left")

    with open_reader(Draws(), restarts=3) as reader:
        read(reader, 1)
        monkeypatch.setattr("whorl.slots.producers.Child", full)
        os.kill(reader.producers[0].pid, signal.SIGKILL)
        with pytest.raises(ProducerError, match=r"SIGKILL.*, and cannot be restarted: no process is left"):
            read(reader, 2)


@pytest.mark.parametrize("order", ["sequence", "ready"])
@pytest.mark.parametrize("seed", range(2))
def test_kills_at_random_moments_lose_no_record(order: str, seed: int) -> None:
    """Two producers on five slots, killed at random moments."""
    draw, strikes = random.Random(seed), 6
    reader = open_reader(Draws(0.02), Draws(0.02), slots=5, restarts=strikes, reader={"order": order})

    def strike() -> None:
        for _ in range(strikes):
            time.sleep(draw.uniform(0.0, 0.8))
            with suppress(ProcessLookupError):
                os.kill(draw.choice(reader.producers).pid, signal.SIGKILL)

    thread, got = threading.Thread(target=strike), list[tuple[int, Any]]()
    with reader:
        thread.start()
        calm = 0
        while calm < 20:
            slot = next(reader)
            got.append((slot.index, record_read(slot)))
            calm += not thread.is_alive()
        assert 1 <= reader.pop_stats().restarts <= strikes
    expected = expected_records(max(one[0] for _, one in got) + 1, producers=2)
    assert all(one == expected[one[0]] for _, one in got)
    # Each slot got its records once and in order: three slots belong to one producer, two to the other.
    for index in range(5):
        own = [one[0] for i, one in got if i == index]
        assert own == [index + k * 2 * (2 if index % 2 else 3) for k in range(len(own))]
    assert order == "ready" or [one[0] for _, one in got] == list(range(len(got)))
