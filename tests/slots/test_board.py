"""The board: whole updates only, by version; readers that refuse what is too old; where the time went."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
from tests.support.slots.examples import Acts, Draws, Numbers

from whorl.errors import ConfigError, ProducerError
from whorl.slots import Board, BoardReader, FIFOReader, ProducerProcess, SerialProducer, SlotRing, Spec
from whorl.slots import board as board_module

SPEC = Spec.from_dataclass(Numbers, N=5)


def filled(value: float) -> torch.nn.Linear:
    net = torch.nn.Linear(300, 300)
    for p in net.parameters():
        p.data.fill_(value)
    return net


def test_what_was_published_is_read_with_its_version() -> None:
    board = Board.from_tensors(dict(filled(0.0).named_parameters()))
    other = Board(board.layout, fd=os.dup(board.fd))  # as another process attaches
    net, weights = filled(9.0), BoardReader(other)
    assert weights.load_into(net) == 0 and float(net.bias.detach()[0]) == 0.0
    board.publish(dict(filled(3.0).named_parameters()), 7)
    assert other.version == 7 and weights.load_into(net) == 7
    assert all((p == 3.0).all() for p in net.parameters())


def test_no_reader_sees_half_of_an_update() -> None:
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


def test_a_writer_that_died_in_the_middle_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board.from_tensors({"w": torch.zeros(3)})
    board._header[0] += 1
    monkeypatch.setattr(board_module, "_READ_TIMEOUT", 0.1)
    with pytest.raises(ProducerError, match="publishing for"):
        board.read({"w": torch.zeros(3)})


def test_in_lockstep_each_record_is_made_with_the_newest_weights() -> None:
    ring, board = SlotRing(SPEC, 1), Board.from_tensors(dict(filled(0.0).named_parameters()))
    with FIFOReader(ring, [SerialProducer(ring, Acts(), board=board)], board=board) as drain:
        for version in range(5):
            slot = next(drain)
            assert slot.policy_version == version and slot.data.values[0] == version
            board.publish(dict(filled(version + 1.0).named_parameters()), version + 1)
        figures = drain.pop_stats()
        assert figures.records == 5 and figures.lag_max == 0


@pytest.mark.parametrize("order", ["sequence", "ready"])
def test_processes_act_with_whole_updates_and_their_lag_is_told(order: str) -> None:
    ring, board = SlotRing(SPEC, 4), Board.from_tensors(dict(filled(0.0).named_parameters()))
    producers = [ProducerProcess(ring, Acts(), number=i, board=board) for i in range(2)]
    with FIFOReader(ring, producers, board=board, order=order) as drain:  # type: ignore[arg-type]
        for version in range(60):
            slot = next(drain)
            assert slot.data.label == 1 and slot.data.values[0] == slot.policy_version <= version
            board.publish(dict(filled(version + 1.0).named_parameters()), version + 1)
        figures = drain.pop_stats()
    assert figures.records == 60 and 0 < figures.metrics()["policy_lag/mean"] <= figures.metrics()["policy_lag/max"] < 30
    assert figures.busy > 0 and figures.wait > 0 and figures.idle >= 0


def test_what_is_too_old_is_made_anew_and_counted() -> None:
    ring, board = SlotRing(SPEC, 4), Board.from_tensors(dict(filled(0.0).named_parameters()))
    with FIFOReader(ring, [ProducerProcess(ring, Acts(), board=board)], board=board, max_lag=1) as drain:
        stale = 0
        for version in range(40):
            slot = next(drain)
            assert board.version - slot.policy_version <= 1
            time.sleep(0.005)  # all four slots are ready by now, and three of them go stale
            if version % 10 == 9:
                stale += drain.pop_stats().stale
            board.publish(dict(filled(version + 1.0).named_parameters()), version + 1)
        assert stale + drain.pop_stats().stale > 10
    with pytest.raises(ConfigError, match="max_lag is 1"):
        FIFOReader(ring, [SerialProducer(ring, Draws())], max_lag=1)


def test_whoever_is_ready_first_is_read_first() -> None:
    ring = SlotRing(SPEC, 4)
    slow, fast = (ProducerProcess(ring, Draws(pause), number=i) for i, pause in enumerate((0.2, 0.0)))
    with FIFOReader(ring, [slow, fast], order="ready") as drain:
        makers = [next(drain).producer for _ in range(40)]
    assert makers.count(1) > 30
