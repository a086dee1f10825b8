"""Page accounting against a naive model, over random histories."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whorl.engine.cache.block_pool import EVICTED, BlockPool
from whorl.engine.cache.cache_manager import KVCacheGroup, KVCacheManager
from whorl.engine.prefix_hash import prefix_hashes
from whorl.engine.request import Request
from whorl.engine.sequence import Sequence
from whorl.errors import ConfigError

History = list[tuple[list[int], bool]]  # texts, and whether an earlier one is released before
TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=20)


def sequence(ids: list[int], number: int = 0) -> Sequence:
    made = Sequence(Request(id=str(number), ids=tuple(ids)), number, list(ids), 0)
    made.slot = number % 8
    return made


def manager(*groups: tuple[int | None, int], budget: int = 8) -> KVCacheManager:
    """A cache for 8 sequences of 24 positions; each group has a window and a number of pages of 2 positions."""
    made = [KVCacheGroup(window, BlockPool(n_pages, 2)) for window, n_pages in groups]
    return KVCacheManager(made, 8, 24, max_num_batched_tokens=budget)


def fill(cache: KVCacheManager, current: Sequence) -> bool:
    """Admit a sequence and compute all of it; False if the cache is full."""
    cache.acquire_prefix(current)
    cache.bind(current)
    if not cache.allocate_slots(current, len(current.ids)):
        cache.release(current)
        return False
    current.n_computed = len(current.ids)
    cache.commit_full_pages(current)
    return True


@given(st.lists(st.tuples(TEXTS, st.booleans()), max_size=30), st.sampled_from([None, 3, 6]))
def test_pages_are_never_lost_or_overwritten(history: History, window: int | None) -> None:
    cache = manager((None, 12), (window, 12))
    live: list[Sequence] = []
    contents: dict[tuple[int, int], list[int]] = {}  # text last written to each page of a group
    for number, (ids, leaves) in enumerate(history):
        if leaves and live:
            cache.release(live.pop(len(ids) % len(live)))
        current = sequence(ids, number)
        if len(live) < 8:
            current.slot = min(set(range(8)) - {h.slot for h in live})
            if fill(cache, current):
                live.append(current)
                assert current.n_computed == len(ids)
                places = [(g, at) for g, pages in enumerate(current.pages) for at in range(len(pages))]
                for group, at in places:
                    page = current.pages[group][at]
                    before = ids[: (at + 1) * 2]
                    if page != EVICTED and sum(page in h.pages[group] for h in live) > 1:
                        # A shared page has the same prefix.
                        assert len(before) == (at + 1) * 2 and contents[group, page] == before
                    contents[group, page] = before
        cache.check_integrity(live)
    for current in live:
        cache.release(current)
    cache.check_integrity([])
    assert all(group.pool.n_used == 0 for group in cache.groups)


@given(TEXTS, TEXTS)
def test_acquire_prefix_returns_whole_pages_below_prompt(first: list[int], second: list[int]) -> None:
    cache, current = manager((None, 40)), sequence(first)
    fill(cache, current)
    cache.release(current)
    common = sum(itertools.accumulate((a == b for a, b in zip(first, second, strict=False)), min))
    assert cache.acquire_prefix(sequence(second, 1)) == min(common, len(second) - 1) // 2 * 2


def test_windowed_group_needs_only_pages_in_window() -> None:
    cache, ids = manager((None, 20), (4, 4), budget=4), list(range(12))
    current = sequence(ids)
    cache.acquire_prefix(current)
    cache.bind(current)
    for stop in (4, 8, 12):  # the window's pool holds a third of the text
        assert cache.allocate_slots(current, stop)
        current.n_computed = stop
        cache.commit_full_pages(current)
    assert current.pages[1][:4] == [EVICTED] * 4 and len(current.pages[0]) == 6
    cache.release(current)
    again = sequence(ids, 1)
    assert cache.acquire_prefix(again) == 10
    assert again.pages[1][:3] == [EVICTED] * 3 and EVICTED not in again.pages[1][3:]
    cache.bind(again)
    cache.check_integrity([again])


def test_eviction_is_lru_and_last_page_of_prefix_first() -> None:
    cache = manager((None, 6))
    old, new = sequence([1] * 6, 0), sequence([2] * 6, 1)
    assert fill(cache, old) and fill(cache, new)
    cache.release(old)
    cache.release(new)
    pool = cache.groups[0].pool
    assert pool.n_cached == 6 and pool.allocate(2) is not None and pool.n_evicted == 2
    # The last two pages of the old text were evicted.
    assert len(pool.lookup(prefix_hashes(b"", [1] * 6, 2, []))) == 1
    assert len(pool.lookup(prefix_hashes(b"", [2] * 6, 2, []))) == 3
    assert pool.allocate(5) is None and pool.n_available == 4


def test_check_integrity_detects_wrong_accounting() -> None:
    cache, current = manager((None, 6)), sequence([1, 2, 3])
    fill(cache, current)
    cache.check_integrity([current])
    pool = cache.groups[0].pool
    counts, free = list(pool.ref_counts), list(pool._free)
    for damaged in (([3, *counts[1:]], free), (counts, free[:-1]), (counts, [*free, current.pages[0][0]])):
        pool.ref_counts, pool._free = damaged
        with pytest.raises(RuntimeError, match="page accounting is wrong"):
            cache.check_integrity([current])
    pool.ref_counts, pool._free = counts, free
    with pytest.raises(RuntimeError, match="references, and 0 page lists"):
        cache.check_integrity([])
    with pytest.raises(ConfigError, match="page_size is 0"):
        BlockPool(1, 0)
