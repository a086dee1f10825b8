"""Where a request is sent, and what is remembered of where requests were sent."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whorl.errors import ConfigError
from whorl.router.prefix_index import BLOCK_BYTES, BLOCK_IDS, PrefixIndex, block_hashes, prompt_and_seed
from whorl.router.routing_policy import RoutingPolicy, Ticket


def text(seed: int, blocks: int) -> bytes:
    return random.Random(seed).randbytes(blocks * BLOCK_BYTES)


def policy(n: int, **settings: float) -> RoutingPolicy:
    made = RoutingPolicy(random.Random(0), **settings)  # type: ignore[arg-type]
    for i in range(n):
        made.add(f"r{i}")
    return made


# Chains


def test_a_chain_is_equal_as_far_as_the_prompts_are() -> None:
    a, b = text(1, 5), text(1, 5)[: 3 * BLOCK_BYTES] + text(2, 2)
    assert block_hashes(a)[:3] == block_hashes(b)[:3]
    assert set(block_hashes(a)[3:]).isdisjoint(block_hashes(b))
    assert len(block_hashes(a[:-1])) == 4, "a block that is not whole says nothing"
    assert block_hashes(a, b"one model")[0] != block_hashes(a, b"another")[0]
    assert block_hashes(text(1, 2)[BLOCK_BYTES:])[0] != block_hashes(text(1, 2))[1], (
        "a block's hash covers what stands before it"
    )
    ids = list(range(3 * BLOCK_IDS + 5))
    assert (
        len(block_hashes(ids)) == 3
        and block_hashes(ids)[:2] == block_hashes([*ids[: 2 * BLOCK_IDS], 7] + [0] * BLOCK_IDS)[:2]
    )


def test_the_prompt_is_found_in_every_form_of_the_api() -> None:
    long = "x" * 300
    chat = {"model": "m", "messages": [{"role": "user", "content": long}], "temperature": 0.1}
    assert prompt_and_seed(chat)[0] == b"<user>" + long.encode()
    assert prompt_and_seed(chat) == prompt_and_seed({**chat, "temperature": 0.9, "n": 3}), (
        "how to sample is not the prompt"
    )
    assert prompt_and_seed(chat)[1] != prompt_and_seed({**chat, "model": "n"})[1]
    assert prompt_and_seed({**chat, "tools": [{"name": "f"}]})[0] != prompt_and_seed(chat)[0]
    assert prompt_and_seed({"prompt": long})[0] == long.encode()
    assert prompt_and_seed({"prompt": [3, 4]})[0] == [3, 4]
    assert prompt_and_seed({"prompt": [[3, 4], [5]]})[0] == [3, 4]
    assert prompt_and_seed({"input": long})[0] == long.encode()
    assert prompt_and_seed({"prompt": ["a", "b"]})[0] == b"ab"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=3), x, max_size=3),
        max_leaves=8,
    )
)
def test_no_body_breaks_the_router(value: object) -> None:
    for key in ("messages", "prompt", "input", "tools", "model"):
        block_hashes(*prompt_and_seed({"messages": [value], key: value}))
        block_hashes(*prompt_and_seed({key: value}))


# The index, against a list that is searched


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6), st.integers(0, 3)), max_size=30),
    st.integers(0, 12),
)
def test_the_index_never_keeps_a_block_without_what_precedes_it(
    asked: list[tuple[int, int, int]], capacity: int
) -> None:
    index, sent = PrefixIndex(capacity), []
    for seed, blocks, evicted in asked:
        hashes = block_hashes(text(seed, blocks))
        index.touch(hashes)
        assert index.match_length(hashes) == min(len(hashes), capacity), "what was sent last is there"
        sent.append(hashes)
        index.evict(evicted)
        assert len(index) <= capacity
        reached = {h for old in sent for h in old[: index.match_length(old)]}
        assert len(reached) == len(index), "every block that is kept lies on a prefix that is kept"


def test_the_oldest_prefix_is_forgotten_first_and_from_its_end() -> None:
    index, old, new = PrefixIndex(6), block_hashes(text(1, 4)), block_hashes(text(2, 4))
    index.touch(old)
    index.touch(new)
    assert (index.match_length(old), index.match_length(new)) == (2, 4)
    index.evict(1)
    assert (index.match_length(old), index.match_length(new)) == (1, 4)


# The policy


@settings(max_examples=60)
@given(
    st.integers(1, 5),
    st.floats(0, 2),
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 20)), min_size=1, max_size=80),
    st.integers(0, 2**32),
)
def test_no_replica_gets_more_than_its_bound_and_the_books_balance(
    n: int, slack: float, floor: int, asked: list[tuple[int, int]], seed: int
) -> None:
    rng = random.Random(seed)
    made = policy(n, load_slack=slack, min_limit=floor)
    open_tickets: list[Ticket] = []
    for kind, blocks in asked:
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
        assert made.loads[choice.replica].running + 1 <= max(
            floor, math.ceil((1 + slack) * (under_way + 1) / len(allowed))
        )
        assert choice.cached_blocks == made.indexes[choice.replica].match_length(hashes)
        open_tickets.append(made.begin(hashes, choice.replica))
        assert sum(load.running for load in made.loads.values()) == len(open_tickets)
    for ticket in open_tickets:
        made.end(ticket)
    assert all((x.running, x.waiting, x.pending_blocks) == (0, 0, 0) for x in made.loads.values())


def test_a_prompt_goes_back_to_where_its_prefix_is_until_that_costs_more_than_computing_it() -> None:
    made = policy(3, min_limit=100)
    first = made.choose(block_hashes(text(1, 10)), made.loads)
    assert first.reason == "power_of_two"
    made.end(made.begin(block_hashes(text(1, 10)), first.replica))
    longer = block_hashes(text(1, 10) + text(9, 2))
    for _ in range(5):
        choice = made.choose(longer, made.loads)
        assert (choice.replica, choice.cached_blocks, choice.blocks, choice.reason) == (
            first.replica,
            10,
            12,
            "prefix",
        )
    # Ten blocks are saved there: nine running requests do not outweigh them, eleven do.
    tickets = [made.begin((), first.replica) for _ in range(9)]
    for ticket in tickets:
        made.mark_prefilled(ticket)
    assert made.choose(longer, made.loads).replica == first.replica
    for _ in range(2):
        made.mark_prefilled(made.begin((), first.replica))
    assert made.choose(longer, made.loads).replica != first.replica


def test_what_waits_counts_until_it_is_answered() -> None:
    made = policy(2)
    ticket = made.begin(block_hashes(text(1, 50)), "r0")
    assert made.cost("r0", 0) == 1 + 50 + 1  # the blocks, the rest of the prompt, the request itself
    made.mark_prefilled(ticket)
    assert made.cost("r0", 0) == 1
    made.end(ticket)
    assert made.cost("r0", 0) == 0


def test_what_a_replica_lost_is_forgotten() -> None:
    made = policy(1)
    hashes = block_hashes(text(1, 8))
    made.end(made.begin(hashes, "r0"))
    made.evict_prefixes("r0", 3)
    assert made.choose(hashes, ["r0"]).cached_blocks == 5
    made.clear_prefixes("r0")
    assert made.choose(hashes, ["r0"]).cached_blocks == 0


def test_two_choices_are_nearly_as_even_as_looking_at_all() -> None:
    made, n, each = policy(8, min_limit=10**6), 8, 200
    for _ in range(n * each):
        made.begin((), made.choose((), made.loads).replica)
    runs = [x.running for x in made.loads.values()]
    assert max(runs) - min(runs) <= 10  # drawn one by one without a second choice it is about 80
    one = random.Random(0)
    blind = [0] * n
    for _ in range(n * each):
        blind[one.randrange(n)] += 1
    assert max(blind) - min(blind) > 20


def test_the_same_seed_makes_the_same_choices_however_the_replicas_are_ordered() -> None:
    def run(names: list[str]) -> list[str]:
        made, chosen = policy(4), []
        for i in range(40):
            chosen.append(made.choose(block_hashes(text(i % 5, 3)), names).replica)
            made.begin(block_hashes(text(i % 5, 3)), chosen[-1])
        return chosen

    assert run(["r0", "r1", "r2", "r3"]) == run(["r3", "r1", "r0", "r2"])


def test_a_request_that_outlives_its_replica_is_not_booked_to_the_next_of_that_name() -> None:
    made = policy(2)
    ticket = made.begin((), "r0")
    made.remove("r0")
    made.add("r0")
    made.end(ticket)
    assert made.loads["r0"].running == 0


def test_bad_use_is_named() -> None:
    with pytest.raises(ConfigError, match="load_slack -1"):
        policy(1, load_slack=-1)
    made = policy(2)
    with pytest.raises(ConfigError, match="no replica to choose"):
        made.choose((), [])
    with pytest.raises(ConfigError, match="'r9'"):
        made.choose((), ["r9"])
    with pytest.raises(ConfigError, match="twice"):
        made.add("r1")
