"""A prefix that several requests share is computed once, and long lists of requests enter the engine in parts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.support.engine.parity import config, decoder, drain, request

from whorl.engine.engine import Engine
from whorl.engine.generation import QUEUED
from whorl.engine.request import Request

EXAMPLES = list(range(1, 21))  # five pages of 4


def questions(n: int, n_choices: int = 4) -> list[Request]:
    """Choices of three ids after shared examples and a question of two pages."""
    asked = [[*EXAMPLES, *range(30 + q, 38 + q)] for q in range(n)]
    return [
        request(f"{q} {c}", [*ids, 40 + c, 44, 45], score_from=len(ids))
        for q, ids in enumerate(asked)
        for c in range(n_choices)
    ]


def scores(engine: Engine, requests: Sequence[Request]) -> dict[str, tuple[float, ...]]:
    return {delta.request_id: delta.prompt_log_probs for delta in engine.stream(requests)}


@pytest.mark.parametrize("budget", [7, 40, 512])
def test_examples_and_questions_are_read_once(budget: int) -> None:
    engine = Engine(decoder(), config(max_num_seqs=16, max_num_batched_tokens=budget, kv_cache_tokens=512))
    found = scores(engine, questions(3))
    # The first choice of a question computes what is new and 2 of 3 ids: the last one is only a target. The others compute
    # 6: the page of the first scored position, and 2.
    assert engine.stats.prompt_tokens == (20 + 8 + 2) + 2 * (8 + 2) + 9 * 6
    apart = Engine(decoder(), config(enable_prefix_caching=False))
    expected = scores(apart, questions(3))
    assert apart.stats.prompt_tokens == 12 * 30
    assert found.keys() == expected.keys()
    assert all(found[name] == pytest.approx(expected[name], abs=1e-4) for name in found)


def test_waiting_for_a_prefix_keeps_the_turn() -> None:
    engine = Engine(decoder(), config(max_num_seqs=2, max_num_batched_tokens=64))
    for name, ids in (("first", EXAMPLES), ("same", EXAMPLES), ("other", EXAMPLES[::-1])):
        engine.add(request(name, ids, max_tokens=4))
    engine.step()
    assert [s.request.id for s in engine.scheduler.running] == ["first"]
    engine.step()
    assert [s.request.id for s in engine.scheduler.running] == ["first", "same"]
    engine.check_integrity()
    assert drain(engine, []).keys() == {"first", "same", "other"}


def test_list_of_requests_enters_in_parts_unless_ranks_differ() -> None:
    engine = Engine(decoder(), config(max_num_seqs=2))
    for ranks, most in (([0] * 40, 2 * QUEUED), (list(range(40)), 40)):
        requests = [
            request(f"{n}", [n + 1, 2, 3], max_tokens=2, priority=rank) for n, rank in enumerate(ranks)
        ]
        ended = []
        largest = 0
        for delta in engine.stream(requests):
            largest = max(largest, len(engine.sequences()))
            ended += [delta.request_id] * (delta.finish_reason is not None)
        assert sorted(ended, key=int) == [f"{n}" for n in range(40)] and most - 2 <= largest <= most


def test_counters_of_clients_follow_unfinished_requests() -> None:
    engine = Engine(decoder(), config(max_num_seqs=1))
    for name in ("a", "b"):
        engine.add(request(name, EXAMPLES, max_tokens=2, client=name))
    assert engine.abort("b") and not engine.abort("b")
    drain(engine, [])
    engine.add(request("c", EXAMPLES, max_tokens=2, client="c"))
    assert set(engine.scheduler.virtual_counters) == {"c"}
