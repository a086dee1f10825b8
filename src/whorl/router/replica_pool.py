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
from whorl.router.autoscaling_advice import Snapshot
from whorl.router.breaker import Breaker, Circuit, RetryBudget
from whorl.router.prefix_index import Chain
from whorl.router.routing_policy import Choice, Policy, Ticket

ILL_AFTER = 2  # unanswered looks in a row
LOOK_SECONDS = 1.0
LOOK_PATIENCE = 2.0
WINDOW = 900  # snapshots kept for advice, one a look
TOKENS_A_BLOCK = 32


@dataclass
class Replica:
    """One server. url: without a slash at its end."""

    name: str
    url: str
    breaker: Breaker = field(default_factory=Breaker)
    healthy: bool = False
    asked_to_drain: bool = False  # here
    says_draining: bool = False  # itself
    silences: int = 0
    boot: Any = None
    evicted_tokens: int = 0
    queue: int | None = None  # its own count, where it tells

    @property
    def draining(self) -> bool:
        return self.asked_to_drain or self.says_draining


@dataclass
class Tally:
    """Running totals since the start, over all replicas: what advice takes differences of."""

    arrived: int = 0
    finished: int = 0
    good: int = 0  # finished well and within the objective


class Fleet:
    """Replicas, the policy that chooses among them, and what happened.

    Args:
        clock: seconds that never go back.
    """

    def __init__(
        self, policy: Policy, budget: RetryBudget | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.policy, self.budget, self.clock = policy, budget or RetryBudget(), clock
        self.replicas: dict[str, Replica] = {}
        self.tally = Tally()
        self.window: deque[Snapshot] = deque(maxlen=WINDOW)

    def add(self, name: str, url: str, breaker: Breaker | None = None) -> Replica:
        """A replica that is not asked before its first look found it healthy."""
        self.policy.add(name)
        self.replicas[name] = replica = Replica(name, url.rstrip("/"), breaker or Breaker())
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
            if r.healthy and not r.draining and r.name not in tried and r.breaker.ready(now)
        ]

    def send(self, hashes: Chain, tried: Collection[str] = ()) -> tuple[Replica, Ticket, Choice] | None:
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
        self.get(name).asked_to_drain = on

    def restarted(self, name: str, url: str | None = None) -> None:
        """Its process is another one: its cache is empty, and it is not healthy before it says so."""
        replica = self.get(name)
        replica.url = url or replica.url
        replica.healthy, replica.says_draining, replica.silences, replica.boot = False, False, 0, None
        replica.breaker.success()
        self.policy.forget(name)

    def heard(self, replica: Replica, status: int, told: dict[str, Any]) -> None:
        """What its /health answered: 200, or 503 with a status of draining, or anything else, which is an illness."""
        if replica.name not in self.replicas:
            return
        replica.says_draining = told.get("status") == "draining"
        if status != 200 and not replica.says_draining:
            self.silent(replica)
            return
        replica.healthy, replica.silences = True, 0
        boot, evicted = told.get("boot"), told.get("evicted_tokens", 0)
        if replica.boot is not None and boot != replica.boot:
            self.policy.forget(replica.name)
            replica.evicted_tokens = 0
        replica.boot = boot
        if isinstance(evicted, int) and evicted > replica.evicted_tokens:
            self.policy.evicted(replica.name, (evicted - replica.evicted_tokens) // TOKENS_A_BLOCK)
            replica.evicted_tokens = evicted
        queue = told.get("queue")
        replica.queue = queue if isinstance(queue, int) else None

    def silent(self, replica: Replica) -> None:
        """A look at it was not answered."""
        replica.silences += 1
        if replica.silences >= ILL_AFTER:
            replica.healthy = False

    async def look(self, client: httpx.AsyncClient) -> None:
        """Ask every replica for its health, all at once, and take a snapshot."""

        async def one(replica: Replica) -> None:
            url = replica.url
            try:
                answer = await client.get(f"{url}/health", timeout=LOOK_PATIENCE)
                told = answer.json() if "json" in answer.headers.get("content-type", "") else {}
            except (httpx.HTTPError, ValueError):
                if url == replica.url:  # it may have been restarted meanwhile
                    self.silent(replica)
                return
            if url == replica.url:
                self.heard(replica, answer.status_code, told if isinstance(told, dict) else {})

        await asyncio.gather(*(one(r) for r in list(self.replicas.values())))
        self.window.append(self.snapshot())

    async def watch(self, client: httpx.AsyncClient, every: float = LOOK_SECONDS) -> None:
        """Look for ever."""
        while True:
            await self.look(client)
            await asyncio.sleep(every)

    def snapshot(self) -> Snapshot:
        """What advice is made of."""
        loads, tally = self.policy.loads, self.tally
        serving = [r for r in self.replicas.values() if r.healthy and not r.draining]
        return Snapshot(
            time=self.clock(),
            replicas=len(serving),
            queue=sum(loads[r.name].waiting if r.queue is None else r.queue for r in serving),
            running=sum(loads[r.name].running for r in serving),
            arrived=tally.arrived,
            finished=tally.finished,
            good=tally.good,
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

    def circuit(self, name: str) -> Circuit:
        """Of one replica, now."""
        return self.get(name).breaker.state(self.clock())
