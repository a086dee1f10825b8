"""Producers in Ray actors on a local cluster: same bits as serial, same errors as processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.slots.dying_producers import CannotBegin, Dies
from tests.support.slots.examples import SPEC, Acts, Draws, Fails, expected_records, filled, publish, read
from tests.support.slots.examples import open_reader as open_reader_of

from whorl.errors import ConfigError, ProducerError
from whorl.slots import Board, FIFOReader, SlotRing
from whorl.slots.ray import RayProducer

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.xdist_group("ray")


def open_reader(*producers: Any, **options: Any) -> FIFOReader[Any]:
    return open_reader_of(*producers, kind=RayProducer, **options)


def test_ray_producer_without_cluster_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ConfigError, match="not initialized"):
        RayProducer(SlotRing(SPEC, 1), Draws())


def test_ray_producers_equal_serial(ray_cluster: Any) -> None:
    with open_reader(Draws(), Draws(), slots=4) as reader:
        assert read(reader, 12) == expected_records(12, 2)
        figures = reader.pop_stats()
    assert figures.records == 12 and figures.busy > 0


def test_ray_producers_use_board_weights(ray_cluster: Any) -> None:
    """Weights are sent with the request: with two slots, later records are one version behind."""
    board, lags = Board.from_tensors(filled(0.0)), []
    with open_reader(Acts(), slots=2, board=board) as reader:
        for version in range(5):
            slot = next(reader)
            assert slot.data.label == 1 and slot.data.values[0] == slot.policy_version
            lags.append(board.version - slot.policy_version)
            publish(board, version + 1)
    assert lags == [0, 1, 1, 1, 1]


def test_ray_actor_that_hangs_raises(ray_cluster: Any) -> None:
    hanging = open_reader(Draws(pause=60), timeout=5)
    with pytest.raises(ProducerError, match="wrote no record for 5 s"), hanging as reader:
        read(reader, 1)


def test_ray_actor_lost_is_restarted(ray_cluster: Any, tmp_path: Path) -> None:
    """Killed during a fill, then by Ray: every record arrives once, with the same bits."""
    messages = list[str]()
    with open_reader(Dies(folder=tmp_path), slots=3, restarts=1, log=messages.append) as reader:
        got = read(reader, 6)
        ray.kill(reader.producers[0]._actor)
        assert got + read(reader, 6) == expected_records(12)
        assert reader.pop_stats().restarts == 2 == len(messages) and "restarted (" in messages[0]


def test_ray_restart_limit_raises(ray_cluster: Any, tmp_path: Path) -> None:
    """A producer that raises is not restarted."""
    dies = Dies(folder=tmp_path, when="always")
    for producer, words, n_restarts in (
        (dies, "died", 1),
        (Fails(), "record two cannot be made", 0),
        (CannotBegin(), "begin", 0),
    ):
        messages = list[str]()
        reader = open_reader(producer, restarts=1, log=messages.append)
        with pytest.raises(ProducerError, match=words), reader:
            read(reader, 5)
        assert len(messages) == n_restarts
