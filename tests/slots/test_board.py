"""The board: whole updates with versions, staleness limits, timing."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
from tests.support.slots.examples import Acts, Draws, filled, open_reader, publish

from whorl.errors import ConfigError, ProducerError
from whorl.slots import Board, BoardReader, SerialProducer
from whorl.slots import board as board_module


@pytest.fixture
def board() -> Board:
    return Board.from_tensors(filled(0.0))


def test_board_reads_published_weights_and_version(board: Board) -> None:
    other = Board(board.layout, fd=os.dup(board.fd))  # as another process attaches
    net, weights = torch.nn.Linear(300, 300), BoardReader(other)
    assert weights.load_into(net) == 0 and float(net.bias.detach()[0]) == 0.0
    board.publish(filled(3.0), 7)
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


def test_board_writer_death_raises(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    board._header[0] += 1
    monkeypatch.setattr(board_module, "_READ_TIMEOUT", 0.1)
    with pytest.raises(ProducerError, match="publishing for"):
        board.read(filled(0.0))


def test_board_serial_producer_uses_newest_weights(board: Board) -> None:
    with open_reader(Acts(), kind=SerialProducer, board=board) as reader:
        for version in range(5):
            slot = next(reader)
            assert slot.policy_version == version and slot.data.values[0] == version
            publish(board, version + 1)
        figures = reader.pop_stats()
        assert figures.records == 5 and figures.lag_max == 0


@pytest.mark.parametrize("order", ["sequence", "ready"])
def test_board_processes_see_whole_updates_and_lag(board: Board, order: str) -> None:
    with open_reader(Acts(), Acts(), slots=4, board=board, reader={"order": order}) as reader:
        for version in range(60):
            slot = next(reader)
            assert slot.data.label == 1 and slot.data.values[0] == slot.policy_version <= version
            publish(board, version + 1)
        figures = reader.pop_stats()
    lag = figures.metrics()
    assert figures.records == 60 and 0 < lag["policy_lag/mean"] <= lag["policy_lag/max"] < 30
    assert figures.busy > 0 and figures.wait > 0 and figures.idle >= 0


def test_fifo_max_lag_remakes_stale_records(board: Board) -> None:
    with open_reader(Acts(), slots=4, board=board, reader={"max_lag": 1}) as reader:
        stale = 0
        for version in range(40):
            slot = next(reader)
            assert board.version - slot.policy_version <= 1
            time.sleep(0.005)  # all four slots are ready now; three become stale
            if version % 10 == 9:
                stale += reader.pop_stats().stale
            publish(board, version + 1)
        assert stale + reader.pop_stats().stale > 10
    with pytest.raises(ConfigError, match="max_lag is 1"):
        open_reader(Draws(), kind=SerialProducer, reader={"max_lag": 1})


def test_fifo_ready_order_reads_first_finished() -> None:
    with open_reader(Draws(0.2), Draws(), slots=4, reader={"order": "ready"}) as reader:
        makers = [next(reader).producer for _ in range(40)]
    assert makers.count(1) > 30
