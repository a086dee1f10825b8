"""EpochOrder: every epoch is a permutation, places are independent of what was read before. StepOrder: token budgets."""

from __future__ import annotations

import math
import pickle
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whorl.data.epoch_order import EpochOrder, StepOrder
from whorl.errors import DataError
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


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=30),
    st.integers(0, 40),
    st.integers(1, 8),
    st.integers(0, 3),
)
def test_budget_holds_and_epochs_are_complete(sizes: list[int], more: int, quarters: int, seed: int) -> None:
    each, budget, epochs = np.array(sizes), max(sizes) + more, quarters / 4
    steps = StepOrder(EpochOrder(seed, "x", n=len(sizes)), epochs=epochs, batch_tokens=budget, sizes=each)
    batches = [steps[step] for step in range(steps.steps)]
    assert all(batch and each[batch].sum() <= budget for batch in batches)
    assert steps.largest == max(map(len, batches))
    for batch, following in pairwise(batches):  # a batch is full: the next item did not fit
        assert each[batch].sum() + each[following[0]] > budget
    places = [item for batch in batches for item in batch]
    order = EpochOrder(seed, "x", n=len(sizes))
    assert places == [order[place] for place in range(max(1, math.ceil(epochs * len(sizes))))]
    again = StepOrder(EpochOrder(seed, "x", n=len(sizes)), epochs=epochs, batch_tokens=budget, sizes=each)
    assert again[steps.steps - 1] == batches[-1]  # without the steps before it


def test_budget_names_the_item_that_is_too_long() -> None:
    with pytest.raises(DataError, match=r"example 2 of 4 has 9 tokens.*\(2 are longer"):
        StepOrder(EpochOrder(0, n=4), epochs=1, batch_tokens=8, sizes=np.array([3, 8, 9, 12]))


def test_fixed_steps_continue_into_next_epoch() -> None:
    order = EpochOrder(1, n=5)
    steps = StepOrder(order, epochs=1.5, batch_size=3)
    assert steps.steps == 3 and steps[1] == [order[place] for place in (3, 4, 5)]
