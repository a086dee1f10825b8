"""KV cache manager: prefix lookup, allocation, registration and release of a sequence's pages, over all layer groups.

Layers with the same window share one group (`KVCacheGroup`): one for full attention, one per window length. A page number
of a group means one page in each of its layers. A sequence has a page list per group. Pages outside of a window are freed
at once (`EVICTED` takes their place), so a windowed layer costs memory for its window only.

Cached prefixes are found page by page. The subtle point is the agreement between groups. Full attention needs all pages of
the prefix; a window of w needs only the last w - 1 positions. A prefix never covers the whole prompt, because the logits of
its last position have to be computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from whorl.engine.cache.block_pool import EVICTED, BlockPool
from whorl.engine.prefix_hash import PageHash
from whorl.engine.sequence import Sequence


@dataclass(frozen=True)
class KVCacheGroup:
    """Layers with the same window. window: positions that a query sees, itself included; None for all."""

    window: int | None
    pool: BlockPool

    def first_visible_page(self, position: int) -> int:
        """First page that a query at `position` or later may read."""
        return 0 if self.window is None else max(0, position - self.window + 1) // self.pool.page_size


class KVCacheManager:
    """Page accounting of all groups.

    Args:
        groups: at least one; `page_size` is the same in all.
        max_num_seqs, max_model_len: sizes of `page_tables`.
        max_num_batched_tokens: positions that a sequence may add in one step.
        enable_prefix_caching: whether prefixes are looked up; not possible if some layers keep recurrent states.
        cache_outputs: whether pages of output are reused too, as the prefix of the next turn.
    """

    def __init__(
        self,
        groups: list[KVCacheGroup],
        max_num_seqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        enable_prefix_caching: bool = True,
        cache_outputs: bool = True,
    ) -> None:
        self.groups, self.enable_prefix_caching, self.cache_outputs, self.max_num_batched_tokens = (
            groups,
            enable_prefix_caching,
            cache_outputs,
            max_num_batched_tokens,
        )
        self.page_size, self.max_model_len = groups[0].pool.page_size, max_model_len
        per_sequence = -(-max_model_len // self.page_size)
        # Row `slot` is the sequence's page list, in the form that kernels read.
        self.page_tables = [np.zeros((max_num_seqs, per_sequence), np.int32) for _ in groups]
        self.has_windows = any(group.window is not None for group in groups)
        self.hit_tokens = self.queried_tokens = 0  # prompt positions found in the cache, and looked up

    def acquire_prefix(self, sequence: Sequence) -> int:
        """Reference the pages of the longest cached prefix; returns its positions, 0 or whole pages."""
        sequence.pages, sequence.n_committed_pages = [[] for _ in self.groups], 0
        n_found = 0
        if self.enable_prefix_caching:
            hashes = sequence.compute_page_hashes(self.page_size)[: self.max_cached_pages(sequence)]
            n_found = self.longest_prefix(hashes)
        for group, pages in zip(self.groups, sequence.pages, strict=True):
            first = group.first_visible_page(n_found * self.page_size)
            pages += [EVICTED] * first
            hashes = sequence.page_hashes[first:n_found]
            pages += [page for page_hash in hashes if (page := group.pool.page_of(page_hash)) is not None]
            group.pool.acquire(pages[first:])
        sequence.n_committed_pages = n_found
        sequence.n_computed = n_found * self.page_size
        return sequence.n_computed

    def longest_prefix(self, hashes: list[PageHash]) -> int:
        """Pages of the longest prefix of `hashes` for which every group has the pages that it needs."""
        n_pages = len(hashes)
        for group in self.groups:
            if group.window is None:
                n_pages = min(n_pages, len(group.pool.lookup(hashes[:n_pages])))
        while n_pages:
            missing = 0
            for group in self.groups:
                for page in range(group.first_visible_page(n_pages * self.page_size), n_pages):
                    if group.pool.page_of(hashes[page]) is None:
                        missing = page + 1
            if not missing:
                break
            # A missing page rules out every prefix that reads it: shorten the prefix to that page.
            n_pages = min(n_pages, missing) - 1
        return n_pages

    def max_cached_pages(self, sequence: Sequence) -> int:
        """Pages that may come from the cache: positions that still need logits are computed."""
        most = len(sequence.ids) - 1
        if sequence.scores is not None and not sequence.n_output:
            most = min(most, sequence.scores.first + len(sequence.scores.log_probs))
        return most // self.page_size

    def pages_to_commit(self, sequence: Sequence, stop: int) -> list[PageHash]:
        """Return the hashes of the pages that can be shared after the positions up to `stop` are computed."""
        full = stop // self.page_size
        if not self.enable_prefix_caching or full <= sequence.n_computed // self.page_size:
            return []
        if not self.cache_outputs:
            full = min(full, sequence.n_prompt // self.page_size)
        return sequence.compute_page_hashes(self.page_size)[sequence.n_computed // self.page_size : full]

    def shares_pages(self, sequence: Sequence, pages: set[PageHash]) -> bool:
        """Whether some of `pages` belong to the prefix that the sequence may take from the cache."""
        if not pages or not self.enable_prefix_caching:
            return False
        hashes = sequence.compute_page_hashes(self.page_size)[: self.max_cached_pages(sequence)]
        return not pages.isdisjoint(hashes)

    def pages_needed(self, sequence: Sequence, stop: int) -> list[int]:
        """Missing pages of each group for the positions up to `stop`."""
        need = -(-stop // self.page_size)
        return [max(0, need - len(pages)) for pages in sequence.pages]

    def allocate_slots(self, sequence: Sequence, stop: int) -> bool:
        """Allocate the missing pages for the positions up to `stop`, or none; False if there are too few."""
        need = -(-stop // self.page_size)
        if all(len(pages) >= need for pages in sequence.pages):
            return True
        lacking = self.pages_needed(sequence, stop)
        if any(n > g.pool.n_available for n, g in zip(lacking, self.groups, strict=True)):
            return False
        for table, group, pages, n in zip(
            self.page_tables, self.groups, sequence.pages, lacking, strict=True
        ):
            new_pages = group.pool.allocate(n) or []
            table[sequence.slot, len(pages) : len(pages) + n] = new_pages
            pages += new_pages
        return True

    def bind(self, sequence: Sequence) -> None:
        """Write the page lists of a sequence with a new slot into the page tables."""
        for table, pages in zip(self.page_tables, sequence.pages, strict=True):
            table[sequence.slot, : len(pages)] = [max(page, 0) for page in pages]

    def commit_full_pages(self, sequence: Sequence) -> None:
        """After a step: register full pages, free pages outside of every window."""
        full = sequence.n_computed // self.page_size
        if not self.cache_outputs:
            full = min(full, sequence.n_prompt // self.page_size)
        if self.enable_prefix_caching and full > sequence.n_committed_pages:
            hashes = sequence.compute_page_hashes(self.page_size)
            for group, pages in zip(self.groups, sequence.pages, strict=True):
                for page in range(sequence.n_committed_pages, full):
                    if pages[page] != EVICTED:
                        group.pool.mark_full(pages[page], hashes[page])
            sequence.n_committed_pages = full
        self.free_out_of_window(sequence)

    def free_out_of_window(self, sequence: Sequence) -> None:
        """Free the pages that no later position of a window reads."""
        for group, pages in zip(self.groups, sequence.pages, strict=True):
            if group.window is None:
                continue
            page = group.first_visible_page(sequence.n_computed) - 1
            outside = []
            while page >= 0 and pages[page] != EVICTED:
                outside.append(pages[page])
                pages[page] = EVICTED
                page -= 1
            group.pool.release(outside[::-1])

    def release(self, sequence: Sequence) -> None:
        """Release all pages of a sequence."""
        for group, pages in zip(self.groups, sequence.pages, strict=True):
            group.pool.release(pages)
        sequence.pages, sequence.n_committed_pages = [[] for _ in self.groups], 0

    def longest_sequence(self) -> int:
        """Return the longest sequence, up to `max_model_len`, that an otherwise empty cache can hold."""
        low, high = 0, self.max_model_len
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.fits(middle) else (low, middle - 1)
        return low

    def fits(self, length: int) -> bool:
        """Whether an otherwise empty cache can hold `length` positions."""
        for group in self.groups:
            # A window's pages are freed after a step, so during it they exist in addition to the step's new pages.
            n_positions = (
                length
                if group.window is None
                else min(length, group.window + self.max_num_batched_tokens + self.page_size)
            )
            if -(-n_positions // self.page_size) > group.pool.n_pages:
                return False
        return True

    def invalidate_all(self) -> None:
        """Invalidate all cached prefixes."""
        for group in self.groups:
            group.pool.invalidate_all()

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise RuntimeError if accounting and sequences disagree (`BlockPool.check_integrity`)."""
        holders = list(sequences)
        for number, group in enumerate(self.groups):
            group.pool.check_integrity(s.pages[number] for s in holders if s.pages)
        for number, table in enumerate(self.page_tables):
            for s in holders:
                if s.slot < 0 or not s.pages:
                    continue
                pages = s.pages[number]
                written = table[s.slot, : len(pages)].tolist()
                if any(p not in (EVICTED, w) for p, w in zip(pages, written, strict=True)):
                    raise RuntimeError(
                        f"the page table of request {s.request.id!r} differs from its page list"
                    )
                if s.status.value == "running" and len(pages) * self.page_size < s.n_computed:
                    raise RuntimeError(f"request {s.request.id!r} has fewer pages than positions")
