"""EpochOrder: every epoch is a permutation, places are independent of what was read before."""

from __future__ import annotations

import pickle

from hypothesis import given
from hypothesis import strategies as st

from whorl.data.epoch_order import EpochOrder
from whorl.tracking.seeds import numpy_rng


@given(st.integers(1, 30), st.integers(0, 3), st.lists(st.integers(0, 100), max_size=8))
def test_epoch_order_matches_its_streams(n: int, seed: int, places: list[int]) -> None:
    order = pickle.loads(pickle.dumps(EpochOrder(seed, "some", "order", n=n)))  # replicas receive it
    for place in places:
        epoch, within = divmod(place, n)
        assert order[place] == numpy_rng(seed, "some", "order", epoch).permutation(n)[within]
    assert sorted(order[2 * n + i] for i in range(n)) == list(range(n))


def test_epoch_order_uses_draw() -> None:
    order = EpochOrder(1, "x", n=4, draw=lambda rng: rng.permutation([5, 6, 7, 8]))
    assert sorted(order[i] for i in range(4)) == [5, 6, 7, 8]
    assert [order[4 + i] - 5 for i in range(4)] == numpy_rng(1, "x", 1).permutation(4).tolist()
