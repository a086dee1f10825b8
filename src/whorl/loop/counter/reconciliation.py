"""Counts again from the memberships: the check that the aggregate still follows from the relationship."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field, replace

from whorl.log.partitioning import partition_of
from whorl.loop.counter.cache import CountCache
from whorl.loop.counter.likes import NO_COUNT, THUMBS, LikesView, sum_cells
from whorl.loop.events import FEEDBACK
from whorl.loop.streams.store import ViewStore
from whorl.loop.streams.view import END, ViewState

PAGE = 10_000  # rows of one query
_DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class Reconciliation:
    """answers: how many were counted. wrong: answer -> count in the store and from memberships. stale: cached answers."""

    answers: int = 0
    wrong: dict[str, tuple[dict[str, int], dict[str, int]]] = field(default_factory=dict)
    stale: list[str] = field(default_factory=list)


def reconcile_counts(store: ViewStore, cache: CountCache | None = None) -> Reconciliation:
    """Repair every count that differs from its memberships, and every entry of the cache that differs from its count.

    One transaction: folds of this view wait until it ends.
    """
    view, found = LikesView.name, Reconciliation()
    with store.transaction():
        cells = _count_cells(store, len([topic for topic, _ in store.offsets(view) if topic == FEEDBACK]))
        state, known = ViewState(store, view), store.scan(view, "counts")
        for answer in sorted(cells.keys() | known.keys()):
            stored, right = known.get(answer, NO_COUNT), dict[str, list[int]]()
            for p in sorted({*stored["cells"], *cells[answer]}):
                changes, *thumbs = stored["cells"].get(p, (0, 0, 0))
                right[p] = [changes + (thumbs != cells[answer][p]), *cells[answer][p]]
            known[answer] = sum_cells(right) | {"cells": right}
            if known[answer] != stored:
                found.wrong[answer] = {name: stored[name] for name in ("likes", "dislikes")}, sum_cells(right)
                state.put("counts", answer, known[answer])
        store.write(view, state)
    cached = cache.get(list(known)) if cache is not None else {}
    found.stale.extend(a for a, own in cached.items() if sum_cells(own) != sum_cells(known[a]["cells"]))
    if cache is not None:
        cache.fill({answer: known[answer]["cells"] for answer in found.stale})
    return replace(found, answers=len(known))


def _count_cells(store: ViewStore, partitions: int) -> dict[str, dict[str, list[int]]]:
    """Return answer -> partition -> likes and dislikes, of all memberships."""
    cells: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
    high = END
    while page := store.scan(LikesView.name, "membership", "", high, PAGE):
        high = min(page)
        for key, row in page.items():
            actor, end = _DECODER.raw_decode(key)
            if row["kind"] != "none":
                cells[key[end:]][str(partition_of(actor, partitions))][THUMBS.index(row["kind"])] += 1
    return cells
