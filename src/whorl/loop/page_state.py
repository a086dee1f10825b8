"""Contents of the pages /feed and /loop, as JSON: kept answers, and the state of the loop."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np

from whorl.errors import DataError
from whorl.log import Log
from whorl.loop.actor_keys import ActorKeys
from whorl.loop.counter import VIEWS
from whorl.loop.counter.answers import clicks_per_day, newest_answers, votes_per_rater
from whorl.loop.counter.counts import Counts
from whorl.loop.events import COMPLETIONS, TOPICS, CompletionMade
from whorl.loop.feedback_token import issue_token
from whorl.loop.gate import GateState, gate_state
from whorl.loop.streams.runner import lag_of
from whorl.loop.streams.store import default_views
from whorl.store import Store
from whorl.tracking.inequality import gini, lorenz_curve

CURVE_POINTS = 101


class PageState:
    """Reads the log and the views of a store. Its methods may be called from any thread. views, cache: as `whorl loop`."""

    def __init__(
        self,
        store: Store,
        log: Log,
        keys: ActorKeys,
        secret: bytes,
        views: str | None = None,
        cache: str = "",
    ) -> None:
        self.store, self.log, self.keys, self.secret = store, log, keys, secret
        self.counts = Counts.open(views or default_views(store.root), cache)
        self._gate, self._gate_lock = GateState(), threading.Lock()
        self._compared: tuple[int, dict[str, Any] | None] = 0, None  # modification time of the artifacts

    def feed(self, actor: str, before: float | None, limit: int) -> dict[str, Any]:
        """Return the newest kept answers with their counts, the actor's own click, and a token for feedback by the actor.

        `next` of the result is the value of `before` for older ones, None at the end.
        """
        rows = newest_answers(self.counts, limit, before)
        mine = self.counts.mine(actor, [f"{row['id']}/0" for row in rows])
        found = []
        for row in rows:
            if (made := self._completion(row["partition"], row["offset"])) is None:
                continue
            found.append({
                "id": made.id, "time": row["time"], "model": made.model, "prompt": _last_prompt(made.prompt),
                "text": made.choices[0].text, "likes": row["likes"], "dislikes": row["dislikes"],
                "mine": mine[f"{made.id}/0"], "token": issue_token(self.secret, made.id, len(made.choices), actor),
            })  # fmt: skip
        return {"answers": found, "next": rows[-1]["time"] if len(rows) == limit else None}

    def _completion(self, partition: int, offset: int) -> CompletionMade | None:
        """Return a completion; None if its actor is erased, or the record is removed or damaged."""
        try:
            records = self.log.fetch(COMPLETIONS, partition, offset, 1)
            data = self.keys.open(records[0].event()) if records and records[0].offset == offset else None
        except DataError:
            return None
        return None if data is None else CompletionMade.from_data(data)

    def loop(self) -> dict[str, Any]:
        """Return records and lags, clicks by day, votes per rater, the blind tests, and the newest comparison."""
        votes = np.array(sorted(votes_per_rater(self.counts.store).values()), dtype=np.float64)
        members, shares = lorenz_curve(votes.tolist()) if votes.sum() else ([0.0, 1.0], [0.0, 1.0])
        at = np.linspace(0, 1, CURVE_POINTS)
        bounds = {topic: self.log.bounds(topic) for topic in TOPICS}
        with self._gate_lock:
            gate = gate_state(self.log, self._gate)
        return {
            "survives": self.log.guarantees.survives,
            "topics": {topic: sum(b.next - b.first for b in found) for topic, found in bounds.items()},
            "lags": {view.name: lag_of(view, self.log, self.counts.store) for view in VIEWS},
            "days": clicks_per_day(self.counts.store),
            "raters": {
                "n": len(votes), "votes": int(votes.sum()), "gini": float(gini(votes)) if len(votes) else 0.0,
                "lorenz": np.interp(at, members, shares).round(4).tolist(),
            },
            "gate": gate, "names": {a: name for name, a in self.store.names().items()},
            "comparison": self._comparison(),
        }  # fmt: skip

    def _comparison(self) -> dict[str, Any] | None:
        folder = self.store.root / "artifacts"
        changed = folder.stat().st_mtime_ns if folder.is_dir() else 0
        if changed != self._compared[0]:
            kept = [each for each in self.store.artifacts() if each.kind == "comparison"]
            text = kept[-1].file("comparison.json").read_text(encoding="utf-8") if kept else "null"
            self._compared = changed, json.loads(text)
        return self._compared[1]

    def close(self) -> None:
        self.counts.close()


def _last_prompt(prompt: str | list[dict[str, Any]]) -> str:
    return prompt if isinstance(prompt, str) else str(prompt[-1].get("content", ""))
