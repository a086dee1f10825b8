"""Replay buffer: stores transitions of many environment copies, and draws minibatches of them.

Each copy has a ring of rows in preallocated arrays, and each observation is stored once: the next observation of a row is
the observation of the row after it. Where a time limit cut an episode off, an additional row, which is never drawn, holds
the final observation. So truncation is not termination:

    row        0      1      2           3 (not drawn)    4
    holds      s0 a0  s1 a1  s2 a2, cut  s3, the final    first of the next episode

Draws are uniform, or proportional to priorities (Schaul et al. 2016, Prioritized Experience Replay, arXiv:1511.05952):

    P(i) = p_i^alpha / sum_j p_j^alpha         weight_i = (N P(i))^-beta / max over the batch

The weights correct, in part, for the non-uniform draws. A sum tree makes a draw O(log N). A new row gets the highest
priority so far. A draw depends on its generator and the stored rows alone, so a run with serial actors repeats bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whorl.errors import ConfigError
from whorl.slots.spec import FieldSpec


class TransitionStore:
    """Rows of `copies` environments, at least `capacity` in all; the oldest are replaced.

    Args:
        fields: of one step in one environment; with observation, reward, terminated and truncated.
        alpha: 0 draws uniformly; 1 in proportion to the priorities.
        beta: exponent of the importance weights.

    Raises:
        ConfigError: fewer than two rows per copy, or more bytes than `memory`.
    """

    def __init__(
        self,
        capacity: int,
        copies: int,
        fields: Mapping[str, FieldSpec],
        *,
        alpha: float = 0.0,
        beta: float = 0.4,
        memory: int | None = None,
    ) -> None:
        self.rows, self.copies, self.alpha, self.beta = -(-capacity // copies), copies, alpha, beta
        if self.rows < 2:
            raise ConfigError(
                f"a replay of {capacity} rows for {copies} environments",
                expected=f"at least {2 * copies}: two rows for each",
            )
        n = self.rows * copies
        n_bytes = n * (sum(field.n_bytes for field in fields.values()) + 1)
        if memory is not None and n_bytes > memory:
            raise ConfigError(
                f"a replay of {capacity:,} rows needs {n_bytes:,} bytes, and this machine has {memory:,} free",
                do="lower capacity",
            )
        self.arrays = {
            name: torch.from_numpy(np.zeros((n, *field.shape), field.dtype)) for name, field in fields.items()
        }
        self.drawable = torch.zeros(n, dtype=torch.bool)
        self.heads = torch.zeros(copies, dtype=torch.int64)  # rows each copy has written
        self.added = torch.zeros(1, dtype=torch.int64)
        self.priorities = SumTree(n) if alpha else None
        self.max_priority = torch.ones(1, dtype=torch.float64)

    def __len__(self) -> int:
        """Number of transitions added, at most the number of rows."""
        return min(int(self.added), len(self.drawable))

    @torch.no_grad()
    def add(self, rollout: Mapping[str, Tensor], *, first: int = 0) -> None:
        """Add a rollout of copies `first`, `first` + 1, ...: fields [T, B, ...], observations [T + 1, B, ...].

        Where it does not begin with the last observation added, as after a resume with new episodes, the last step added
        counts as cut off.
        """
        n_steps, n_copies = rollout["reward"].shape
        copies = torch.arange(first, first + n_copies)
        last = self.arrays["observation"][self._place(self.heads[copies], copies)]
        broken = copies[(last != rollout["observation"][0]).flatten(1).any(1) & (self.heads[copies] > 0)]
        self.arrays["truncated"][self._place(self.heads[broken] - 1, broken)] = True
        self.heads[broken] += 1
        cut = rollout["truncated"] & ~rollout["terminated"]
        step = torch.arange(n_steps)[:, None] + cut.cumsum(0) - cut.long()  # rows after the head
        step = self.heads[copies] + step
        at = self._place(step, copies)  # [T, B]
        for name, array in self.arrays.items():
            values = rollout[name]
            array[at] = values[:n_steps]
        self._set_drawable(at.flatten(), True)
        if cut.any():
            extra = self._place(step + 1, copies)[cut]
            self.arrays["observation"][extra] = rollout["final_observation"][cut]
            self._set_drawable(extra, False)
        self.heads[copies] = step[-1] + 1 + cut[-1]
        head = self._place(self.heads[copies], copies)
        self.arrays["observation"][head] = rollout["observation"][n_steps]
        self._set_drawable(head, False)
        self.added += n_steps * n_copies

    def draw(
        self, n: int, rng: np.random.Generator, *, discount: float = 1.0, n_steps: int = 1
    ) -> dict[str, Tensor]:
        """Return n transitions with replacement: the fields of the first step and

        reward              sum of up to n_steps discounted rewards, fewer at the end of an episode or of the rows
        next_observation    after the last of them
        next_discount       factor on its value; 0 where the episode terminated
        index, weight       for `set_priorities`, and for the losses
        """
        index, weight = self._draw_rows(n, rng)
        rows = torch.from_numpy(index)
        batch = {name: array.index_select(0, rows) for name, array in self.arrays.items()}
        following = self._after(rows)
        factor = torch.full((n,), discount)
        ended = batch["terminated"] | batch["truncated"]
        terminated = batch["terminated"]
        for _ in range(n_steps - 1):
            goes_on = ~ended & self.drawable[following]  # the head is not drawable: nothing is known after it
            batch["reward"] = batch["reward"] + goes_on * factor * self.arrays["reward"][following]
            terminated = terminated | goes_on & self.arrays["terminated"][following]
            ended = ended | ~goes_on | terminated | self.arrays["truncated"][following]
            following = torch.where(goes_on, self._after(following), following)
            factor = torch.where(goes_on, factor * discount, factor)
        batch["next_observation"] = self.arrays["observation"].index_select(0, following)
        batch["next_discount"] = factor * ~terminated
        return {**batch, "index": rows, "weight": torch.from_numpy(weight)}

    def set_priorities(self, index: Tensor, priority: Tensor) -> None:
        """Set the priorities [n] > 0 of the rows `index` [n], for example absolute TD errors."""
        assert self.priorities is not None
        values = priority.double().numpy()
        self.max_priority.clamp_(min=float(values.max()))
        self.priorities.set(index.numpy(), values**self.alpha)

    def tensors(self) -> dict[str, Tensor]:
        """Return the whole state, for a checkpoint; views, not copies."""
        tree = {} if self.priorities is None else {"priorities": torch.from_numpy(self.priorities.leaves)}
        own = {"drawable": self.drawable, "heads": self.heads, "added": self.added, "max": self.max_priority}
        return {**{f"rows/{n}": t for n, t in self.arrays.items()}, **tree, **own}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state of another store of the same sizes."""
        for name, tensor in self.tensors().items():
            tensor.copy_(tensors[name])
        if self.priorities is not None:
            self.priorities.rebuild()

    def _draw_rows(self, n: int, rng: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        if self.priorities is not None:
            index, share = self.priorities.draw(n, rng)
            weight = (len(self) * share) ** -self.beta
            return index, (weight / weight.max()).astype(np.float32)
        drawable, filled = self.drawable.numpy(), min(self.rows, int(self.heads.max()))
        found = np.empty(0, np.int64)
        while len(found) < n:  # rows that are not drawn are few
            drawn = rng.integers(0, filled * self.copies, n + 8)
            index = drawn % filled + drawn // filled * self.rows
            found = np.concatenate([found, index[drawable[index]]])
        return found[:n], np.ones(n, np.float32)

    def _place(self, row: Tensor, copies: Tensor) -> Tensor:
        return copies * self.rows + row % self.rows

    def _after(self, index: Tensor) -> Tensor:
        """Return the places of the rows after `index`."""
        following = index + 1
        return torch.where(following % self.rows == 0, following - self.rows, following)

    def _set_drawable(self, index: Tensor, value: bool) -> None:
        self.drawable[index] = value
        if self.priorities is not None:
            self.priorities.set(index.numpy(), float(self.max_priority) ** self.alpha * value)


class SumTree:
    """Numbers >= 0, and draws in proportion to them, each in O(log n) for a whole array of indices."""

    def __init__(self, n: int) -> None:
        self.first = 1 << (n - 1).bit_length()  # place of the leaf 0
        self.n, self.sums = n, np.zeros(2 * self.first)

    @property
    def leaves(self) -> NDArray[np.float64]:
        """The numbers [n], a view; call `rebuild` after writing to it."""
        return self.sums[self.first : self.first + self.n]

    def set(self, index: NDArray[np.int64], values: NDArray[np.float64] | float) -> None:
        """Set the numbers at `index`."""
        at = index + self.first
        self.sums[at] = values
        while at[0] > 1:
            at = at >> 1
            self.sums[at] = self.sums[2 * at] + self.sums[2 * at + 1]

    def rebuild(self) -> None:
        """Compute all sums from the leaves."""
        level = self.first
        while level > 1:
            self.sums[level // 2 : level] = self.sums[level : 2 * level].reshape(-1, 2).sum(axis=1)
            level //= 2

    def draw(self, n: int, rng: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return n indices, one from each n-th part of the total, and their shares of the total."""
        total = self.sums[1]
        rest = (np.arange(n) + rng.random(n)) * (total / n)
        at = np.ones(n, np.int64)
        while at[0] < self.first:
            at = 2 * at
            left = self.sums[at]
            right = (rest >= left) & (self.sums[at + 1] > 0)
            rest = rest - left * right
            at += right
        return at - self.first, self.sums[at] / total
