"""Battles of an arena: the topic `arena` of an event log, and a view of it in memory.

    arena.battle     models, sides, weight, settings          the conversation follows in turns
    arena.turn       prompt and both answers
    arena.missing    model and reason of an answer that did not arrive
    arena.vote       choice and voter                         the first of a battle counts

The key of an event is its battle; the topic has one partition, so that battles have an order. An event is on disk when its
method returns, so `kill -9` loses no vote that was confirmed (`log/sqlite.py`). Several processes may write.

A vote that arrives twice with one choice is confirmed again and counts once. With another choice it is refused: the first
one stays, because the names of the models were shown after it.
"""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import apsw
import orjson

from whorl.errors import DataError, shorten
from whorl.evals.arena.battles import CHOICES, Choice, Vote
from whorl.log import Event, LogRecord, TopicConfig, open_log

TOPIC = "arena"


class UnknownBattleError(DataError):
    """There is no battle with an id."""


class VoteConflictError(DataError):
    """A battle has another vote already."""


@dataclass(frozen=True)
class BattleTurn:
    """A prompt and both answers. left_finish, right_finish: "length" if the limit cut an answer."""

    prompt: str
    left: str
    right: str
    left_finish: str = "stop"
    right_finish: str = "stop"


@dataclass(frozen=True)
class Battle:
    """Two models that answer the same conversation.

    Attributes:
        left, right: models. addresses: of both, as of `ModelBackend`.
        weight: of the vote; see `pair_sampling.py`. settings: of the requests.
    """

    id: str
    left: str
    right: str
    weight: float = 1.0
    addresses: tuple[str, str] = ("", "")
    settings: dict[str, Any] = field(default_factory=dict)
    turns: tuple[BattleTurn, ...] = ()
    vote: Vote | None = None

    @property
    def lengths(self) -> tuple[int, int]:
        """Characters of all answers of the left and of the right model."""
        return sum(len(t.left) for t in self.turns), sum(len(t.right) for t in self.turns)


