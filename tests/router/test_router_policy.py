"""Prefix index and routing policy."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whorl.errors import ConfigError
from whorl.router.prefix_index import BLOCK_BYTES, BLOCK_IDS, PrefixIndex, block_hashes, prompt_and_seed
from whorl.router.routing_policy import RoutingDecision, RoutingPolicy, Ticket


def text(seed: int, blocks: int) -> bytes:
    return random.Random(seed).randbytes(blocks * BLOCK_BYTES)


def policy(n: int, **settings: float) -> RoutingPolicy:
    made = RoutingPolicy(random.Random(0), **settings)  # type: ignore[arg-type]
    for i in range(n):
        made.add(f"r{i}")
    return made


# Block hashes


def test_block_hashes_share_the_common_prefix() -> None:
    a, b = text(1, 5), text(1, 5)[: 3 * BLOCK_BYTES] + text(2, 2)
    assert block_hashes(a)[:3] == block_hashes(b)[:3]
    assert set(block_hashes(a)[3:]).isdisjoint(block_hashes(b))
    assert len(block_hashes(a[:-1])) == 4, "an incomplete block has no hash"
    assert block_hashes(a, b"one model")[0] != block_hashes(a, b"another")[0]
    assert block_hashes(a[BLOCK_BYTES:])[0] != block_hashes(a)[1], "a block hash covers all earlier blocks"
    ids = list(range(3 * BLOCK_IDS + 5))
    other = [*ids[: 2 * BLOCK_IDS], 7] + [0] * BLOCK_IDS
    assert len(block_hashes(ids)) == 3 and block_hashes(ids)[:2] == block_hashes(other)[:2]


LONG = "x" * 300
CHAT = {"model": "m", "messages": [{"role": "user", "content": LONG}], "temperature": 0.1}


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        (CHAT, b"<user>" + LONG.encode()),
        ({"prompt": LONG}, LONG.encode()),
        ({"prompt": [3, 4]}, [3, 4]),
        ({"prompt": [[3, 4], [5]]}, [3, 4]),
        ({"input": LONG}, LONG.encode()),
        ({"prompt": ["a", "b"]}, b"ab"),
    ],
)
def test_prompt_and_seed_reads_every_request_form(body: dict[str, Any], prompt: bytes | list[int]) -> None:
    assert prompt_and_seed(body)[0] == prompt


def test_prompt_and_seed_depends_on_model_and_tools() -> None:
    prompt, seed = prompt_and_seed(CHAT)
    assert prompt_and_seed({**CHAT, "temperature": 0.9, "n": 3}) == (prompt, seed)
    assert prompt_and_seed({**CHAT, "model": "n"})[1] != seed
    assert prompt_and_seed({**CHAT, "tools": [{"name": "f"}]})[0] != prompt


def containers(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=3), values, max_size=3)


json_leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text()


@given(st.recursive(json_leaves, containers, max_leaves=8))
def test_prompt_and_seed_accepts_any_json(value: object) -> None:
    for key in ("messages", "prompt", "input", "tools", "model"):
        block_hashes(*prompt_and_seed({"messages": [value], key: value}))
        block_hashes(*prompt_and_seed({key: value}))


# Prefix index, compared with a list


steps = st.tuples(st.integers(0, 3), st.integers(0, 6), st.integers(0, 3))


@given(st.lists(steps, max_size=30), st.integers(0, 12))
def test_prefix_index_keeps_only_full_prefixes(steps: list[tuple[int, int, int]], capacity: int) -> None:
    index, sent = PrefixIndex(capacity), []
    for seed, blocks, evicted in steps:
        hashes = block_hashes(text(seed, blocks))
        index.touch(hashes)
        assert index.match_length(hashes) == min(len(hashes), capacity), "the newest prompt is in the index"
        sent.append(hashes)
        index.evict(evicted)
        assert len(index) <= capacity
        reached = {h for old in sent for h in old[: index.match_length(old)]}
        assert len(reached) == len(index), "every block belongs to a stored prefix"


def test_prefix_index_evicts_oldest_leaf_first() -> None:
    index, old, new = PrefixIndex(6), block_hashes(text(1, 4)), block_hashes(text(2, 4))
    index.touch(old)
    index.touch(new)
    assert (index.match_length(old), index.match_length(new)) == (2, 4)
    index.evict(1)
    assert (index.match_length(old), index.match_length(new)) == (1, 4)


# The policy


requests = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 20)), min_size=1, max_size=80)


@given(st.integers(1, 5), st.floats(0, 2), st.integers(1, 4), requests, st.integers(0, 2**32))
def test_policy_respects_load_bound_and_counters(
    n: int, slack: float, floor: int, requests: list[tuple[int, int]], seed: int
) -> None:
    rng = random.Random(seed)
    made = policy(n, load_slack=slack, min_limit=floor)
    open_tickets: list[Ticket] = []
    for kind, blocks in requests:
        if open_tickets and rng.random() < 0.4:
            ticket = open_tickets.pop(rng.randrange(len(open_tickets)))
            if rng.random() < 0.5:
                made.mark_prefilled(ticket)
            made.end(ticket)
            made.end(ticket)
        allowed = rng.sample(sorted(made.loads), rng.randint(1, n))
        hashes = block_hashes(text(kind, blocks))
        under_way = sum(made.loads[r].running for r in allowed)
        choice = made.choose(hashes, allowed)
        assert choice.replica in allowed
        limit = max(floor, math.ceil((1 + slack) * (under_way + 1) / len(allowed)))
        assert made.loads[choice.replica].running + 1 <= limit
        assert choice.cached_blocks == made.indexes[choice.replica].match_length(hashes)
        open_tickets.append(made.begin(hashes, choice.replica))
        assert sum(load.running for load in made.loads.values()) == len(open_tickets)
    for ticket in open_tickets:
        made.end(ticket)
    assert all((x.running, x.waiting, x.pending_blocks) == (0, 0, 0) for x in made.loads.values())


def test_policy_prefers_prefix_until_load_outweighs_it() -> None:
    made = policy(3, min_limit=100)
    prompt = block_hashes(text(1, 10))
    first = made.choose(prompt, made.loads)
    assert first.reason == "power_of_two"
    made.end(made.begin(prompt, first.replica))
    longer = block_hashes(text(1, 10) + text(9, 2))
    for _ in range(5):
        assert made.choose(longer, made.loads) == RoutingDecision(first.replica, 10, 12, "prefix")
    # Ten cached blocks outweigh nine running requests but not eleven.
    for running in range(1, 12):
        made.mark_prefilled(made.begin((), first.replica))
        if running in (9, 11):
            assert (made.choose(longer, made.loads).replica == first.replica) == (running == 9)


def test_cost_counts_pending_blocks_until_prefill() -> None:
    made = policy(2)
    ticket = made.begin(block_hashes(text(1, 50)), "r0")
    assert made.cost("r0", 0) == 1 + 50 + 1  # incomplete block + blocks + running request
    made.mark_prefilled(ticket)
    assert made.cost("r0", 0) == 1
    made.end(ticket)
    assert made.cost("r0", 0) == 0


def test_power_of_two_balances_load() -> None:
    made = policy(8, min_limit=10**6)
    for _ in range(8 * 200):
        made.begin((), made.choose((), made.loads).replica)
    runs = [x.running for x in made.loads.values()]
    assert max(runs) - min(runs) <= 10  # with a single random choice it is about 80


def test_policy_is_deterministic_for_any_replica_order() -> None:
    def run(*names: str) -> list[str]:
        made, chosen = policy(4), []
        for i in range(40):
            chosen.append(made.choose(block_hashes(text(i % 5, 3)), names).replica)
            made.begin(block_hashes(text(i % 5, 3)), chosen[-1])
        return chosen

    assert run("r0", "r1", "r2", "r3") == run("r3", "r1", "r0", "r2")


def test_ticket_of_removed_replica_does_not_count() -> None:
    made = policy(2)
    ticket = made.begin((), "r0")
    made.remove("r0")
    made.add("r0")
    made.end(ticket)
    assert made.loads["r0"].running == 0


def test_policy_rejects_bad_arguments() -> None:
    with pytest.raises(ConfigError, match="load_slack -1"):
        policy(1, load_slack=-1)
    made = policy(2)
    with pytest.raises(ConfigError, match="no replica to choose"):
        made.choose((), [])
    with pytest.raises(ConfigError, match="'r9'"):
        made.choose((), ["r9"])
    with pytest.raises(ConfigError, match="twice"):
        made.add("r1")
