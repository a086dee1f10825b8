"""The replicas behind a router: availability, health checks, counters.

A replica is available for a request if all of these hold:

- it is *healthy*: it answered one of the last two health checks (`/health`, every second);
- it is not *draining*, neither by a call of `drain` nor by the status in its `/health`;
- its circuit is closed, or half-open without a running probe (`breaker.py`). The breaker uses the results of requests,
  because a replica with a hanging model may still answer `/health`;
- this request has not failed there before.

`/health` may contain `boot_id`, which changes with each restart, and `evicted_tokens`, a running total of evicted cache
positions. The prefix index of the replica is updated from both.

Everything runs in one event loop. There is no await between a routing decision and its registration, so no locks are needed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import httpx2 as httpx

from whorl.errors import ConfigError, one_of, shorten, without_credentials
from whorl.http.answers import MAX_MESSAGE_BYTES, PLAIN, parse_answer, read_answer
from whorl.router.autoscaling_advice import PoolSnapshot
from whorl.router.breaker import CircuitBreaker, CircuitState, RetryBudget
from whorl.router.prefix_index import BlockHashes
from whorl.router.routing_policy import RoutingDecision, RoutingPolicy, Ticket

LOG = logging.getLogger("whorl.router")
UNHEALTHY_AFTER = 2  # consecutive failed health checks
HEALTH_CHECK_SECONDS = 1.0
HEALTH_CHECK_TIMEOUT = 2.0
MAX_SNAPSHOTS = 900  # one per health check
TOKENS_PER_BLOCK = 32


@dataclass
class Replica:
    """One server. url: without a trailing slash."""

    name: str
    url: str
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    healthy: bool = False
    drain_requested: bool = False  # by a call of `drain`
    reports_draining: bool = False  # in its /health
    missed_checks: int = 0
    boot_id: Any = None
    evicted_tokens: int = 0
    queue: int | None = None  # queue length from /health, if reported
    problem: str = ""  # why it is unhealthy although it answers

    @property
    def draining(self) -> bool:
        return self.drain_requested or self.reports_draining


@dataclass
class RequestTotals:
    """Running totals since the start over all replicas."""

    arrived: int = 0
    finished: int = 0
    within_slo: int = 0  # finished successfully and within the SLO


class ReplicaPool:
    """Replicas, the routing policy, and counters.

    Args:
        clock: monotonic seconds.
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
        self.keys_required = False  # use no replica that answers without an API key
        self.snapshots: deque[PoolSnapshot] = deque(maxlen=MAX_SNAPSHOTS)

    def add(self, name: str, url: str, breaker: CircuitBreaker | None = None) -> Replica:
        """Add a replica. It gets no requests before its first successful health check.

        Raises:
            ConfigError: its URL has a password; states and metrics show it.
        """
        if without_credentials(url) != url:
            raise ConfigError(
                f"the address {url} has a password", expected="an address without user information"
            )
        self.policy.add(name)
        self.replicas[name] = replica = Replica(name, url.rstrip("/"), breaker or CircuitBreaker())
        return replica

    def remove(self, name: str) -> None:
        """Remove a replica; its running requests continue."""
        self.get(name)
        self.policy.remove(name)
        del self.replicas[name]

    def get(self, name: str) -> Replica:
        """Return a replica. Raises ConfigError for an unknown name."""
        if name not in self.replicas:
            raise ConfigError(
                f"unknown replica {shorten(name)!r}", expected=one_of(shorten(name), sorted(self.replicas))
            )
        return self.replicas[name]

    def available(self, tried: Collection[str] = ()) -> list[str]:
        """Return the names of available replicas, without those in `tried`."""
        now = self.clock()
        return [
            r.name
            for r in self.replicas.values()
            if r.healthy and not r.draining and r.name not in tried and r.breaker.allows_request(now)
        ]

    def dispatch(
        self, hashes: BlockHashes, tried: Collection[str] = ()
    ) -> tuple[Replica, Ticket, RoutingDecision] | None:
        """Choose a replica and register the request there. Returns None if no replica is available.

        The caller ends the ticket (`self.policy.end`) and reports the result to the breaker, once each.
        """
        names = self.available(tried)
        if not names:
            return None
        decision = self.policy.choose(hashes, names)
        replica = self.replicas[decision.replica]
        replica.breaker.admit(self.clock())
        return replica, self.policy.begin(hashes, decision.replica), decision

    def drain(self, name: str, on: bool = True) -> None:
        """Send no new requests to a replica; running ones finish. `on=False` reverts it."""
        self.get(name).drain_requested = on

    def on_restart(self, name: str, url: str | None = None) -> None:
        """Register a new process of a replica: its cache is empty, and it is unhealthy until a health check succeeds."""
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
        """Process a response of /health: 200 is healthy, 503 with status "draining" is draining, others are failures."""
        if replica.name not in self.replicas:
            return
        replica.reports_draining = body.get("status") == "draining"
        if status != 200 and not replica.reports_draining:
            self.on_missed_check(replica)
            return
        if self.keys_required and body.get("keys_required") is not True:
            replica.healthy = False
            if not replica.problem:
                replica.problem = "it requires no API key, and the router is reachable from other machines"
                LOG.error("replica %s is not used: %s; see --no-auth", replica.name, replica.problem)
            return
        replica.problem = ""
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
        """Record a failed health check."""
        replica.missed_checks += 1
        if replica.missed_checks >= UNHEALTHY_AFTER:
            replica.healthy = False

    async def check_health(self, client: httpx.AsyncClient) -> None:
        """Check the health of all replicas concurrently and take a snapshot."""

        async def check(replica: Replica) -> None:
            url = replica.url
            try:
                async with (
                    asyncio.timeout(2 * HEALTH_CHECK_TIMEOUT),
                    client.stream(
                        "GET", f"{url}/health", timeout=HEALTH_CHECK_TIMEOUT, headers=PLAIN
                    ) as answer,
                ):
                    data = await read_answer(answer, MAX_MESSAGE_BYTES)
                body = parse_answer(data) if "json" in answer.headers.get("content-type", "") else {}
            except (httpx.HTTPError, TimeoutError, ValueError):
                if url == replica.url:  # otherwise it was restarted in the meantime
                    self.on_missed_check(replica)
                return
            if url == replica.url:
                self.on_health_response(replica, answer.status_code, body if isinstance(body, dict) else {})

        await asyncio.gather(*(check(r) for r in list(self.replicas.values())))
        self.snapshots.append(self.snapshot())

    async def run_health_checks(
        self, client: httpx.AsyncClient, interval: float = HEALTH_CHECK_SECONDS
    ) -> None:
        """Run health checks until cancelled."""
        while True:
            await self.check_health(client)
            await asyncio.sleep(interval)

    def snapshot(self) -> PoolSnapshot:
        """Return the current counters as input of the autoscaling advice."""
        loads, totals = self.policy.loads, self.totals
        serving = [r for r in self.replicas.values() if r.healthy and not r.draining]
        return PoolSnapshot(
            time=self.clock(),
            replicas=len(serving),
            queue=sum(loads[r.name].waiting if r.queue is None else r.queue for r in serving),
            running=sum(loads[r.name].running for r in serving),
            arrived=totals.arrived,
            finished=totals.finished,
            within_slo=totals.within_slo,
        )

    def describe(self) -> list[dict[str, Any]]:
        """Return the state of each replica for the admin endpoint."""
        now = self.clock()
        return [
            {
                "name": r.name,
                "url": r.url,
                "healthy": r.healthy,
                "problem": r.problem,
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
        """Return the circuit state of a replica."""
        return self.get(name).breaker.state(self.clock())
