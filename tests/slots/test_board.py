"""The board: whole updates with versions, staleness limits, timing."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
from tests.support.slots.examples import SPEC, Acts, Draws

from whorl.errors import ConfigError, ProducerError
from whorl.slots import Board, BoardReader, FIFOReader, ProducerProcess, SerialProducer, SlotRing
from whorl.slots import board as board_module


def filled(value: float) -> torch.nn.Linear:
    net = torch.nn.Linear(300, 300)
    for p in net.parameters():
        p.data.fill_(value)
    return net


def test_board_reads_published_weights_and_version() -> None:
    board = Board.from_tensors(dict(filled(0.0).named_parameters()))
    other = Board(board.layout, fd=os.dup(board.fd))  # as another process attaches
    net, weights = filled(9.0), BoardReader(other)
    assert weights.load_into(net) == 0 and float(net.bias.detach()[0]) == 0.0
    board.publish(dict(filled(3.0).named_parameters()), 7)
    assert other.version == 7 and weights.load_into(net) == 7
    assert all((p == 3.0).all() for p in net.parameters())


def test_board_reader_never_sees_partial_update() -> None:
    board = Board.from_tensors({"w": torch.zeros(200_000)})
    stop, torn, reads = threading.Event(), [], 0

    def write() -> None:
        value = 0
        while not stop.is_set():
            value += 1
            board.publish({"w": torch.full((200_000,), float(value))}, value)

    writer = threading.Thread(target=write)
    writer.start()
    into, deadline = {"w": torch.zeros(200_000)}, time.monotonic() + 1.5
    try:
        while time.monotonic() < deadline:
            version = board.read(into)
            reads += 1
            if not (into["w"] == float(version)).all():
                torn.append(version)
    finally:
        stop.set()
        writer.join()
    assert not torn and reads > 10


def test_board_writer_death_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board.from_tensors({"w": torch.zeros(3)})
    board._header[0] += 1
    monkeypatch.setattr(board_module, "_READ_TIMEOUT", 0.1)
    with pytest.raises(ProducerError, match="publishing for"):
        board.read({"w": torch.zeros(3)})


def test_board_serial_producer_uses_newest_weights() -> None:
    ring, board = SlotRing(SPEC, 1), Board.from_tensors(dict(filled(0.0).named_parameters()))
    with FIFOReader(ring, [SerialProducer(ring, Acts(), board=board)], board=board) as reader:
        for version in range(5):
            slot = next(reader)
            assert slot.policy_version == version and slot.data.values[0] == version
            board.publish(dict(filled(version + 1.0).named_parameters()), version + 1)
        figures = reader.pop_stats()
        assert figures.records == 5 and figures.lag_max == 0


@pytest.mark.parametrize("order", ["sequence", "ready"])
def test_board_processes_see_whole_updates_and_lag(order: str) -> None:
    ring, board = SlotRing(SPEC, 4), Board.from_tensors(dict(filled(0.0).named_parameters()))
    producers = [ProducerProcess(ring, Acts(), number=i, board=board) for i in range(2)]
    with FIFOReader(ring, producers, board=board, order=order) as reader:  # type: ignore[arg-type]
        for version in range(60):
            slot = next(reader)
            assert slot.data.label == 1 and slot.data.values[0] == slot.policy_version <= version
            board.publish(dict(filled(version + 1.0).named_parameters()), version + 1)
        figures = reader.pop_stats()
    assert (
        figures.records == 60
        and 0 < figures.metrics()["policy_lag/mean"] <= figures.metrics()["policy_lag/max"] < 30
    )
    assert figures.busy > 0 and figures.wait > 0 and figures.idle >= 0


def test_fifo_max_lag_remakes_stale_records() -> None:
    ring, board = SlotRing(SPEC, 4), Board.from_tensors(dict(filled(0.0).named_parameters()))
    with FIFOReader(ring, [ProducerProcess(ring, Acts(), board=board)], board=board, max_lag=1) as reader:
        stale = 0
        for version in range(40):
            slot = next(reader)
            assert board.version - slot.policy_version <= 1
            time.sleep(0.005)  # all four slots are ready now; three become stale
            if version % 10 == 9:
                stale += reader.pop_stats().stale
            board.publish(dict(filled(version + 1.0).named_parameters()), version + 1)
        assert stale + reader.pop_stats().stale > 10
    with pytest.raises(ConfigError, match="max_lag is 1"):
        FIFOReader(ring, [SerialProducer(ring, Draws())], max_lag=1)


def test_fifo_ready_order_reads_first_finished() -> None:
    ring = SlotRing(SPEC, 4)
    slow, fast = (ProducerProcess(ring, Draws(pause), number=i) for i, pause in enumerate((0.2, 0.0)))
    with FIFOReader(ring, [slow, fast], order="ready") as reader:
        makers = [next(reader).producer for _ in range(40)]
    assert makers.count(1) > 30
