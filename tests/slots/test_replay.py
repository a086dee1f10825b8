"""The replay reader: stores the newest records, samples by priority, repeats with the seed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.slots.examples import Draws, Numbers

from whorl.errors import ConfigError
from whorl.slots import ProducerProcess, ReplayReader, SerialProducer, SlotRing, SlotState, Spec

SPEC = Spec.from_dataclass(Numbers, N=2)


def pool(slots: int, n: int, producers: int = 1, kind: Any = SerialProducer, **more: Any) -> Any:
    ring = SlotRing(SPEC, slots, poison=True)
    handles = [kind(ring, Draws(), seed=3, number=i) for i in range(producers)]
    return ReplayReader(ring, handles, n, np.random.default_rng(0), **more)


@given(st.integers(2, 9), st.integers(1, 3), st.integers(0, 3), st.integers(1, 25))
@settings(max_examples=60, deadline=None)
def test_replay_stores_and_samples_newest(n_slots: int, n_producers: int, fresh: int, draws: int) -> None:
    reader = pool(max(n_slots, n_producers + 1), 4, n_producers, inserts_per_sample=fresh)
    for draw in range(1, draws + 1):
        drawn = next(reader)
        received = max(fresh * draw, 1) if fresh else 1
        kept = range(max(0, received - reader.capacity), received)
        assert [reader.ring.slots[i].sequence for i in reader.stored] == list(kept)
        for slot in drawn.slots:
            assert slot.sequence in kept and slot.state == SlotState.READY
            assert int(slot.data.label) == slot.sequence
        assert drawn.tensors()["values"].shape == (4, 2) and not drawn.tensors()["values"].isnan().any()
        assert drawn.weights.tolist() == [1.0] * 4


def test_replay_process_equals_serial() -> None:
    def labels(reader: ReplayReader[Numbers]) -> list[list[int]]:
        with reader:
            return [[int(s.data.label) for s in next(reader).slots] for _ in range(30)]

    settings = {"inserts_per_sample": 2, "learning_starts": 4}
    assert labels(pool(8, 5, 2, ProducerProcess, **settings)) == labels(pool(8, 5, 2, **settings))


def test_replay_priorities_and_importance_weights() -> None:
    reader = pool(6, 20_000, inserts_per_sample=0, learning_starts=5, alpha=0.7, beta=1.0)
    next(reader)
    slots = [reader.ring.slots[i] for i in reader.stored]
    priorities = np.array([1.0, 2.0, 4.0, 8.0, 16.0])
    reader.update_priorities(slots, priorities)
    drawn = next(reader)
    counts = np.array([sum(s is slot for s in drawn.slots) for slot in slots])
    share = priorities**0.7 / (priorities**0.7).sum()
    # Chi-square with 4 degrees of freedom
    assert ((counts - 20_000 * share) ** 2 / (20_000 * share)).sum() < 20
    by_slot = {s.index: w for s, w in zip(drawn.slots, drawn.weights, strict=True)}
    undone = np.array([by_slot[s.index] for s in slots]) * share
    assert np.allclose(undone, undone[0], rtol=1e-4) and drawn.weights.max() == pytest.approx(1.0)


def test_replay_new_record_gets_max_priority() -> None:
    reader = pool(4, 1, inserts_per_sample=1, alpha=1.0)
    drawn = next(reader)
    reader.update_priorities(drawn.slots, np.array([50.0]))
    next(reader)
    assert reader.priorities[reader.stored[-1]] == 50.0
    with pytest.raises(ConfigError, match="positive numbers"):
        reader.update_priorities(drawn.slots, np.array([np.nan]))


def test_replay_invalid_settings_raise() -> None:
    for n_slots, more in ((1, {}), (4, {"learning_starts": 4}), (4, {"inserts_per_sample": -1})):
        with pytest.raises(ConfigError, match="replay buffer of"):
            pool(n_slots, 1, **more)
