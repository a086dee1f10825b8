"""Routing policy: choose the replica with the shortest expected time to first token.

Round robin spreads a conversation over all replicas, and each computes the prefix again. Routing only by prefix overloads
the replica with a popular prefix. The policy puts both in one unit, blocks of prompt to compute:

    cost(r) = prompt blocks not cached on r + blocks sent to r without a first byte + decode_cost * requests on r

The minimum is the earliest first token if all blocks take equally long (as in Preble, Srivatsa et al. 2024, arXiv
2407.00023, and Mooncake, Qin et al. 2024, arXiv 2407.00079, section 6). `decode_cost` is the slowdown of a step by one
running sequence, in blocks.

- If no replica has a prefix of the prompt: the better of two random replicas (Mitzenmacher 2001, "The power of two choices
  in randomized load balancing"). This is almost as even as comparing all. Independent routers also avoid sending to the
  same idle replica at once.
- Load bound: with m requests on n replicas, a replica is eligible while it has fewer than
  c = max(min_limit, ceil((1 + load_slack) (m + 1) / n)) requests (Mirrokni et al. 2016, "Consistent hashing with bounded
  loads", arXiv 1608.01350). One is always eligible since c n > m. `min_limit` keeps affinity possible at low load.

Pure: no clock and no sockets; the random generator is an argument. The router reports sent requests (`begin`), first bytes
(`mark_prefilled`) and ends (`end`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection
from dataclasses import dataclass, field

from whorl.errors import ConfigError, one_of
from whorl.router.prefix_index import BlockHashes, PrefixIndex


@dataclass(frozen=True)
class RoutingDecision:
    """The chosen replica and its estimated cached blocks. reason: prefix, power_of_two or load_bound."""

    replica: str
    cached_blocks: int
    blocks: int
    reason: str


@dataclass
class ReplicaLoad:
    """Load of a replica: requests in progress, those without a first byte, and the prompt blocks of the latter."""

    running: int = 0
    waiting: int = 0
    pending_blocks: int = 0


@dataclass
class Ticket:
    """A request in progress. Unusable after `end`."""

    replica: str
    load: ReplicaLoad  # a replica that is removed and added again gets a new object
    blocks: int  # to compute
    prefilled: bool = False
    ended: bool = False


@dataclass
class RoutingPolicy:
    """Chooses among the added replicas.

    Args:
        rng: draws the two candidates.
        capacity: blocks in the prefix index of a replica: its cache size or a little less.
        load_slack: relative excess over the mean number of requests that a replica may have.
        min_limit: requests that a replica may always have.
        decode_cost: blocks that a running request counts as.
    """

    rng: random.Random
    capacity: int = 16384
    load_slack: float = 0.25
    min_limit: int = 4
    decode_cost: float = 1.0
    indexes: dict[str, PrefixIndex] = field(default_factory=dict)
    loads: dict[str, ReplicaLoad] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.capacity < 0 or self.load_slack < 0 or self.min_limit < 1 or self.decode_cost < 0:
            raise ConfigError(
                f"routing policy: capacity {self.capacity}, load_slack {self.load_slack}, min_limit {self.min_limit}, "
                f"decode_cost {self.decode_cost}",
                expected="non-negative values, min_limit at least 1",
            )

    def add(self, replica: str, capacity: int | None = None) -> None:
        """Add a replica with an empty prefix index. capacity: of this replica, if known."""
        if replica in self.loads:
            raise ConfigError(f"replica {replica!r} was added twice", expected="unique names")
        self.indexes[replica], self.loads[replica] = (
            PrefixIndex(self.capacity if capacity is None else capacity),
            ReplicaLoad(),
        )

    def remove(self, replica: str) -> None:
        """Remove a replica; tickets of its requests can still be ended."""
        self._check_known(replica)
        del self.indexes[replica], self.loads[replica]

    def clear_prefixes(self, replica: str) -> None:
        """Clear the prefix index of a restarted replica."""
        self._check_known(replica)
        self.indexes[replica].clear()

    def evict_prefixes(self, replica: str, blocks: int) -> None:
        """Remove this many blocks from the prefix index, oldest first: the replica evicted as many."""
        self._check_known(replica)
        self.indexes[replica].evict(blocks)

    def concurrency_limit(self, allowed: Collection[str]) -> int:
        """Return the number of requests that no replica of `allowed` may exceed."""
        in_progress = sum(self.loads[r].running for r in allowed)
        return max(self.min_limit, math.ceil((1 + self.load_slack) * (in_progress + 1) / len(allowed)))

    def cost(self, replica: str, missing: int) -> float:
        """Return the blocks to compute before the first token of a prompt with `missing` uncached blocks."""
        load = self.loads[replica]
        return missing + load.pending_blocks + self.decode_cost * load.running

    def choose(self, hashes: BlockHashes, allowed: Collection[str]) -> RoutingDecision:
        """Return a decision among `allowed` for a prompt with these blocks. Only the random generator changes.

        Raises:
            ConfigError: `allowed` is empty or contains an unknown replica.
        """
        if not allowed:
            raise ConfigError("no replica to choose from", expected="at least one")
        for replica in allowed:
            self._check_known(replica)
        names = sorted(allowed)  # the same seed gives the same decision for any order of the set
        limit = self.concurrency_limit(names)
        eligible = [r for r in names if self.loads[r].running < limit]
        hits = {r: self.indexes[r].match_length(hashes) for r in names}
        has_prefix = max(hits.values()) > 0
        candidates = eligible if has_prefix else self.rng.sample(eligible, min(2, len(eligible)))
        # Ties: the replica with more cached blocks, then a random one.
        costs = {r: (self.cost(r, len(hashes) - hits[r]), -hits[r]) for r in names}
        best = min(candidates, key=lambda r: (costs[r], self.rng.random()))
        limited = has_prefix and min(costs.values()) < costs[best]
        reason = "load_bound" if limited else "prefix" if has_prefix else "power_of_two"
        return RoutingDecision(best, hits[best], len(hashes), reason)

    def begin(self, hashes: BlockHashes, replica: str) -> Ticket:
        """Record that a prompt is sent to `replica`, which will cache it."""
        self._check_known(replica)
        index, load = self.indexes[replica], self.loads[replica]
        ticket = Ticket(
            replica, load, 1 + len(hashes) - index.match_length(hashes)
        )  # 1: the incomplete last block
        index.touch(hashes)
        load.running += 1
        load.waiting += 1
        load.pending_blocks += ticket.blocks
        return ticket

    def mark_prefilled(self, ticket: Ticket) -> None:
        """Record the first byte: the prompt is computed. A second call has no effect."""
        if ticket.prefilled:
            return
        ticket.prefilled = True
        ticket.load.waiting -= 1
        ticket.load.pending_blocks -= ticket.blocks

    def end(self, ticket: Ticket) -> None:
        """Record the end, with or without success. A second call has no effect."""
        if ticket.ended:
            return
        self.mark_prefilled(ticket)
        ticket.ended = True
        ticket.load.running -= 1

    def _check_known(self, replica: str) -> None:
        if replica not in self.loads:
            raise ConfigError(f"unknown replica {replica!r}", expected=one_of(replica, sorted(self.loads)))
