"""Which pages a sequence holds, over all layer groups: finding, growing, sealing, giving back.

Layers that forget alike share their books: one group for the layers that see everything, one for each length of window
(`Group`). A page number of a group names one page in each of its layers. A sequence has a list of pages for each group; what
a window has left behind is given back at once (`pool.NOWHERE` takes its place), so such a layer costs a window, not a text.

A prompt's beginning is found page by page. The subtle part is where several groups agree: layers that see everything
need all pages up to there, those with a window w only what the next position sees, the last w - 1 positions. And never
the whole prompt: its last position has to be computed anyway, since somebody wants its logits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from whorl.engine.cache.block_pool import EVICTED, BlockPool
from whorl.engine.sequence import Sequence


@dataclass(frozen=True)
class KVCacheGroup:
    """Layers that forget alike. window: positions that a query sees, itself included; None for all."""

    window: int | None
    pool: BlockPool

    def first_visible_page(self, position: int) -> int:
        """The first page that `position` or a later one may look into."""
        return 0 if self.window is None else max(0, position - self.window + 1) // self.pool.page_size


class KVCacheManager:
    """The books of all groups.

    Args:
        groups: at least one; `page_size` is the same in all.
        max_sequences, max_length: sizes of `tables`.
        chunk: positions that a sequence may enter in one step.
        share: whether beginnings are looked up at all (not if some layers keep a state that is not in pages).
        share_outputs: whether pages that hold output are found again too, as the beginning of the next turn.
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
        self.page_size = groups[0].pool.page_size
        per_sequence = -(-max_model_len // self.page_size)
        # Row `slot` is the sequence's list of pages, ready to be handed to a kernel.
        self.page_tables = [np.zeros((max_num_seqs, per_sequence), np.int32) for _ in groups]
        self.has_windows = any(group.window is not None for group in groups)
        self.hit_tokens = self.queried_tokens = (
            0  # positions of prompts that were found, and that were looked for
        )

    def acquire_prefix(self, sequence: Sequence) -> int:
        """Holds the pages of the longest beginning that is known: -> positions found, 0 or whole pages."""
        sequence.pages, sequence.n_committed_pages = [[] for _ in self.groups], 0
        found = self._longest_cached_prefix(sequence) if self.enable_prefix_caching else 0
        scores = sequence.request.prompt_log_probs and not sequence.n_output
        if scores and found * self.page_size > len(sequence.prompt_log_probs):
            found = 0  # what is not computed is not scored
        for group, pages in zip(self.groups, sequence.pages, strict=True):
            first = group.first_visible_page(found * self.page_size)
            pages += [EVICTED] * first
            names = sequence.page_hashes[first:found]
            pages += [page for name in names if (page := group.pool.page_of(name)) is not None]
            group.pool.acquire(pages[first:])
        sequence.n_committed_pages = found
        sequence.n_computed = found * self.page_size
        return sequence.n_computed

    def _longest_cached_prefix(self, sequence: Sequence) -> int:
        """Pages of the longest beginning that every group knows enough of."""
        names = sequence.compute_page_hashes(self.page_size)[: (len(sequence.ids) - 1) // self.page_size]
        most = len(names)
        for group in self.groups:
            if group.window is None:
                most = min(most, len(group.pool.lookup(names[:most])))
        while most:
            missing = 0
            for group in self.groups:
                for page in range(group.first_visible_page(most * self.page_size), most):
                    if group.pool.page_of(names[page]) is None:
                        missing = page + 1
            if not missing:
                break
            # What is missing is missing for every beginning that sees it: only one that ends at or before it can do.
            most = min(most, missing) - 1
        return most

    def pages_needed(self, sequence: Sequence, stop: int) -> list[int]:
        """Pages of each group that the positions up to `stop` lack."""
        need = -(-stop // self.page_size)
        return [max(0, need - len(pages)) for pages in sequence.pages]

    def allocate_slots(self, sequence: Sequence, stop: int) -> bool:
        """Takes the pages that the positions up to `stop` lack, or none at all; False if there are too few."""
        lacking = self.pages_needed(sequence, stop)
        if not any(lacking):
            return True
        if any(n > g.pool.n_available for n, g in zip(lacking, self.groups, strict=True)):
            return False
        for table, group, pages, n in zip(
            self.page_tables, self.groups, sequence.pages, lacking, strict=True
        ):
            taken = group.pool.allocate(n) or []
            table[sequence.slot, len(pages) : len(pages) + n] = taken
            pages += taken
        return True

    def bind(self, sequence: Sequence) -> None:
        """Writes the pages of a sequence that has just been given a slot into the tables."""
        for table, pages in zip(self.page_tables, sequence.pages, strict=True):
            table[sequence.slot, : len(pages)] = [max(page, 0) for page in pages]

    def commit_full_pages(self, sequence: Sequence) -> None:
        """After a step: full pages become known, pages behind every window are given back."""
        full = sequence.n_computed // self.page_size
        if not self.cache_outputs:
            full = min(full, sequence.n_prompt // self.page_size)
        if self.enable_prefix_caching and full > sequence.n_committed_pages:
            names = sequence.compute_page_hashes(self.page_size)
            for group, pages in zip(self.groups, sequence.pages, strict=True):
                for page in range(sequence.n_committed_pages, full):
                    if pages[page] != EVICTED:
                        group.pool.mark_full(pages[page], names[page])
            sequence.n_committed_pages = full
        self.free_out_of_window(sequence)

    def free_out_of_window(self, sequence: Sequence) -> None:
        """Gives back the pages that no later position of a window sees."""
        for group, pages in zip(self.groups, sequence.pages, strict=True):
            if group.window is None:
                continue
            page = group.first_visible_page(sequence.n_computed) - 1
            left = []
            while page >= 0 and pages[page] != EVICTED:
                left.append(pages[page])
                pages[page] = EVICTED
                page -= 1
            group.pool.release(left[::-1])

    def release(self, sequence: Sequence) -> None:
        """Gives back all pages."""
        for group, pages in zip(self.groups, sequence.pages, strict=True):
            group.pool.release(pages)
        sequence.pages, sequence.n_committed_pages = [[] for _ in self.groups], 0

    def fits(self, length: int) -> bool:
        """Whether a text of `length` positions could be held, were it alone."""
        for group in self.groups:
            # A window's pages are given back after a step: before, they stand beside those of the step itself.
            held = (
                length
                if group.window is None
                else min(length, group.window + self.max_num_batched_tokens + self.page_size)
            )
            if -(-held // self.page_size) > group.pool.n_pages:
                return False
        return True

    def invalidate_all(self) -> None:
        """No beginning is to be found again."""
        for group in self.groups:
            group.pool.invalidate_all()

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raises RuntimeError when books and sequences disagree (`BlockPool.check_integrity`)."""
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
                    raise RuntimeError(f"the page table of request {s.request.id!r} is not its list of pages")
                if s.status.value == "running" and len(pages) * self.page_size < s.n_computed:
                    raise RuntimeError(f"request {s.request.id!r} has fewer pages than positions")
