"""The step `events`: a range of the event log as an artifact (`loop/frozen_events.py`).

    [steps.events]                      # log = "sqlite:events.db"; default: the log of the store
    since = 2026-11-01T00:00:00Z

The end of the log is read before the address is computed. So a run without new events is a lookup, and each range of
offsets of one log has one address. `actors.txt` names the actors, for `whorl forget`.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import orjson
from pydantic import BaseModel, ConfigDict, Field

from whorl.errors import DataError
from whorl.recipes.registry import StepContext, step
from whorl.store import Store


class EventsConfig(BaseModel):
    """The range of the log, and the share of prompts that is never trained on."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    log: str = Field(default="", description="URL of the log; default: $WHORL_LOG, or the log of the store")
    since: datetime | None = Field(default=None, description="leave out what was recorded before this time")
    until: datetime | None = Field(default=None, description="leave out what was recorded from this time on")
    test_fraction: float = Field(
        default=0.2, gt=0, lt=1, description="held-out fraction of the prompts, by a hash of the prompt"
    )
    log_id: str = Field(default="", description="identity of the log; computed")
    offsets: dict[str, list[tuple[int, int]]] = Field(
        default={}, description="first and next offset of each partition; computed"
    )


def _with_offsets(config: EventsConfig, store: Store) -> EventsConfig:
    """Add the identity of the log and the range of each partition."""
    from whorl.log import default_log, open_log
    from whorl.loop.frozen_events import current_offsets, log_identity

    url = config.log or default_log(store.root)
    with open_log(url) as log:
        bounds = [None if when is None else when.timestamp() for when in (config.since, config.until)]
        offsets = current_offsets(log, *bounds)
        return config.model_copy(update={"log": url, "log_id": log_identity(log), "offsets": offsets})


@step("events", config=EventsConfig, complete_config=_with_offsets, not_hashed=("log", "since", "until"))
def events(ctx: StepContext, config: EventsConfig) -> None:
    """Freeze a range of the event log: completions and the feedback on them."""
    from whorl.log import open_log
    from whorl.loop.actor_keys import ActorKeys
    from whorl.loop.frozen_events import NO_LOG, read_events

    keys = ActorKeys(Path(ctx.store.root) / "log" / "keys.db")
    with open_log(config.log) as log:
        found = read_events(log, keys, config.offsets, config.test_fraction)
    keys.close()
    left_out = "; ".join(f"{n:,} {reason}" for reason, n in sorted(found.left_out.items()))
    if not found.completions or not found.feedback:
        what = "completions" if not found.completions else "feedback on them"
        raise DataError(
            f"the log {config.log} has no {what}" + (f" (left out: {left_out})" if left_out else ""), do=NO_LOG
        )  # fmt: skip
    for name, rows in (("completions", found.completions), ("feedback", found.feedback)):
        (ctx.out / f"{name}.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    (ctx.out / "actors.txt").write_text("".join(f"{actor}\n" for actor in found.actors))
    kinds = sorted({row["kind"] for row in found.feedback})
    counts = {kind: sum(row["kind"] == kind for row in found.feedback) for kind in kinds}
    headline = f"{len(found.completions):,} completions, {len(found.feedback):,} votes of {len(found.actors):,} actors"
    ctx.summary.update(
        completions=len(found.completions), feedback=counts, actors=len(found.actors), left_out=dict(found.left_out),
        models=sorted({row["digest"] for row in found.completions} - {""}),
        headline=headline + (f"; left out: {left_out}" if left_out else ""),
    )  # fmt: skip
