"""The replay buffer against a list of transitions, for random episodes; priorities; checkpoints."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from whorl.errors import ConfigError
from whorl.slots import FieldSpec
from whorl.slots.replay import SumTree, TransitionStore

NUMBER, FLAG = FieldSpec((), np.dtype(np.float32)), FieldSpec((), np.dtype(np.bool_))
FIELDS = {
    "observation": FieldSpec((1,), np.dtype(np.float32)),
    "reward": NUMBER,
    "terminated": FLAG,
    "truncated": FLAG,
}


class Walks:
    """Random episodes of some copies. Every observation is a number of its own; the reward of a step is its number."""

    def __init__(self, copies: int, seed: int, end: float = 0.15) -> None:
        self.rng, self.copies, self.end, self.number = np.random.default_rng(seed), copies, end, 0
        self.now = self._new(copies)
        self.steps: list[list[tuple[float, float, bool, bool]]] = [[] for _ in range(copies)]

    def _new(self, n: int) -> np.ndarray:
        self.number += n
        return np.arange(self.number - n, self.number, dtype=np.float32)

    def rollout(self, n_steps: int) -> dict[str, torch.Tensor]:
        rows: dict[str, list[np.ndarray]] = {n: [] for n in (*FIELDS, "final_observation")}
        for _ in range(n_steps):
            after = self._new(self.copies)
            ends = [self.rng.random(self.copies) < self.end for _ in range(2)]
            for copy in range(self.copies):
                step = (float(self.now[copy]), float(after[copy]), bool(ends[0][copy]), bool(ends[1][copy]))
                self.steps[copy].append(step)
            for name, value in zip(rows, (self.now[:, None], self.now, *ends, after[:, None]), strict=True):
                rows[name].append(value)
            self.now = np.where(ends[0] | ends[1], self._new(self.copies), after)
        rows["observation"].append(self.now[:, None])
        return {name: torch.from_numpy(np.stack(values)) for name, values in rows.items()}

    def expected(self, copy: int, at: int, discount: float, n: int) -> tuple[float, float, float]:
        """Return reward, next observation and next discount of a step, as the definition says."""
        reward, factor = 0.0, 1.0
        for state, after, terminated, truncated in self.steps[copy][at : at + n]:
            reward, factor, last = reward + factor * state, factor * discount, after
            if terminated or truncated:
                return reward, last, factor * (not terminated)
        return reward, last, factor


@given(
    st.integers(0, 999), st.integers(1, 3), st.integers(1, 5), st.integers(1, 12), st.sampled_from([0.0, 0.6])
)
def test_draws_are_the_newest_steps(seed: int, copies: int, n: int, rollouts: int, alpha: float) -> None:
    walks, store = Walks(copies, seed), TransitionStore(24 * copies, copies, FIELDS, alpha=alpha)
    for _ in range(rollouts):
        store.add(walks.rollout(int(walks.rng.integers(1, 6))))
    draw = store.draw(400, np.random.default_rng(seed), discount=0.9, n_steps=n)
    where = {step[0]: (c, at) for c, steps in enumerate(walks.steps) for at, step in enumerate(steps)}
    values = (
        draw[name].flatten().tolist()
        for name in ("observation", "reward", "next_observation", "next_discount")
    )
    for state, *found in zip(*values, strict=True):
        copy, at = where[state]
        assert len(walks.steps[copy]) - at <= 24
        reward, following, factor = walks.expected(copy, at, 0.9, n)
        assert found == pytest.approx([reward, following if factor else found[1], factor], rel=1e-5)
    least = min(len(steps) for steps in walks.steps)
    kept = 12 if least > 12 else least  # at most every second row holds a final observation
    newest = {step[0] for steps in walks.steps for step in steps[-kept:]}
    assert len(newest - set(draw["observation"].flatten().tolist())) <= 0.2 * len(newest)
    assert (draw["weight"] == 1).all() if alpha == 0 else draw["weight"].max() == 1


def test_draws_follow_priorities() -> None:
    store = TransitionStore(16, 1, FIELDS, alpha=0.7, beta=1.0)
    store.add(Walks(1, 0, end=0.0).rollout(5))
    rows, priority = torch.arange(5), torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
    store.set_priorities(rows, priority)
    share = (priority**0.7 / (priority**0.7).sum()).double()
    draw = store.draw(20_000, np.random.default_rng(0))
    counts = torch.bincount(draw["index"], minlength=5)
    torch.testing.assert_close(counts / 20_000, share, atol=1e-3, rtol=0, check_dtype=False)
    expected = share.min() / share[draw["index"]]
    torch.testing.assert_close(draw["weight"], expected, rtol=1e-5, atol=0, check_dtype=False)


def test_loaded_store_draws_the_same() -> None:
    walks, stores = Walks(2, 3), [TransitionStore(64, 2, FIELDS, alpha=0.5) for _ in range(2)]
    stores[0].add(walks.rollout(20))
    stores[0].set_priorities(torch.arange(8), torch.arange(1.0, 9.0))
    stores[1].load({name: tensor.clone() for name, tensor in stores[0].tensors().items()})
    more = walks.rollout(4)
    for store in stores:
        store.add(more)
    first, second = (store.draw(32, np.random.default_rng(5), n_steps=3) for store in stores)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_rollout_of_new_episodes_cuts_the_old_ones_off() -> None:
    """After a resume the environments begin new episodes; no step leads from an old one to a new one."""
    store = TransitionStore(32, 1, FIELDS)
    store.add(Walks(1, 0, end=0.0).rollout(3))
    new = Walks(1, 1, end=0.0)
    new.number, new.now = 100, np.array([99.0], np.float32)
    store.add(new.rollout(3))
    draw = store.draw(200, np.random.default_rng(0), n_steps=4)
    pairs = set(
        zip(draw["observation"].flatten().tolist(), draw["next_observation"].flatten().tolist(), strict=True)
    )
    assert pairs == {(0, 5), (1, 5), (3, 5), (99, 104), (100, 104), (102, 104)}


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40).filter(any), st.integers(0, 99))
def test_sum_tree_draws_numbers_above_zero(numbers: list[float], seed: int) -> None:
    tree = SumTree(len(numbers))
    tree.set(np.arange(len(numbers)), np.array(numbers))
    index, share = tree.draw(50, np.random.default_rng(seed))
    assert tree.sums[1] == pytest.approx(sum(numbers))
    assert all(numbers[i] > 0 for i in index) and share == pytest.approx(
        np.array(numbers)[index] / tree.sums[1]
    )


def test_replay_larger_than_memory_states_bytes() -> None:
    with pytest.raises(
        ConfigError, match="a replay of 1,000 rows needs 11,000 bytes, and this machine has 999 free"
    ):
        TransitionStore(1000, 4, FIELDS, memory=999)
    with pytest.raises(ConfigError, match="a replay of 5 rows for 5 environments"):
        TransitionStore(5, 5, FIELDS)
