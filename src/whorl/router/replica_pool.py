"""The replicas behind a router: which of them may be asked, what is known of each, and how they are looked after.

A replica may be asked when four things hold, each learnt in its own way:

- it is *healthy*: its `/health` answered lately (asked every second; two silences in a row are an illness);
- it is not *draining*: nobody asked for that here, and its `/health` does not say so itself;
- its circuit is closed, or half-open with no probe on the way (`breaker.py`: what requests met, not what `/health` said: a
  replica whose model hangs may well answer there);
- this request has not failed there already.

Its `/health` may also tell that it began anew (`boot`, any value that changes) and how many tokens its cache let go since
then (`evicted_tokens`, a running total): the policy's guess of what is cached there follows.

One loop of events, one thread: nothing here needs a lock, and nothing awaits between a choice and the note that it was made.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import httpx2 as httpx

from whorl.errors import ConfigError, one_of
from whorl.router.autoscaling_advice import PoolSnapshot
from whorl.router.breaker import CircuitBreaker, CircuitState, RetryBudget
from whorl.router.prefix_index import BlockHashes
from whorl.router.routing_policy import RoutingDecision, RoutingPolicy, Ticket

UNHEALTHY_AFTER = 2  # unanswered looks in a row
HEALTH_CHECK_SECONDS = 1.0
HEALTH_CHECK_TIMEOUT = 2.0
MAX_SNAPSHOTS = 900  # snapshots kept for advice, one a look
TOKENS_PER_BLOCK = 32


@dataclass
class Replica:
    """One server. url: without a slash at its end."""

    name: str
    url: str
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    healthy: bool = False
    drain_requested: bool = False  # here
    reports_draining: bool = False  # itself
    missed_checks: int = 0
    boot_id: Any = None
    evicted_tokens: int = 0
    queue: int | None = None  # its own count, where it tells

    @property
    def draining(self) -> bool:
        return self.drain_requested or self.reports_draining


@dataclass
class RequestTotals:
    """Running totals since the start, over all replicas: what advice takes differences of."""

    arrived: int = 0
    finished: int = 0
    within_slo: int = 0  # finished well and within the objective


class ReplicaPool:
    """Replicas, the policy that chooses among them, and what happened.

    Args:
        clock: seconds that never go back.
    """

    def __init__(
        self,
        policy: RoutingPolicy,
        budget: RetryBudget | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.policy, self.budget, self.clock = policy, budget or RetryBudget(), clock
        self.replicas: dict[str, Replica] = {}
        self.totals = RequestTotals()
        self.snapshots: deque[PoolSnapshot] = deque(maxlen=MAX_SNAPSHOTS)

    def add(self, name: str, url: str, breaker: CircuitBreaker | None = None) -> Replica:
        """A replica that is not asked before its first look found it healthy."""
        self.policy.add(name)
        self.replicas[name] = replica = Replica(name, url.rstrip("/"), breaker or CircuitBreaker())
        return replica

    def remove(self, name: str) -> None:
        """Forget it; requests on their way there go on."""
        self.get(name)
        self.policy.remove(name)
        del self.replicas[name]

    def get(self, name: str) -> Replica:
        """Raises ConfigError for an unknown name."""
        if name not in self.replicas:
            raise ConfigError(f"replica {name!r}", expected=one_of(name, sorted(self.replicas)))
        return self.replicas[name]

    def available(self, tried: Collection[str] = ()) -> list[str]:
        """Names of those that a request may go to which failed at `tried`."""
        now = self.clock()
        return [
            r.name
            for r in self.replicas.values()
            if r.healthy and not r.draining and r.name not in tried and r.breaker.allows_request(now)
        ]

    def dispatch(
        self, hashes: BlockHashes, tried: Collection[str] = ()
    ) -> tuple[Replica, Ticket, RoutingDecision] | None:
        """Choose a replica and note that a request goes there; None where there is none.

        The caller ends the ticket (`self.policy.end`) and tells the breaker how it went, once each.
        """
        names = self.available(tried)
        if not names:
            return None
        choice = self.policy.choose(hashes, names)
        replica = self.replicas[choice.replica]
        replica.breaker.admit(self.clock())
        return replica, self.policy.begin(hashes, choice.replica), choice

    def drain(self, name: str, on: bool = True) -> None:
        """No new requests there; those under way finish. `on=False`: take it up again."""
        self.get(name).drain_requested = on

    def on_restart(self, name: str, url: str | None = None) -> None:
        """Its process is another one: its cache is empty, and it is not healthy before it says so."""
        replica = self.get(name)
        replica.url = url or replica.url
        replica.healthy, replica.reports_draining, replica.missed_checks, replica.boot_id = (
            False,
            False,
            0,
            None,
        )
        replica.breaker.record_success()
        self.policy.clear_prefixes(name)

    def on_health_response(self, replica: Replica, status: int, body: dict[str, Any]) -> None:
        """What its /health answered: 200, or 503 with a status of draining, or anything else, which is an illness."""
        if replica.name not in self.replicas:
            return
        replica.reports_draining = body.get("status") == "draining"
        if status != 200 and not replica.reports_draining:
            self.on_missed_check(replica)
            return
        replica.healthy, replica.missed_checks = True, 0
        boot_id, evicted = body.get("boot_id"), body.get("evicted_tokens", 0)
        if replica.boot_id is not None and boot_id != replica.boot_id:
            self.policy.clear_prefixes(replica.name)
            replica.evicted_tokens = 0
        replica.boot_id = boot_id
        if isinstance(evicted, int) and evicted > replica.evicted_tokens:
            self.policy.evict_prefixes(replica.name, (evicted - replica.evicted_tokens) // TOKENS_PER_BLOCK)
            replica.evicted_tokens = evicted
        queue = body.get("queue")
        replica.queue = queue if isinstance(queue, int) else None

    def on_missed_check(self, replica: Replica) -> None:
        """A look at it was not answered."""
        replica.missed_checks += 1
        if replica.missed_checks >= UNHEALTHY_AFTER:
            replica.healthy = False

    async def check_health(self, client: httpx.AsyncClient) -> None:
        """Ask every replica for its health, all at once, and take a snapshot."""

        async def one(replica: Replica) -> None:
            url = replica.url
            try:
                answer = await client.get(f"{url}/health", timeout=HEALTH_CHECK_TIMEOUT)
                told = answer.json() if "json" in answer.headers.get("content-type", "") else {}
            except (httpx.HTTPError, ValueError):
                if url == replica.url:  # it may have been restarted meanwhile
                    self.on_missed_check(replica)
                return
            if url == replica.url:
                self.on_health_response(replica, answer.status_code, told if isinstance(told, dict) else {})

        await asyncio.gather(*(one(r) for r in list(self.replicas.values())))
        self.snapshots.append(self.snapshot())

    async def run_health_checks(
        self, client: httpx.AsyncClient, interval: float = HEALTH_CHECK_SECONDS
    ) -> None:
        """Look for ever."""
        while True:
            await self.check_health(client)
            await asyncio.sleep(interval)

    def snapshot(self) -> PoolSnapshot:
        """What advice is made of."""
        loads, tally = self.policy.loads, self.totals
        serving = [r for r in self.replicas.values() if r.healthy and not r.draining]
        return PoolSnapshot(
            time=self.clock(),
            replicas=len(serving),
            queue=sum(loads[r.name].waiting if r.queue is None else r.queue for r in serving),
            running=sum(loads[r.name].running for r in serving),
            arrived=tally.arrived,
            finished=tally.finished,
            within_slo=tally.within_slo,
        )

    def describe(self) -> list[dict[str, Any]]:
        """Each replica in words and numbers, for people and for the admin's page."""
        now = self.clock()
        return [
            {
                "name": r.name,
                "url": r.url,
                "healthy": r.healthy,
                "draining": r.draining,
                "drained": r.draining and self.policy.loads[r.name].running == 0,
                "circuit": str(r.breaker.state(now)),
                "running": self.policy.loads[r.name].running,
                "waiting": self.policy.loads[r.name].waiting,
                "blocks_known": len(self.policy.indexes[r.name]),
            }
            for r in self.replicas.values()
        ]

    def circuit_state(self, name: str) -> CircuitState:
        """Of one replica, now."""
        return self.get(name).breaker.state(self.clock())
