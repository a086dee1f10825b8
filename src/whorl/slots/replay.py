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
from whorl.slots.producers import Source
from whorl.slots.ring import Slot, SlotRing, State
from whorl.slots.spec import Record

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Drawn(Generic[Record]):
    """slots: records drawn, with repetition, valid until the next draw; weights: [n] fp32, at most 1, of their losses."""

    slots: list[Slot[Record]]
    weights: NDArray[np.float32]

    def tensors(self) -> dict[str, torch.Tensor]:
        """The records stacked: each field [n, ...], copied out of shared memory."""
        import torch

        parts = [slot.tensors() for slot in self.slots]
        return {name: torch.stack([part[name] for part in parts]) for name in parts[0]}


class Sample(Generic[Record]):
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
        producers: Sequence[Source],
        n: int,
        rng: np.random.Generator,
        *,
        fresh: int = 1,
        least: int = 1,
        alpha: float = 0.0,
        beta: float = 0.4,
    ) -> None:
        self.kept = len(ring) - len(producers)  # one slot each stays free to be written
        if not producers or not 1 <= least <= self.kept or fresh < 0 or n < 1:
            raise ConfigError(
                f"a pool of {len(ring)} slots with {len(producers)} producers, least={least}, fresh={fresh}, n={n}",
                expected="at least 1 producer and more slots than producers; 1 <= least <= slots - producers",
            )
        self.ring, self.producers, self.n, self.rng = ring, producers, n, rng
        self.fresh, self.least, self.alpha, self.beta = fresh, least, alpha, beta
        self.pool: deque[int] = deque()  # slot numbers, the oldest first
        self.priority = np.zeros(len(ring))  # 0 where a slot is not in the pool
        self.highest = 1.0
        self.sequence = 0
        # Asked in the order in which they will be received: one record of each producer in turn.
        self._free: deque[int] = deque(range(len(ring)))
        for _ in producers:
            self._ask()

    def _ask(self) -> None:
        """Has the next record that nobody was asked for written."""
        number = self.sequence
        self.producers[number % len(self.producers)].ask(self._free.popleft(), number)
        self.sequence += 1

    def _take_in(self) -> None:
        """Receives the next record, in order, and has another made in the place of the oldest."""
        turn = (self.sequence - len(self.producers)) % len(self.producers)
        while (index := self.producers[turn].receive()) is None:
            pass  # it was killed, and is started again
        self.pool.append(index)
        self.priority[index] = self.highest
        if not self._free:
            oldest = self.pool.popleft()
            self.priority[oldest] = 0.0
            self.ring.slots[oldest].step(State.READY, State.READING)
            self.ring.release(self.ring.slots[oldest])
            self._free.append(oldest)
        self._ask()

    def __iter__(self) -> Sample[Record]:
        return self

    def __next__(self) -> Drawn[Record]:
        for _ in range(max(self.fresh, self.least - len(self.pool))):
            self._take_in()
        members = np.fromiter(self.pool, np.int64, len(self.pool))
        if self.alpha == 0:
            chosen = self.rng.integers(0, len(members), self.n)
            weights = np.ones(self.n, np.float32)
        else:
            share = self.priority[members] ** self.alpha
            share /= share.sum()
            reached = share.cumsum()
            chosen = np.minimum(
                reached.searchsorted(self.rng.random(self.n) * reached[-1], side="right"), len(members) - 1
            )
            raw = (len(members) * share[chosen]) ** -self.beta
            weights = (raw / (len(members) * share.min()) ** -self.beta).astype(np.float32)
        return Drawn([self.ring.slots[i] for i in members[chosen]], weights)

    def prioritise(self, slots: Sequence[Slot[Record]], priorities: NDArray[np.floating]) -> None:
        """Sets what these records will be drawn in proportion to, for example the size of their error; each > 0.

        Raises:
            ConfigError: a priority that is not a positive number.
        """
        values = np.asarray(priorities, np.float64)
        if not (np.isfinite(values).all() and (values > 0).all()):
            raise ConfigError(f"the priorities {values} were given", expected="positive numbers")
        for slot, value in zip(slots, values, strict=True):
            self.priority[slot.index] = value
        self.highest = max(self.highest, float(values.max()))

    def close(self) -> None:
        """End the producers."""
        for producer in self.producers:
            producer.close()

    def __enter__(self) -> Sample[Record]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
