"""Pages of a cache: who holds them, what they contain, and which is given up first.

The cache of a layer group is `n_pages` pages of `page_size` positions (Kwon et al. 2023, PagedAttention, arXiv:2309.06180).
A page is in one of three states:

    free      nobody holds it and nothing in it is worth keeping
    held      `references` sequences read it; only a page with one holder that is not yet full is ever written
    cached    nobody holds it, but its contents are known by a hash: a prompt that begins so finds it again

A full page is known by a chained hash: of the ids in it and of the hash of the page before it, so one number stands for the
whole text up to there (`chain`). What else decides the contents (the adapter, the version of the weights) is the seed of the
chain. Hashes are of 128 bits and keyed by nothing: blake2b, so that nobody can make two prompts collide on purpose and read
another's text.

The subtle part is the order of giving up. Free pages go first, then cached ones, the least recently released first; and
of one sequence the last page is released first, since without the pages before it a page is of no use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from whorl.engine.prefix_hash import PageHash
from whorl.errors import ConfigError

EVICTED = -1  # in a sequence's list of pages: one that was given back, since a window left it behind


class BlockPool:
    """The pages of one group of layers.

    Args:
        n_pages, page_size: how many, of how many positions.

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
        self._cached: OrderedDict[int, None] = OrderedDict()  # the least recently released first
        self._page_of_hash: dict[PageHash, int] = {}
        self.n_evicted = 0  # cached pages given up, ever

    @property
    def n_available(self) -> int:
        """Pages that `take` could give now."""
        return len(self._free) + len(self._cached)

    @property
    def n_cached(self) -> int:
        """Pages that nobody holds and a prompt may find."""
        return len(self._cached)

    @property
    def n_used(self) -> int:
        """Pages that somebody holds."""
        return self.n_pages - self.n_available

    def allocate(self, n: int) -> list[int] | None:
        """n pages of unknown contents, held once each; None (and nothing taken) if there are not so many."""
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
        """The pages of the longest known beginning; nobody holds them for it yet."""
        pages: list[int] = []
        for one in hashes:
            page = self._page_of_hash.get(one)
            if page is None:
                break
            pages.append(page)
        return pages

    def page_of(self, page_hash: PageHash) -> int | None:
        """The page of that contents, if there is one."""
        return self._page_of_hash.get(page_hash)

    def acquire(self, pages: Iterable[int]) -> None:
        """One more holder for each of `pages`, which are held or cached."""
        for page in pages:
            if self.ref_counts[page] == 0:
                del self._cached[page]
            self.ref_counts[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One holder less for each of `pages` (in the order of the text; `NOWHERE` is passed over)."""
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
        """`page` is full, and this is what is in it. Of two pages with one contents the first stays known."""
        if page_hash not in self._page_of_hash:
            self.page_hashes[page] = page_hash
            self._page_of_hash[page_hash] = page

    def invalidate_all(self) -> None:
        """No page is to be found again (the weights have changed)."""
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
        """Compares the books with the sequences' own lists of pages.

        Raises:
            RuntimeError: a page is leaked, counted wrongly, in two states at once, or known by a name that is not its.
        """
        counted = [0] * self.n_pages
        for pages in holders:
            for page in pages:
                if page != EVICTED:
                    counted[page] += 1
        free = set(self._free)
        wrong = []
        for page in range(self.n_pages):
            states = (page in free) + (page in self._cached) + (self.ref_counts[page] > 0)
            contents = self.page_hashes[page]
            if counted[page] != self.ref_counts[page]:
                wrong.append(
                    f"page {page} has {self.ref_counts[page]} references and {counted[page]} holders"
                )
            elif states != 1:
                wrong.append(f"page {page} is in {states} states")
            elif contents is not None and self._page_of_hash.get(contents) != page:
                wrong.append(f"page {page} is known by a name that is not its own")
            elif page in self._cached and contents is None:
                wrong.append(f"page {page} is cached, and nothing is known of it")
        if len(free) != len(self._free) or len(self._page_of_hash) != sum(
            h is not None for h in self.page_hashes
        ):
            wrong.append("a page is free twice, or a name leads nowhere")
        if wrong:
            raise RuntimeError("the cache's books are wrong: " + "; ".join(wrong[:5]))
