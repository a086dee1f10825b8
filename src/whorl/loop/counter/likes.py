"""Likes as a view: who likes what, and how many do.

    membership   ACTOR ANSWER -> {"kind": "like" | "dislike" | "none", "ids": ids of the clicks}
    counts       ANSWER -> {"likes": n, "dislikes": n, "cells": {PARTITION: [changes, likes, dislikes]}}
    erased       ACTOR -> true

The last click in the order of the log wins. A click whose id was seen changes nothing, so a retry may come at any time,
also through a log that recognises no duplicates. A count changes once per answer and batch, in the transaction of the
memberships. An actor's clicks are in one partition, and a cell of the count has the part of one partition. Cells are those
of a PN-counter (Shapiro et al. 2011, "Conflict-free replicated data types"), so a cache may merge them in any order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from whorl.log.event import Event
from whorl.loop.events import FEEDBACK, FeedbackGiven
from whorl.loop.streams.view import END, FoldedView, ViewEffect, ViewItem, ViewState

THUMBS = ("like", "dislike", "none")
KEPT_IDS = 64  # newest ids of one actor and answer
NO_COUNT: dict[str, Any] = {"likes": 0, "dislikes": 0, "cells": {}}


@dataclass(frozen=True, slots=True)
class Click:
    """A thumb. kind: "erased" voids all of the actor's."""

    id: str
    actor: str
    answer: str
    kind: str


class LikesView(FoldedView):
    """See the top of this file. Its effects are the changed cells, with key ANSWER and value {"partition", "cell"}."""

    name, topics = "likes", (FEEDBACK,)

    def read(self, event: Event) -> Click | None:
        if event.type == "actor.erased":
            return Click(event.id, event.key, "", "erased")
        if event.type != "feedback.given" or event.data is None or event.data["kind"] not in THUMBS:
            return None
        given = FeedbackGiven(**event.data)
        return Click(event.id, given.actor, given.answer, given.kind)

    def apply(self, state: ViewState, items: Sequence[ViewItem]) -> Iterable[ViewEffect]:
        clicks: list[Click] = [item.value for item in items]
        state.load("membership", [member_key(c.actor, c.answer) for c in clicks if c.kind != "erased"])
        state.load("erased", [c.actor for c in clicks])
        deltas = dict[tuple[str, int], list[int]]()
        for item, click in zip(items, clicks, strict=True):
            for answer, before, after in _transitions(state, click):
                delta = deltas.setdefault((answer, item.record.partition), [0, 0, 0])
                delta[0] += 1
                for kind, amount in ((before, -1), (after, 1)):
                    if kind != "none":
                        delta[1 + (kind == "dislike")] += amount
        return _add_deltas(state, deltas)


def member_key(actor: str, answer: str) -> str:
    """Return the key of a membership. The actor is quoted, so that no actor's keys begin with another's."""
    return orjson.dumps(actor).decode() + answer


def _transitions(state: ViewState, click: Click) -> list[tuple[str, str, str]]:
    """Change the memberships; return (answer, kind before, kind after) of those that differ."""
    if state.get("erased", click.actor):
        return []
    if click.kind == "erased":
        state.put("erased", click.actor, True)
        prefix = member_key(click.actor, "")
        own = state.scan("membership", prefix, prefix + END)
        for key in own:
            state.put("membership", key, None)
        return [(key.removeprefix(prefix), row["kind"], "none") for key, row in own.items()]
    key = member_key(click.actor, click.answer)
    row = state.get("membership", key, {"kind": "none", "ids": []})
    if click.id in row["ids"]:
        return []
    state.put("membership", key, {"kind": click.kind, "ids": [*row["ids"], click.id][-KEPT_IDS:]})
    return [(click.answer, row["kind"], click.kind)] if row["kind"] != click.kind else []


def _add_deltas(state: ViewState, deltas: dict[tuple[str, int], list[int]]) -> list[ViewEffect]:
    state.load("counts", [answer for answer, _ in deltas])
    effects = []
    for (answer, partition), delta in sorted(deltas.items()):
        row = state.get("counts", answer, NO_COUNT)
        cell = [sum(pair) for pair in zip(row["cells"].get(str(partition), (0, 0, 0)), delta, strict=True)]
        cells = dict(sorted((row["cells"] | {str(partition): cell}).items()))
        state.put("counts", answer, sum_cells(cells) | {"cells": cells})
        effects.append(ViewEffect("count", answer, {"partition": str(partition), "cell": cell}))
    return effects


def sum_cells(cells: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Return likes and dislikes of the cells of all partitions."""
    return {"likes": sum(c[1] for c in cells.values()), "dislikes": sum(c[2] for c in cells.values())}
