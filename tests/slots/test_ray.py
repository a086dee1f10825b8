"""Producers in Ray actors on a local cluster: same bits as serial, same errors as processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.slots.dying_producers import CannotBegin, Dies
from tests.support.slots.examples import SPEC, Acts, Draws, Fails, Numbers

from whorl.errors import ConfigError, ProducerError
from whorl.slots import Board, FIFOReader, ReplayReader, SerialProducer, SlotRing
from whorl.slots.ray import RayProducer

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.xdist_group("ray")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    here = str(ROOT)
    paths = os.pathsep.join([here, *(p for p in sys.path if p)])
    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=200_000_000,
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
    )  # fmt: skip
    yield ray
    ray.shutdown()


def read(reader: FIFOReader[Numbers], n: int) -> list[tuple[int, int, bytes]]:
    return [(s.sequence, s.producer, s.data.values.tobytes()) for s in (next(reader) for _ in range(n))]


def test_ray_producer_without_cluster_raises() -> None:
    if ray.is_initialized():
        ray.shutdown()
    with pytest.raises(ConfigError, match="not initialized"):
        RayProducer(SlotRing(SPEC, 1), Draws())


def test_ray_producers_equal_serial(cluster: Any) -> None:
    ring = SlotRing(SPEC, 4)
    with FIFOReader(ring, [SerialProducer(ring, Draws(), seed=7, number=i) for i in range(2)]) as reader:
        expected = read(reader, 12)
    ring = SlotRing(SPEC, 4, poison=True)
    with FIFOReader(ring, [RayProducer(ring, Draws(), seed=7, number=i) for i in range(2)]) as reader:
        assert read(reader, 12) == expected
        figures = reader.pop_stats()
    assert figures.records == 12 and figures.busy > 0


def test_ray_producers_use_board_weights(cluster: Any) -> None:
    def filled(value: float) -> dict[str, torch.Tensor]:
        return {"weight": torch.full((300, 300), value), "bias": torch.full((300,), value)}

    ring, board = SlotRing(SPEC, 2), Board.from_tensors(filled(0.0))
    producers = [RayProducer(ring, Acts(), number=i, board=board) for i in range(2)]
    with FIFOReader(ring, producers, board=board, order="ready") as reader:
        for version in range(8):
            slot = next(reader)
            assert slot.data.label == 1 and slot.data.values[0] == slot.policy_version <= version
            board.publish(filled(version + 1.0), version + 1)
        assert reader.pop_stats().lag_max <= 8
    # Weights are sent with the request: with two slots, later records are one version behind.
    ring, board = SlotRing(SPEC, 2), Board.from_tensors(filled(0.0))
    with FIFOReader(ring, [RayProducer(ring, Acts(), board=board)], board=board) as reader:
        lags = []
        for version in range(5):
            lags.append(board.version - next(reader).policy_version)
            board.publish(filled(version + 1.0), version + 1)
    assert lags == [0, 1, 1, 1, 1]


def test_replay_reader_with_ray_producers(cluster: Any) -> None:
    import numpy as np

    ring = SlotRing(SPEC, 5)
    with ReplayReader(
        ring, [RayProducer(ring, Draws())], 3, np.random.default_rng(0), learning_starts=2
    ) as reader:
        assert all(int(s.data.label) == s.sequence for _ in range(4) for s in next(reader).slots)


def test_ray_actor_failure_raises(cluster: Any) -> None:
    ring = SlotRing(SPEC, 1)
    with (
        pytest.raises(ProducerError, match="record two cannot be made"),
        FIFOReader(ring, [RayProducer(ring, Fails())]) as d,
    ):
        read(d, 5)
    ring = SlotRing(SPEC, 1)
    with (
        pytest.raises(ProducerError, match="wrote no record for 5 s"),
        FIFOReader(ring, [RayProducer(ring, Draws(pause=60), timeout=5)]) as d,
    ):
        read(d, 1)
    ring = SlotRing(SPEC, 1)
    producer = RayProducer(ring, Draws(pause=1))
    with pytest.raises(ProducerError, match="died"), FIFOReader(ring, [producer]) as d:
        ray.kill(producer._actor)
        read(d, 1)


def test_ray_actor_lost_is_restarted(cluster: Any, tmp_path: Path) -> None:
    """Killed during a fill, then by Ray: every record arrives once, with the same bits."""
    ring, messages = SlotRing(SPEC, 3), list[str]()
    with FIFOReader(ring, [SerialProducer(ring, Draws(), seed=7)]) as reader:
        expected = read(reader, 12)
    ring = SlotRing(SPEC, 3, poison=True)
    producer = RayProducer(ring, Dies(folder=tmp_path), seed=7, restarts=1, log=messages.append)
    with FIFOReader(ring, [producer]) as reader:
        got = read(reader, 6)
        ray.kill(producer._actor)
        assert got + read(reader, 6) == expected
        assert reader.pop_stats().restarts == 2 == len(messages) and "restarted (" in messages[0]


def test_ray_restart_limit_raises(cluster: Any, tmp_path: Path) -> None:
    ring, messages = SlotRing(SPEC, 1), list[str]()
    dies = Dies(folder=tmp_path, when="always")
    with (
        pytest.raises(ProducerError, match="died"),
        FIFOReader(ring, [RayProducer(ring, dies, restarts=1, log=messages.append)]) as d,
    ):
        read(d, 5)
    assert len(messages) == 1
    for producer in (Fails(), CannotBegin()):  # these exit without a kill
        ring, messages = SlotRing(SPEC, 1), []
        with (
            pytest.raises(ProducerError, match=r"cannot be made|cannot begin"),
            FIFOReader(ring, [RayProducer(ring, producer, restarts=3, log=messages.append)]) as d,
        ):
            read(d, 5)
        assert not messages
