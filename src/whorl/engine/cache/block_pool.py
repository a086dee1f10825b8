"""Block pool: reference counts, contents and eviction of KV cache pages.

The cache of a layer group is `n_pages` pages of `page_size` positions (Kwon et al. 2023, PagedAttention, arXiv:2309.06180).
A page is in one of three states:

    free      not referenced, without reusable contents
    used      referenced by `ref_counts` sequences; only a page with one reference that is not full is written
    cached    not referenced, but its contents have a hash, so a prompt with this prefix can reuse it

The hash of a full page covers its ids and the hash of the page before it, so it identifies the whole prefix
(`prefix_hashes`). The seed of the chain covers the adapter and the version of the weights. Hashes are 128-bit blake2b, so
that a user cannot construct two prompts that collide and read another user's text.

The subtle point is the eviction order. Free pages are used first, then cached pages, least recently released first. A
sequence releases its last page first, since a page is useless without the pages before it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from whorl.engine.prefix_hash import PageHash
from whorl.errors import ConfigError

EVICTED = -1  # entry of a sequence's page list: a page freed because it is outside of the window


class BlockPool:
    """The pages of one group of layers.

    Args:
        n_pages: number of pages.
        page_size: positions per page.

    Raises:
        ConfigError: one of them is below 1.
    """

    def __init__(self, n_pages: int, page_size: int) -> None:
        for name, value in (("n_pages", n_pages), ("page_size", page_size)):
            if value < 1:
                raise ConfigError(f"{name} is {value}", expected="at least 1")
        self.n_pages, self.page_size = n_pages, page_size
        self.ref_counts = [0] * n_pages
        self.page_hashes: list[PageHash | None] = [None] * n_pages
        self._free = list(range(n_pages - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently released first
        self._page_of_hash: dict[PageHash, int] = {}
        self.n_evicted = 0  # cached pages evicted since the start

    @property
    def n_available(self) -> int:
        """Pages that `allocate` can return now."""
        return len(self._free) + len(self._cached)

    @property
    def n_cached(self) -> int:
        """Unreferenced pages with reusable contents."""
        return len(self._cached)

    @property
    def n_used(self) -> int:
        """Referenced pages."""
        return self.n_pages - self.n_available

    def allocate(self, n: int) -> list[int] | None:
        """Return n pages of undefined contents with one reference each; None (and no change) if there are too few."""
        if n > self.n_available:
            return None
        pages = []
        for _ in range(n):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._cached.popitem(last=False)
                self._invalidate(page)
                self.n_evicted += 1
            self.ref_counts[page] = 1
            pages.append(page)
        return pages

    def lookup(self, hashes: Iterable[PageHash]) -> list[int]:
        """Return the pages of the longest cached prefix; adds no reference."""
        pages: list[int] = []
        for page_hash in hashes:
            page = self._page_of_hash.get(page_hash)
            if page is None:
                break
            pages.append(page)
        return pages

    def page_of(self, page_hash: PageHash) -> int | None:
        """Return the page with these contents, or None."""
        return self._page_of_hash.get(page_hash)

    def acquire(self, pages: Iterable[int]) -> None:
        """Add a reference to each of `pages`, which are used or cached."""
        for page in pages:
            if self.ref_counts[page] == 0:
                del self._cached[page]
            self.ref_counts[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Remove a reference from each of `pages` (in text order; `EVICTED` is skipped)."""
        for page in reversed(pages):
            if page == EVICTED:
                continue
            self.ref_counts[page] -= 1
            if self.ref_counts[page] == 0:
                if self.page_hashes[page] is None:
                    self._free.append(page)
                else:
                    self._cached[page] = None

    def mark_full(self, page: int, page_hash: PageHash) -> None:
        """Register a full page under the hash of its contents. If another page has equal contents, that one stays."""
        if page_hash not in self._page_of_hash:
            self.page_hashes[page] = page_hash
            self._page_of_hash[page_hash] = page

    def invalidate_all(self) -> None:
        """Drop all hashes: no cached page is reused (the weights have changed)."""
        self.page_hashes = [None] * self.n_pages
        self._page_of_hash.clear()
        self._free += self._cached
        self._cached.clear()

    def _invalidate(self, page: int) -> None:
        contents = self.page_hashes[page]
        if contents is not None:
            del self._page_of_hash[contents]
            self.page_hashes[page] = None

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Compare the accounting with the sequences' page lists.

        Raises:
            RuntimeError: a page is leaked, has a wrong count, is in two states, or is registered under a wrong hash.
        """
        n_holders = [0] * self.n_pages
        for pages in holders:
            for page in pages:
                if page != EVICTED:
                    n_holders[page] += 1
        free = set(self._free)
        errors = []
        for page in range(self.n_pages):
            states = (page in free) + (page in self._cached) + (self.ref_counts[page] > 0)
            contents = self.page_hashes[page]
            if n_holders[page] != self.ref_counts[page]:
                errors.append(
                    f"page {page} has {self.ref_counts[page]} references, and {n_holders[page]} page lists contain it"
                )
            elif states != 1:
                errors.append(f"page {page} is in {states} states")
            elif contents is not None and self._page_of_hash.get(contents) != page:
                errors.append(f"page {page} is registered under another page's hash")
            elif page in self._cached and contents is None:
                errors.append(f"page {page} is cached without a hash")
        if len(free) != len(self._free) or len(self._page_of_hash) != sum(
            h is not None for h in self.page_hashes
        ):
            errors.append("a page is free twice, or a hash has no page")
        if errors:
            raise RuntimeError("the cache's page accounting is wrong: " + "; ".join(errors[:5]))
