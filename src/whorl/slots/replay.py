"""`Sample`: a reader that keeps records and draws from them again and again; the oldest are overwritten.

The difference from `Drain` is all that separates off-policy from on-policy learning: a record that was read stays READY, and
goes back to its producer only when the pool is full and something new comes. Draws are uniform, or in proportion to
priorities (Schaul et al. 2016, Prioritized Experience Replay, arXiv:1511.05952):

    P(i) = p_i^alpha / sum_j p_j^alpha         weight_i = (N P(i))^-beta / max_j weight_j

where the weights undo, in part, that some are drawn more often. A new record has the highest priority seen so far,
so that each is drawn soon. `fresh` new records are taken in before each draw, neither more nor fewer: so how often
a record is used does not depend on who is faster, and a run with serial producers repeats bit for bit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Generic

import numpy as np
from numpy.typing import NDArray

from whorl.errors import ConfigError
from whorl.slots.producers import ProducerHandle
from whorl.slots.ring import Slot, SlotRing, SlotState
from whorl.slots.spec import Record

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ReplayBatch(Generic[Record]):
    """slots: records drawn, with repetition, valid until the next draw; weights: [n] fp32, at most 1, of their losses."""

    slots: list[Slot[Record]]
    weights: NDArray[np.float32]

    def tensors(self) -> dict[str, torch.Tensor]:
        """The records stacked: each field [n, ...], copied out of shared memory."""
        import torch

        parts = [slot.tensors() for slot in self.slots]
        return {name: torch.stack([part[name] for part in parts]) for name in parts[0]}


class ReplayReader(Generic[Record]):
    """Draws `n` of the records kept, for ever.

    Args:
        n: records a draw.
        rng: what draws.
        fresh: new records before each draw.
        least: records there must be before the first draw; at most len(ring) - len(producers), which is what is kept.
        alpha: 0 draws uniformly; 1 in full proportion to the priorities.
        beta: how far the weights undo it.
    """

    def __init__(
        self,
        ring: SlotRing[Record],
        producers: Sequence[ProducerHandle],
        batch_size: int,
        rng: np.random.Generator,
        *,
        inserts_per_sample: int = 1,
        learning_starts: int = 1,
        alpha: float = 0.0,
        beta: float = 0.4,
    ) -> None:
        self.capacity = len(ring) - len(producers)  # one slot each stays free to be written
        if (
            not producers
            or not 1 <= learning_starts <= self.capacity
            or inserts_per_sample < 0
            or batch_size < 1
        ):
            raise ConfigError(
                f"a pool of {len(ring)} slots with {len(producers)} producers, least={learning_starts}, fresh={inserts_per_sample}, n={batch_size}",
                expected="at least 1 producer and more slots than producers; 1 <= least <= slots - producers",
            )
        self.ring, self.producers, self.batch_size, self.rng = ring, producers, batch_size, rng
        self.inserts_per_sample, self.learning_starts, self.alpha, self.beta = (
            inserts_per_sample,
            learning_starts,
            alpha,
            beta,
        )
        self.stored: deque[int] = deque()  # slot numbers, the oldest first
        self.priorities = np.zeros(len(ring))  # 0 where a slot is not in the pool
        self.max_priority = 1.0
        self.sequence = 0
        # Asked in the order in which they will be received: one record of each producer in turn.
        self._free: deque[int] = deque(range(len(ring)))
        for _ in producers:
            self._request_next()

    def _request_next(self) -> None:
        """Has the next record that nobody was asked for written."""
        number = self.sequence
        self.producers[number % len(self.producers)].request(self._free.popleft(), number)
        self.sequence += 1

    def _insert_next(self) -> None:
        """Receives the next record, in order, and has another made in the place of the oldest."""
        turn = (self.sequence - len(self.producers)) % len(self.producers)
        while (index := self.producers[turn].receive()) is None:
            pass  # it was killed, and is started again
        self.stored.append(index)
        self.priorities[index] = self.max_priority
        if not self._free:
            oldest = self.stored.popleft()
            self.priorities[oldest] = 0.0
            self.ring.slots[oldest].transition(SlotState.READY, SlotState.READING)
            self.ring.release(self.ring.slots[oldest])
            self._free.append(oldest)
        self._request_next()

    def __iter__(self) -> ReplayReader[Record]:
        return self

    def __next__(self) -> ReplayBatch[Record]:
        for _ in range(max(self.inserts_per_sample, self.learning_starts - len(self.stored))):
            self._insert_next()
        members = np.fromiter(self.stored, np.int64, len(self.stored))
        if self.alpha == 0:
            chosen = self.rng.integers(0, len(members), self.batch_size)
            weights = np.ones(self.batch_size, np.float32)
        else:
            share = self.priorities[members] ** self.alpha
            share /= share.sum()
            reached = share.cumsum()
            chosen = np.minimum(
                reached.searchsorted(self.rng.random(self.batch_size) * reached[-1], side="right"),
                len(members) - 1,
            )
            raw = (len(members) * share[chosen]) ** -self.beta
            weights = (raw / (len(members) * share.min()) ** -self.beta).astype(np.float32)
        return ReplayBatch([self.ring.slots[i] for i in members[chosen]], weights)

    def update_priorities(self, slots: Sequence[Slot[Record]], priorities: NDArray[np.floating]) -> None:
        """Sets what these records will be drawn in proportion to, for example the size of their error; each > 0.

        Raises:
            ConfigError: a priority that is not a positive number.
        """
        values = np.asarray(priorities, np.float64)
        if not (np.isfinite(values).all() and (values > 0).all()):
            raise ConfigError(f"the priorities {values} were given", expected="positive numbers")
        for slot, value in zip(slots, values, strict=True):
            self.priorities[slot.index] = value
        self.max_priority = max(self.max_priority, float(values.max()))

    def close(self) -> None:
        """End the producers."""
        for producer in self.producers:
            producer.close()

    def __enter__(self) -> ReplayReader[Record]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
