"""Counts and memberships as pages read them: O(1) for each answer, from a cache or the store of views."""

from __future__ import annotations

from collections.abc import Sequence

from whorl.loop.counter.cache import CountCache, open_cache
from whorl.loop.counter.likes import NO_COUNT, LikesView, member_key, sum_cells
from whorl.loop.streams.store import ViewStore


class Counts:
    """Reads the view of likes. Its methods may be called from any thread.

    Raises:
        ViewsUnavailableError: the store does not answer.
    """

    def __init__(self, store: ViewStore, cache: CountCache) -> None:
        self.store, self.cache = store, cache

    @classmethod
    def open(cls, url: str, cache: str = "") -> Counts:
        """Open the store of views. cache: "" for one in this process, or redis://..."""
        return cls(ViewStore(url), open_cache(cache))

    def get(self, answers: Sequence[str]) -> dict[str, dict[str, int]]:
        """Return answer -> {"likes", "dislikes"} for answers of the form COMPLETION/CHOICE."""
        found = self.cache.get(answers)
        if missing := [answer for answer in answers if answer not in found]:
            rows = self.store.load(LikesView.name, "counts", missing)
            fresh = {answer: rows.get(answer, NO_COUNT)["cells"] for answer in missing}
            self.cache.fill(fresh)
            found |= fresh
        return {answer: sum_cells(found[answer]) for answer in answers}

    def mine(self, actor: str, answers: Sequence[str]) -> dict[str, str]:
        """Return answer -> "like", "dislike" or "none" of one actor."""
        keys = {answer: member_key(actor, answer) for answer in answers}
        rows = self.store.load(LikesView.name, "membership", list(keys.values()))
        return {answer: rows[key]["kind"] if key in rows else "none" for answer, key in keys.items()}

    def close(self) -> None:
        self.store.close()
