"""The feed of logged completions, and who clicks: newest answers, votes of each rater, clicks by day and model.

    answers   TIME ID -> {"id", "model", "actor", "time", "pair", "arm", "partition", "offset"}
    raters    ACTOR -> answers that this actor gave feedback on
    voted     ACTOR ANSWER -> true          made      ACTOR TIME ID -> true
    days      START MODEL, KIND -> clicks, in windows of a day

Text is sealed in the log: a page opens the record at `partition` and `offset` with `ActorKeys`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from whorl.log.event import Event
from whorl.loop.counter.counts import Counts
from whorl.loop.counter.likes import member_key
from whorl.loop.events import COMPLETIONS, FEEDBACK, FeedbackGiven
from whorl.loop.streams.store import ViewStore
from whorl.loop.streams.view import END, FoldedView, ViewEffect, ViewItem, ViewState
from whorl.loop.streams.windows import StreamJoin, TumblingWindow, is_late

GRACE = 7 * 86400.0  # seconds; a phone that was offline for a week
DAY = 86400
SHOWN = ("id", "model", "actor", "pair", "arm")


class AnswersView(FoldedView):
    """See the top of this file."""

    name, topics = "answers", (COMPLETIONS, FEEDBACK)
    by_model = StreamJoin("models")
    by_day = TumblingWindow("days", DAY)

    def read(self, event: Event) -> dict[str, Any] | FeedbackGiven | None:
        if event.type == "completion.made" and event.data is not None:
            found = {name: str(event.data.get(name) or "") for name in SHOWN}
            return found | {"id": event.key, "time": event.time}
        if event.type == "feedback.given" and event.data is not None:
            return FeedbackGiven(**event.data)
        if event.type == "actor.erased":
            return {"erased": event.key}
        return None

    def apply(self, state: ViewState, items: Sequence[ViewItem]) -> Iterable[ViewEffect]:
        given = [item.value for item in items if isinstance(item.value, FeedbackGiven)]
        state.load("voted", [member_key(one.actor, one.answer) for one in given])
        for table in ("raters", "erased"):
            state.load(table, [one.actor for one in given])
        for item in items:
            value = item.value
            if isinstance(value, FeedbackGiven):
                self._add_feedback(state, item, value)
            elif "erased" in value:
                _erase(state, value["erased"])
            else:
                if not state.get("erased", value["actor"]):
                    key = f"{value['time']:017.6f} {value['id']}"
                    place = {"partition": item.record.partition, "offset": item.record.offset}
                    state.put("answers", key, value | place)
                    state.put("made", member_key(value["actor"], key), True)
                self._add_pairs(state, self.by_model.add(state, item, "right", value["id"], value["model"]))
        return ()

    def _add_feedback(self, state: ViewState, item: ViewItem, given: FeedbackGiven) -> None:
        key = member_key(given.actor, given.answer)
        if given.kind != "none" and not state.get("voted", key) and not state.get("erased", given.actor):
            state.put("voted", key, True)
            state.add("raters", given.actor)
        if not is_late(state, item, GRACE):
            click = [item.time, given.kind]
            self._add_pairs(state, self.by_model.add(state, item, "left", given.completion, click))

    def _add_pairs(self, state: ViewState, pairs: Iterable[tuple[Any, str]]) -> None:
        for (time, kind), model in pairs:
            self.by_day.add(state, time, f"{model}\n{kind}")


def _erase(state: ViewState, actor: str) -> None:
    prefix = member_key(actor, "")
    for table in ("voted", "made"):
        for key in state.scan(table, prefix, prefix + END):
            state.put(table, key, None)
            if table == "made":
                state.put("answers", key.removeprefix(prefix), None)
    state.put("raters", actor, None)
    state.put("erased", actor, True)


def newest_answers(counts: Counts, limit: int = 50, before: float | None = None) -> list[dict[str, Any]]:
    """Return the newest logged completions, with likes and dislikes of their first answer. before: time in seconds."""
    high = END if before is None else f"{before:017.6f}"
    rows = list(counts.store.scan(AnswersView.name, "answers", "", high, limit).values())
    found = counts.get([f"{row['id']}/0" for row in rows])
    return [row | found[f"{row['id']}/0"] for row in rows]


def votes_per_rater(store: ViewStore) -> dict[str, int]:
    """Return actor -> number of answers that the actor gave feedback on."""
    return store.scan(AnswersView.name, "raters")


def clicks_per_day(store: ViewStore) -> list[dict[str, Any]]:
    """Return rows of start of the day in seconds, model, kind, clicks."""
    rows = store.scan(AnswersView.name, "days").items()
    parts = ((int(key[:12]), *key[13:].split("\n"), clicks) for key, clicks in rows)
    return [dict(zip(("day", "model", "kind", "clicks"), row, strict=True)) for row in parts]