class ArenaLog:
    """The battles of one arena. A context manager; its methods may be called from any thread.

    Args:
        path: a SQLite file of a log; one of an older version is read into it.

    Raises:
        DataError: the file is no log; LogUnavailableError: from any method, it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._lock, self._next = path, threading.Lock(), 0
        self._battles_by_id, self._vote_offsets = dict[str, Battle](), dict[str, int]()
        self._clicks, self._missing = dict[str, str](), list[dict[str, str]]()
        self._log = open_log(f"sqlite:{path}")
        self._log.create(TOPIC, TopicConfig(partitions=1, max_record_bytes=16 << 20))
        if self._log.bounds(TOPIC)[0].next == 0 and (events := _old_events(path)):
            self._log.append(TOPIC, *events)

    def add_battle(self, battle: Battle) -> None:
        """Append a battle and its turns, in one transaction."""
        content = {
            name: value for name, value in asdict(battle).items() if name not in ("id", "turns", "vote")
        }
        turns = [Event("arena.turn", battle.id, asdict(turn)) for turn in battle.turns]
        self._append(Event("arena.battle", battle.id, content, id=f"{battle.id}/battle"), *turns)

    def add_turn(self, battle: str, turn: BattleTurn) -> None:
        """Append a turn. Raises UnknownBattleError; VoteConflictError: the battle has a vote, from any process."""
        ended = self.battle(battle).vote is not None
        if not ended:
            offset = self._append(Event("arena.turn", battle, asdict(turn)))
            ended = self.battle(battle).vote is not None and self._vote_offsets[battle] < offset
        if ended:
            raise VoteConflictError("the battle has a vote, so its conversation has ended")

    def add_missing(self, battle: str, model: str, reason: str) -> None:
        """Append that an answer did not arrive."""
        self._append(Event("arena.missing", battle, {"model": model, "reason": reason}))

    def add_vote(self, battle: str, choice: Choice, voter: str = "") -> bool:
        """Append a vote; return False if the battle has the same one already.

        Raises:
            VoteConflictError: the battle has another vote. DataError: no such battle, no turn, or no such choice.
        """
        if choice not in CHOICES:
            raise DataError(f"the vote {shorten(str(choice))!r}", expected=f"one of: {', '.join(CHOICES)}")
        if not self.battle(battle).turns:
            raise DataError("the battle has no answers", expected="a vote after the answers")
        click = secrets.token_hex(8)
        content = {"choice": choice, "voter": voter, "click": click}
        self._append(Event("arena.vote", battle, content, id=f"{battle}/vote"))
        found = self.battle(battle).vote
        if self._clicks[battle] == click:
            return True
        if found is not None and found.choice == choice:
            return False
        raise VoteConflictError(
            "the battle has another vote already", expected="one vote per battle", do="start a new battle"
        )

    def battle(self, battle: str) -> Battle:
        """Return a battle. Raises UnknownBattleError: no battle has this id."""
        self._catch_up()
        found = self._battles_by_id.get(battle)
        if found is None:
            raise UnknownBattleError(
                f"there is no battle {shorten(battle)!r}", expected="the id of a battle of this arena"
            )
        return found

    def battles(self) -> Iterator[Battle]:
        """Yield all battles with their conversations, in order."""
        self._catch_up()
        yield from list(self._battles_by_id.values())

    def votes(self) -> list[Vote]:
        """Return all votes, in the order of their battles."""
        return [b.vote for b in self.battles() if b.vote is not None]

    def n_votes(self) -> int:
        """Return the number of votes."""
        self._catch_up()
        return len(self._clicks)

    def missing(self) -> Counter[str]:
        """Return the number of missing answers of each model."""
        self._catch_up()
        return Counter(each["model"] for each in self._missing)

    def missing_reasons(self) -> Counter[str]:
        """Return why answers are missing, with their numbers."""
        self._catch_up()
        return Counter(f"{each['model']}: {each['reason']}" for each in self._missing)

    def close(self) -> None:
        """Close the file."""
        self._log.close()

    def __enter__(self) -> ArenaLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _append(self, *events: Event) -> int:
        """Append events; return the offset of the last."""
        return self._log.append(TOPIC, *events)[-1].offset

    def _catch_up(self) -> None:
        """Apply the records that this view has not seen."""
        with self._lock:
            while records := self._log.fetch(TOPIC, 0, self._next):
                for record in records:
                    self._apply(record)
                self._next = records[-1].offset + 1

    def _apply(self, record: LogRecord) -> None:
        event = record.event()
        name, content = event.key, dict(event.data or {})
        if event.type == "arena.missing":
            self._missing.append(content)
        elif event.type == "arena.battle":
            content["addresses"] = tuple(content["addresses"])
            self._battles_by_id[name] = Battle(id=name, **content)
        elif name in self._clicks:
            return  # the first vote ended the battle
        elif event.type == "arena.turn":
            battle = self._battles_by_id[name]
            self._battles_by_id[name] = replace(battle, turns=(*battle.turns, BattleTurn(**content)))
        elif event.type == "arena.vote":
            self._clicks[name], self._vote_offsets[name] = content.get("click", ""), record.offset
            self._battles_by_id[name] = _with_vote(self._battles_by_id[name], event.time, content)


def _old_events(path: Path) -> list[Event]:
    """Return the events of a file of version 0.2, whose table was `events`."""
    with closing(
        apsw.Connection(str(path))
    ) as database:  # the same SQLite as the log: two in one process lose locks
        if not database.execute("SELECT 1 FROM sqlite_master WHERE name = 'events'").fetchall():
            return []
        rows: Any = database.execute(
            "SELECT battle, kind, time, content FROM events ORDER BY number"
        ).fetchall()
    return [
        Event(f"arena.{kind}", battle, orjson.loads(content), time=when)
        for battle, kind, when, content in rows
    ]


def _with_vote(battle: Battle, when: float, content: dict[str, Any]) -> Battle:
    left, right = battle.lengths
    vote = Vote(
        battle.id, battle.left, battle.right, content["choice"], battle.weight, content["voter"], left, right, when
    )  # fmt: skip
    return replace(battle, vote=vote)
