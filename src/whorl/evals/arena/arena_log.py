"""The log of an arena: battles with their conversations, missing answers and votes, in one SQLite file.

    battle     models, sides, weight, settings          one event; the conversation follows in turns
    turn       prompt and both answers
    missing    model and reason of an answer that did not arrive
    vote       choice and voter                         at most one for each battle

Events are only appended; triggers refuse changes and deletions. An event is on disk when its method returns (WAL with
`synchronous=FULL`), so `kill -9` loses no vote that was confirmed. Several processes may write.

A vote that arrives twice with one choice is confirmed again and counts once. With another choice it is refused: the first
one stays, because the names of the models were shown after it.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from whorl.errors import DataError, shorten
from whorl.evals.arena.battles import CHOICES, Choice, Vote

BUSY_SECONDS = 60.0  # wait for another process's transaction

_SCHEMA = """
CREATE TABLE IF NOT EXISTS events (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    battle TEXT NOT NULL,
    kind TEXT NOT NULL,
    time REAL NOT NULL,
    content TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS events_of_battle ON events (battle);
CREATE UNIQUE INDEX IF NOT EXISTS one_battle ON events (battle) WHERE kind = 'battle';
CREATE UNIQUE INDEX IF NOT EXISTS one_vote ON events (battle) WHERE kind = 'vote';
CREATE TRIGGER IF NOT EXISTS no_update BEFORE UPDATE ON events BEGIN SELECT RAISE(ABORT, 'events are only appended'); END;
CREATE TRIGGER IF NOT EXISTS no_late_turn BEFORE INSERT ON events
    WHEN NEW.kind = 'turn' AND EXISTS (SELECT 1 FROM events WHERE battle = NEW.battle AND kind = 'vote')
    BEGIN SELECT RAISE(ABORT, 'the battle has a vote'); END;
CREATE TRIGGER IF NOT EXISTS no_delete BEFORE DELETE ON events BEGIN SELECT RAISE(ABORT, 'events are only appended'); END;
"""


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
    """The events of one arena. A context manager; its methods may be called from any thread.

    Raises:
        DataError: the file is no log of an arena; or from any method, it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._database = sqlite3.connect(
                path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=FULL")
            self._database.executescript(_SCHEMA)
        except sqlite3.DatabaseError as error:
            raise DataError(
                f"{path} cannot be read: {error}", expected="the log of an arena, a SQLite file",
                do="give another file",
            ) from error  # fmt: skip

    def add_battle(self, battle: Battle) -> None:
        """Append a battle and its turns, in one transaction."""
        content = {
            name: value for name, value in asdict(battle).items() if name not in ("id", "turns", "vote")
        }
        turns = [("turn", asdict(turn)) for turn in battle.turns]
        self._append(battle.id, [("battle", content), *turns])

    def add_turn(self, battle: str, turn: BattleTurn) -> None:
        """Append a turn. Raises UnknownBattleError; VoteConflictError: the battle has a vote, from any process."""
        self.battle(battle)
        try:
            self._append(battle, [("turn", asdict(turn))])
        except sqlite3.IntegrityError:
            raise VoteConflictError("the battle has a vote, so its conversation has ended") from None

    def add_missing(self, battle: str, model: str, reason: str) -> None:
        """Append that an answer did not arrive."""
        self._append(battle, [("missing", {"model": model, "reason": reason})])

    def add_vote(self, battle: str, choice: Choice, voter: str = "") -> bool:
        """Append a vote; return False if the battle has the same one already.

        Raises:
            VoteConflictError: the battle has another vote. DataError: no such battle, no turn, or no such choice.
        """
        if choice not in CHOICES:
            raise DataError(f"the vote {shorten(str(choice))!r}", expected=f"one of: {', '.join(CHOICES)}")
        if not self.battle(battle).turns:
            raise DataError("the battle has no answers", expected="a vote after the answers")
        try:
            self._append(battle, [("vote", {"choice": choice, "voter": voter})])
        except sqlite3.IntegrityError:
            found = self.battle(battle).vote
            if found is not None and found.choice == choice:
                return False
            raise VoteConflictError(
                "the battle has another vote already", expected="one vote per battle", do="start a new battle"
            ) from None
        return True

    def battle(self, battle: str) -> Battle:
        """Return a battle. Raises UnknownBattleError: no battle has this id."""
        found = next(self._battles("WHERE battle = ?", (battle,)), None)
        if found is None:
            raise UnknownBattleError(
                f"there is no battle {shorten(battle)!r}", expected="the id of a battle of this arena"
            )
        return found

    def battles(self) -> Iterator[Battle]:
        """Yield all battles with their conversations, in order."""
        yield from self._battles("", ())

    def votes(self) -> list[Vote]:
        """Return all votes, in the order of their battles."""
        return [b.vote for b in self._battles("", ()) if b.vote is not None]

    def n_votes(self) -> int:
        """Return the number of votes."""
        with self._lock:
            return int(
                self._database.execute("SELECT COUNT(*) FROM events WHERE kind = 'vote'").fetchone()[0]
            )

    def missing(self) -> Counter[str]:
        """Return the number of missing answers of each model."""
        return Counter(each["model"] for each in self._missing())

    def missing_reasons(self) -> Counter[str]:
        """Return why answers are missing, with their numbers."""
        return Counter(f"{each['model']}: {each['reason']}" for each in self._missing())

    def _missing(self) -> list[dict[str, str]]:
        with self._lock:
            rows = self._database.execute("SELECT content FROM events WHERE kind = 'missing'").fetchall()
        return [json.loads(content) for (content,) in rows]

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._database.close()

    def __enter__(self) -> ArenaLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _append(self, battle: str, events: list[tuple[str, dict[str, Any]]]) -> None:
        rows = [(battle, kind, time.time(), json.dumps(content)) for kind, content in events]
        with self._lock:
            try:
                self._database.execute("BEGIN IMMEDIATE")
                self._database.executemany(
                    "INSERT INTO events (battle, kind, time, content) VALUES (?, ?, ?, ?)", rows
                )
                self._database.execute("COMMIT")
            except sqlite3.Error as error:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                if isinstance(error, sqlite3.IntegrityError):
                    raise
                raise DataError(f"{self.path} cannot be written: {error}", do="check the disk") from error

    def _battles(self, where: str, values: tuple[str, ...]) -> Iterator[Battle]:
        with self._lock:
            query = f"SELECT battle, kind, time, content FROM events {where} ORDER BY number"
            rows = self._database.execute(query, values).fetchall()
        events: dict[str, list[tuple[str, float, dict[str, Any]]]] = {}
        for battle, kind, when, content in rows:
            events.setdefault(battle, []).append((kind, when, json.loads(content)))
        for battle, own in events.items():
            head = next((content for kind, _, content in own if kind == "battle"), None)
            if head is None:  # only missing answers
                continue
            head["addresses"] = tuple(head["addresses"])
            turns = tuple(BattleTurn(**content) for kind, _, content in own if kind == "turn")
            made = Battle(id=battle, **head, turns=turns)
            last = next(((when, content) for kind, when, content in own if kind == "vote"), None)
            yield made if last is None else _with_vote(made, *last)


def _with_vote(battle: Battle, when: float, content: dict[str, Any]) -> Battle:
    left, right = battle.lengths
    vote = Vote(
        battle.id, battle.left, battle.right, content["choice"], battle.weight, content["voter"], left, right, when
    )  # fmt: skip
    return replace(battle, vote=vote)
