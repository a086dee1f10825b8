"""Replicas in simulated time: the engine's own scheduler and page cache, with step durations from a formula.

No model is computed: the ids of a sequence only identify its cache pages, and its output ids are zeros. A step lasts

    base + prompt * (prefilled positions) + decode * (decoding sequences)      seconds

with constants of a small model on one core. Thousands of requests over eight replicas take seconds. With the same seed,
every policy gets the same requests at the same times.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from whorl.engine.cache.block_pool import BlockPool
from whorl.engine.cache.cache_manager import KVCacheGroup, KVCacheManager
from whorl.engine.request import Request
from whorl.engine.scheduler import PrefillBudget, Scheduler
from whorl.engine.sequence import Sequence
from whorl.router.prefix_index import BlockHashes, block_hashes
from whorl.router.routing_policy import RoutingPolicy, Ticket

BASE, PROMPT, DECODE = 0.004, 0.00025, 0.0005
PAGE = 32


@dataclass
class Job:
    """One request. at: arrival time; follows: the next turn of the conversation, `pause` seconds after the end."""

    number: int
    ids: tuple[int, ...]
    output: int
    at: float = 0.0
    follows: Job | None = None
    pause: float = 0.0


def conversations(n: int, rate: float, seed: int, prompts: int = 48, turns: int = 4) -> list[Job]:
    """The first jobs of `n` conversations; each opens with one of `prompts` system prompts (Zipf).

    rate: conversations per second (Poisson); turns: maximum per conversation.
    """
    rng = random.Random(seed)
    systems = [tuple(rng.randrange(1000) for _ in range(rng.randrange(256, 1280))) for _ in range(prompts)]
    weights = [1 / (k + 1) for k in range(prompts)]
    numbers, now, first = itertools.count(), 0.0, list[Job]()
    for _ in range(n):
        now += rng.expovariate(rate)
        ids, last = rng.choices(systems, weights)[0], None
        for _ in range(rng.randint(1, turns)):
            ids += tuple(rng.randrange(1000) for _ in range(rng.randrange(16, 192)))
            output = 1 + min(255, int(rng.expovariate(1 / 64)))
            job = Job(next(numbers), ids, output, now, pause=rng.expovariate(1 / 5))
            ids += (0,) * output
            if last is None:
                first.append(job)
            else:
                last.follows = job
            last = job
    return first


@dataclass
class Replica:
    """One server: its scheduler, its cache and its busy seconds."""

    cache_tokens: int
    busy: float = 0.0
    stepping: bool = False
    scheduler: Scheduler = field(init=False)
    cache: KVCacheManager = field(init=False)
    pace: PrefillBudget = field(init=False)

    def __post_init__(self) -> None:
        pool = BlockPool(self.cache_tokens // PAGE, PAGE)
        self.cache = KVCacheManager([KVCacheGroup(None, pool)], 16, 4096, 256)
        self.pace = PrefillBudget()
        self.scheduler = Scheduler(self.cache, 16, 256, self.pace)


@dataclass
class Outcome:
    """The result. hit: cached share of prompt positions; imbalance: busy time of the busiest replica over the mean."""

    hit: float
    imbalance: float
    first: list[float]  # seconds to the first token, sorted
    load: float  # mean busy share of the replicas

    def percentile(self, p: float) -> float:
        return self.first[min(len(self.first) - 1, int(p * len(self.first)))]


Choose = Callable[[RoutingPolicy, BlockHashes, list[str], int], str]


def simulate(
    first: list[Job], choose: Choose, n: int = 8, cache_tokens: int = 16384, seed: int = 0
) -> Outcome:
    """Simulate every request of `first` and its follow-up turns on `n` replicas."""
    policy = RoutingPolicy(random.Random(seed), capacity=cache_tokens // PAGE)
    replicas = {f"r{i}": Replica(cache_tokens) for i in range(n)}
    for name in replicas:
        policy.add(name)
    order = itertools.count()
    events: list[tuple[float, int, Job | str]] = []
    active: dict[int, tuple[Job, Ticket, float]] = {}
    waits, sent, now = list[float](), 0, 0.0
    names = sorted(replicas)

    def push(at: float, what: Job | str) -> None:
        heapq.heappush(events, (at, next(order), what))

    def step(name: str) -> None:
        """Run one step of a replica from `now`. Its results are processed at once, with the step's end as their time."""
        replica = replicas[name]
        schedule = replica.scheduler.schedule()
        if not schedule.rows:
            replica.stepping = False
            return
        took = BASE + PROMPT * (schedule.tokens - schedule.decode_tokens) + DECODE * schedule.decode_tokens
        replica.busy += took
        replica.pace.record_step(schedule.decode_tokens, schedule.tokens - schedule.decode_tokens, took)
        replica.stepping = True
        for sequence, count in schedule.rows:
            sequence.n_computed += count
            replica.cache.commit_full_pages(sequence)
            if sequence.n_computed < len(sequence.ids):
                continue
            job, ticket, arrived = active[int(sequence.request.id)]
            if not sequence.n_output:
                waits.append(now + took - arrived)
                policy.mark_prefilled(ticket)
            sequence.ids.append(0)
            if sequence.n_output == job.output:
                replica.scheduler.remove(sequence)
                policy.end(ticket)
                del active[job.number]
                if job.follows is not None:
                    job.follows.at = now + took + job.pause
                    push(job.follows.at, job.follows)
        push(now + took, name)

    for job in first:
        push(job.at, job)
    while events:
        now, _, what = heapq.heappop(events)
        if isinstance(what, str):
            step(what)
            continue
        hashes = block_hashes(what.ids)
        name = choose(policy, hashes, names, sent)
        sent += 1
        active[what.number] = what, policy.begin(hashes, name), now
        request = Request(id=str(what.number), ids=what.ids, max_tokens=what.output)
        replicas[name].scheduler.add(Sequence(request, what.number, list(what.ids), 0))
        if not replicas[name].stepping:
            step(name)
    hits = sum(r.cache.hit_tokens for r in replicas.values())
    queried = sum(r.cache.queried_tokens for r in replicas.values())
    busy = [r.busy for r in replicas.values()]
    return Outcome(hits / queried, max(busy) / (sum(busy) / n), sorted(waits), sum(busy) / n / now)


def least(policy: RoutingPolicy, names: list[str]) -> str:
    """The replica with the fewest requests; ties are broken at random."""
    return min(names, key=lambda r: (policy.loads[r].running, policy.rng.random()))


POLICIES: dict[str, Choose] = {
    "round robin": lambda policy, hashes, names, sent: names[sent % len(names)],
    "random": lambda policy, hashes, names, sent: policy.rng.choice(names),
    "least requests": lambda policy, hashes, names, sent: least(policy, names),
    "two choices": lambda policy, hashes, names, sent: least(policy, policy.rng.sample(names, 2)),
    "longest prefix": lambda policy, hashes, names, sent: max(
        names, key=lambda r: (policy.indexes[r].match_length(hashes), -policy.loads[r].running)
    ),
    "whorl": lambda policy, hashes, names, sent: policy.choose(hashes, names).replica,
}
