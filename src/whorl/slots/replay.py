"""Replay reader: stores records and samples from them; new records replace the oldest.

In contrast to `FIFOReader`, a read record stays READY and returns to its producer only when the buffer is full and a
new record arrives. Sampling is uniform, or proportional to priorities (Schaul et al. 2016, Prioritized Experience
Replay, arXiv:1511.05952):

    P(i) = p_i^alpha / sum_j p_j^alpha         weight_i = (N P(i))^-beta / max_j weight_j

The weights correct, in part, for the non-uniform sampling. A new record gets the highest priority so far, so that it is
sampled soon. Exactly `inserts_per_sample` new records are inserted before each sample. So the replay ratio is
independent of timing, and a run with serial producers repeats bit for bit.
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
    """A sample. slots: with repetition, valid until the next sample; weights: [n] fp32, at most 1, for their losses."""

    slots: list[Slot[Record]]
    weights: NDArray[np.float32]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the records stacked: each field [n, ...], copied out of shared memory."""
        import torch

        parts = [slot.tensors() for slot in self.slots]
        return {name: torch.stack([part[name] for part in parts]) for name in parts[0]}


class ReplayReader(Generic[Record]):
    """Samples `batch_size` stored records, without end.

    Args:
        batch_size: records per sample.
        rng: for sampling.
        inserts_per_sample: new records before each sample.
        learning_starts: records stored before the first sample; at most the capacity, len(ring) - len(producers).
        alpha: 0 samples uniformly; 1 in proportion to the priorities.
        beta: exponent of the importance weights.
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
        self.capacity = len(ring) - len(producers)  # one slot per producer stays free for writing
        if (
            not producers
            or not 1 <= learning_starts <= self.capacity
            or inserts_per_sample < 0
            or batch_size < 1
        ):
            raise ConfigError(
                f"a replay buffer of {len(ring)} slots with {len(producers)} producers, learning_starts={learning_starts}, "
                f"inserts_per_sample={inserts_per_sample}, batch_size={batch_size}",
                expected="at least 1 producer and more slots than producers; 1 <= learning_starts <= slots - producers",
            )
        self.ring, self.producers, self.batch_size, self.rng = ring, producers, batch_size, rng
        self.inserts_per_sample, self.learning_starts, self.alpha, self.beta = (
            inserts_per_sample,
            learning_starts,
            alpha,
            beta,
        )
        self.stored: deque[int] = deque()  # slot numbers, the oldest first
        self.priorities = np.zeros(len(ring))  # 0 for slots that are not stored
        self.max_priority = 1.0
        self.sequence = 0
        # Requested in the order of receipt: one record of each producer in turn.
        self._free: deque[int] = deque(range(len(ring)))
        for _ in producers:
            self._request_next()

    def _request_next(self) -> None:
        """Request the next record."""
        number = self.sequence
        self.producers[number % len(self.producers)].request(self._free.popleft(), number)
        self.sequence += 1

    def _insert_next(self) -> None:
        """Receive the next record in order, and request another in place of the oldest."""
        turn = (self.sequence - len(self.producers)) % len(self.producers)
        while (index := self.producers[turn].receive()) is None:
            pass  # killed, and restarted
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
        """Set the priorities of these records, for example absolute TD errors; each > 0.

        Raises:
            ConfigError: a priority is not a positive number.
        """
        values = np.asarray(priorities, np.float64)
        if not (np.isfinite(values).all() and (values > 0).all()):
            raise ConfigError(f"the priorities are {values}", expected="positive numbers")
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
