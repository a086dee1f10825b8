"""A range of the log as a data set: completions and the feedback on them, with seals opened.

A range is the first and the next offset of every partition. With the identity of its log it names the same events for
ever, so it can be the address of an artifact. Erased actors are left out; their `actor.erased` record moves the end.

The subtle point is the held-out split: a hash of the prompt alone. A prompt that is held out in one round is
held out in every later one. So no model is compared on a prompt that an earlier round trained on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from typing import Any

import orjson

from whorl.errors import DataError
from whorl.log.event import UnreadableRecordError, new_id
from whorl.log.port import Log, OffsetRange
from whorl.loop.actor_keys import ActorKeys
from whorl.loop.events import COMPLETIONS, FEEDBACK, SCHEMAS, CompletionMade, FeedbackGiven

Offsets = Mapping[str, Sequence[tuple[int, int]]]  # topic -> first and next offset of each partition
NO_LOG = "serve a model with `whorl serve MODEL --log`, allow it to keep completions, and rate some answers"


@dataclass
class FrozenEvents:
    """The events of a range of the log.

    Attributes:
        completions: fields of `CompletionMade`, with `time` and `split` ("train" or "test").
        feedback: fields of `FeedbackGiven`, with `id` and `time`; of an actor's votes on an answer, or between two, the last
            one, and no "none".
        left_out: reason -> number of events.
    """

    completions: list[dict[str, Any]] = field(default_factory=list)
    feedback: list[dict[str, Any]] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)

    @property
    def actors(self) -> list[str]:
        """Return the actors of these events, in order of their names."""
        return sorted({row["actor"] for row in (*self.completions, *self.feedback)})


def log_identity(log: Log) -> str:
    """Return the id of a log, which its first reader gives it; a copy of its files keeps it."""
    while not (found := log.document("identity"))[0]:
        log.put_document("identity", new_id().encode(), found[1])
    return found[0].decode()


def current_offsets(log: Log, since: float | None = None, until: float | None = None) -> dict[str, Any]:
    """Return the `Offsets` of the completions and the feedback, by default all that there are.

    Args:
        since, until: time of the append, seconds since 1970.

    Raises:
        DataError: the log has no such topic.
    """
    if missing := {COMPLETIONS, FEEDBACK} - log.topics().keys():
        raise DataError(
            f"the log {log.url} has no topic {min(missing)!r}", expected="the events of a served model", do=NO_LOG
        )  # fmt: skip
    found = dict[str, Any]()
    for topic in (COMPLETIONS, FEEDBACK):
        found[topic] = []
        for partition, (first, end) in enumerate(log.bounds(topic)):
            first = first if since is None else max(first, log.find_offset(topic, partition, since))
            end = end if until is None else min(end, log.find_offset(topic, partition, until))
            found[topic].append((first, max(first, end)))
    return found


def is_held_out(prompt: str | Sequence[Any], fraction: float) -> bool:
    """Return whether a prompt, a text or messages, belongs to the held-out split."""
    digest = blake2b(orjson.dumps(prompt), digest_size=8).digest()
    return int.from_bytes(digest) < fraction * 2**64


def read_events(log: Log, keys: ActorKeys, offsets: Offsets, test_fraction: float) -> FrozenEvents:
    """Return the events of a range.

    Raises:
        OffsetRemovedError: retention removed a part of the range.
    """
    found, votes, erased = FrozenEvents(), dict[tuple[str, ...], dict[str, Any] | None](), set[str]()
    for topic in (COMPLETIONS, FEEDBACK):
        for record in log.replay(topic, bounds=[OffsetRange(*bound) for bound in offsets[topic]]):
            try:
                event = record.event(SCHEMAS)
                if event.type == "actor.erased":
                    erased.add(event.key)
                    continue
                data = keys.open(event) if event.data is not None else None
                if data is None:
                    found.left_out["tombstone" if event.data is None else "of an erased actor"] += 1
                elif event.type == "completion.made":
                    made = CompletionMade.from_data(data)
                    split = "test" if is_held_out(made.prompt, test_fraction) else "train"
                    found.completions.append({**asdict(made), "time": event.time, "split": split})
                elif event.type == "feedback.given":
                    given = FeedbackGiven(**data)
                    row = {**asdict(given), "id": event.id, "time": event.time}
                    key = _vote_key(given)
                    found.left_out["replaced by a later vote"] += votes.pop(key, None) is not None
                    votes[key] = None if given.kind == "none" else row
            except (UnreadableRecordError, DataError, TypeError, KeyError):
                found.left_out["unreadable"] += 1
    found.left_out["of an erased actor"] += sum(row["actor"] in erased for row in found.completions)
    found.completions = [row for row in found.completions if row["actor"] not in erased]
    known = {row["id"] for row in found.completions}
    for given_row in votes.values():
        if given_row is None:
            found.left_out["taken back"] += 1
        elif given_row["actor"] in erased:
            found.left_out["of an erased actor"] += 1
        elif not {given_row["completion"], given_row["over"] or given_row["completion"]} <= known:
            found.left_out["on a completion that was not kept"] += 1
        else:
            found.feedback.append(given_row)
    found.left_out = +found.left_out
    return found


def _vote_key(given: FeedbackGiven) -> tuple[str, ...]:
    """Return what an actor has one vote on: an answer, the edit of an answer, or two answers."""
    if given.kind in ("better", "tie"):
        return (given.actor, *sorted((given.answer, f"{given.over}/{given.over_choice}")))
    return (given.actor, given.answer, *(["edit"] if given.kind == "edit" else []))


def latest_completion(log: Log) -> Mapping[str, Any]:
    """Return the newest completion of a model that is an artifact and no challenger, with its text sealed.

    Only the last records of each partition are read. Empty without one.
    """
    newest: tuple[float, Mapping[str, Any]] = (0.0, {})
    for partition, (first, end) in enumerate(log.bounds(COMPLETIONS) if COMPLETIONS in log.topics() else ()):
        for record in log.fetch(COMPLETIONS, partition, max(first, end - 100), 100):
            data = record.event(SCHEMAS).data or {}
            if record.recorded >= newest[0] and data.get("digest") and data.get("arm") != "challenger":
                newest = (record.recorded, data)
    return newest[1]
