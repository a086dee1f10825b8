"""Which replica answers: the one where the prompt waits least, given what is cached there and what is being done there.

Round robin spreads a conversation over all replicas, and each of them computes its prefix anew; sending all to where the
prefix lies piles a popular prefix's traffic onto one. Both ends are priced in one currency, blocks of prompt to be computed:

    cost(r) = blocks of this prompt that r does not have + blocks sent to r that have no answer yet + decode * requests at r

Its minimum is the earliest first token, if blocks take equally long everywhere (the idea of Preble, Srivatsa et al. 2024,
arXiv 2407.00023, and of Mooncake's scheduler, Qin et al. 2024, arXiv 2407.00079, section 6). `decode` is what a running
sequence slows a step by, in blocks.

- Where nobody has any of the prompt: the better of two drawn at random (Mitzenmacher 2001, "The power of two choices in
  randomized load balancing"): nearly as even as asking all, and two routers that do not know of one another do not both
  fall upon the one replica that looks empty.
- Whatever the costs say, no replica gets more than `slack` above its share: with m requests under way on n replicas the
  next one goes only to where fewer than c = ceil((1 + slack) (m + 1) / n) are (Mirrokni et al. 2016, "Consistent hashing
  with bounded loads", arXiv 1608.01350). There is always one: c n > m. With few requests under way the bound would forbid
  every affinity, so it never falls below `floor`.

Pure: no clock, no sockets; the random generator comes in. The router tells it what it sends (`begin`), when the first byte
came back (`answered`: the prompt is computed) and when it ended (`end`).
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
    """Where to, and why: blocks of the prompt probably cached there, of how many; why: prefix, two choices or bound."""

    replica: str
    cached_blocks: int
    blocks: int
    reason: str


@dataclass
class ReplicaLoad:
    """What a replica has to do: requests under way; blocks of those that have not been answered yet."""

    running: int = 0
    waiting: int = 0
    pending_blocks: int = 0


@dataclass
class Ticket:
    """A request on its way. Spent after `end`."""

    replica: str
    load: ReplicaLoad  # the replica's own: a replica removed and added again has another one
    blocks: int  # to be computed
    prefilled: bool = False
    ended: bool = False


@dataclass
class RoutingPolicy:
    """Chooses among the replicas added.

    Args:
        rng: for the two that are compared.
        capacity: blocks remembered of a replica: what its cache holds, or a little less.
        slack: how far above its share of the requests under way a replica may be.
        floor: requests that a replica may always have, however few there are elsewhere.
        decode: blocks that a running request counts as.
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
                f"a policy with capacity {self.capacity}, slack {self.load_slack}, floor {self.min_limit}, decode {self.decode_cost}",
                expected="none of them negative, floor at least 1",
            )

    def add(self, replica: str, capacity: int | None = None) -> None:
        """A replica about which nothing is known yet; `capacity`: its own, where it is known."""
        if replica in self.loads:
            raise ConfigError(f"replica {replica!r} twice", expected="names that differ")
        self.indexes[replica], self.loads[replica] = (
            PrefixIndex(self.capacity if capacity is None else capacity),
            ReplicaLoad(),
        )

    def remove(self, replica: str) -> None:
        """It is gone; tickets of requests that were there may still be ended."""
        self._check_known(replica)
        del self.indexes[replica], self.loads[replica]

    def clear_prefixes(self, replica: str) -> None:
        """Its cache is empty: it began anew."""
        self._check_known(replica)
        self.indexes[replica].clear()

    def evict_prefixes(self, replica: str, blocks: int) -> None:
        """It says that so many blocks went from its cache: the oldest here are the likeliest."""
        self._check_known(replica)
        self.indexes[replica].evict(blocks)

    def concurrency_limit(self, allowed: Collection[str]) -> int:
        """Requests under way that none of `allowed` may exceed with the next one."""
        under_way = sum(self.loads[r].running for r in allowed)
        return max(self.min_limit, math.ceil((1 + self.load_slack) * (under_way + 1) / len(allowed)))

    def cost(self, replica: str, missing: int) -> float:
        """Blocks until a prompt of which `missing` blocks are not there would have its first token."""
        load = self.loads[replica]
        return missing + load.pending_blocks + self.decode_cost * load.running

    def choose(self, hashes: BlockHashes, allowed: Collection[str]) -> RoutingDecision:
        """One of `allowed` for a prompt of these blocks; changes nothing but the generator.

        Raises:
            ConfigError: `allowed` is empty or names an unknown replica.
        """
        if not allowed:
            raise ConfigError("a choice among no replicas", expected="one at least")
        for replica in allowed:
            self._check_known(replica)
        names = sorted(allowed)  # the same generator makes the same choice, however the set is ordered
        bound = self.concurrency_limit(names)
        free = [r for r in names if self.loads[r].running < bound]
        hits = {r: self.indexes[r].match_length(hashes) for r in names}
        known = max(hits.values()) > 0
        candidates = free if known else self.rng.sample(free, min(2, len(free)))
        # Of equals, where more of it lies; of those, any (but not always the first).
        prices = {r: (self.cost(r, len(hashes) - hits[r]), -hits[r]) for r in names}
        best = min(candidates, key=lambda r: (prices[r], self.rng.random()))
        held = known and min(prices.values()) < prices[best]
        reason = "load_bound" if held else "prefix" if known else "power_of_two"
        return RoutingDecision(best, hits[best], len(hashes), reason)

    def begin(self, hashes: BlockHashes, replica: str) -> Ticket:
        """The prompt is sent to `replica`, which will have it cached."""
        self._check_known(replica)
        index, load = self.indexes[replica], self.loads[replica]
        ticket = Ticket(
            replica, load, 1 + len(hashes) - index.match_length(hashes)
        )  # 1: what fills no whole block
        index.touch(hashes)
        load.running += 1
        load.waiting += 1
        load.pending_blocks += ticket.blocks
        return ticket

    def mark_prefilled(self, ticket: Ticket) -> None:
        """The first byte came: the prompt is computed. Again: nothing."""
        if ticket.prefilled:
            return
        ticket.prefilled = True
        ticket.load.waiting -= 1
        ticket.load.pending_blocks -= ticket.blocks

    def end(self, ticket: Ticket) -> None:
        """It ended, well or badly. Again: nothing."""
        if ticket.ended:
            return
        self.mark_prefilled(ticket)
        ticket.ended = True
        ticket.load.running -= 1

    def _check_known(self, replica: str) -> None:
        if replica not in self.loads:
            raise ConfigError(f"replica {replica!r}", expected=one_of(replica, sorted(self.loads)))
