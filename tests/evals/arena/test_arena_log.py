"""The log of an arena: votes with conversations, only appended, votes that arrive twice, kill -9."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import pytest

from whorl.errors import DataError
from whorl.evals.arena.arena_log import ArenaLog, Battle, BattleTurn, VoteConflictError
from whorl.log import Event

TURN = BattleTurn("Say hi.", "hi", "hello there", right_finish="length")


def battle(name: str, *turns: BattleTurn) -> Battle:
    return Battle(name, "a", "b", 0.5, ("address-a", "address-b"), {"temperature": 0.7}, turns)


def test_votes_come_back_with_conversations(tmp_path: Path) -> None:
    with ArenaLog(tmp_path / "log.sqlite") as log:
        log.add_battle(battle("1", TURN))
        log.add_turn("1", BattleTurn("Again.", "hi!", "hello"))
        assert log.add_vote("1", "right", "someone")
        log.add_battle(battle("2", TURN))
        log.add_missing("3", "a", "timed out")
    with ArenaLog(tmp_path / "log.sqlite") as log:
        one, two = log.battles()
        assert (one.turns, two.vote) == ((TURN, BattleTurn("Again.", "hi!", "hello")), None)
        assert one.addresses == ("address-a", "address-b") and one.settings == {"temperature": 0.7}
        [vote] = log.votes()
        assert (vote.battle, vote.left, vote.right, vote.choice) == ("1", "a", "b", "right")
        assert (vote.weight, vote.voter, vote.left_length, vote.right_length) == (0.5, "someone", 5, 16)
        assert log.n_votes() == 1 and log.missing() == {"a": 1} and vote.time > 1e9


def test_vote_that_arrives_twice_counts_once(tmp_path: Path) -> None:
    log, other = ArenaLog(tmp_path / "log.sqlite"), ArenaLog(tmp_path / "log.sqlite")
    log.add_battle(battle("1", TURN))
    assert log.add_vote("1", "left", "x") is True
    assert other.add_vote("1", "left", "x") is False
    with pytest.raises(VoteConflictError, match="another vote already"):
        other.add_vote("1", "right", "x")
    with pytest.raises(VoteConflictError, match="conversation has ended"):
        log.add_turn("1", TURN)
    assert [v.choice for v in log.votes()] == ["left"]


def test_one_of_many_votes_at_once_counts(tmp_path: Path) -> None:
    log = ArenaLog(tmp_path / "log.sqlite")
    log.add_battle(battle("1", TURN))
    outcomes: list[str] = []

    def vote(choice: str) -> None:
        try:
            outcomes.append("new" if log.add_vote("1", choice) else "repeated")  # type: ignore[arg-type]
        except VoteConflictError:
            outcomes.append("conflict")

    threads = [threading.Thread(target=vote, args=(("left", "right")[k % 2],)) for k in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count("new") == 1 and outcomes.count("conflict") == 6 and log.n_votes() == 1


def test_a_turn_that_comes_after_a_vote_of_another_process_is_refused(tmp_path: Path) -> None:
    log, other = ArenaLog(tmp_path / "log.sqlite"), ArenaLog(tmp_path / "log.sqlite")
    log.add_battle(battle("1", TURN))
    append = log._append

    def late(*events: Event) -> int:
        other.add_vote("1", "left")
        return append(*events)

    log._append = late  # type: ignore[method-assign]
    with pytest.raises(VoteConflictError, match="conversation has ended"):
        log.add_turn("1", TURN)
    assert [len(b.turns) for b in other.battles()] == [1]


def test_a_file_of_an_older_version_keeps_its_votes(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE events (number INTEGER PRIMARY KEY, battle, kind, time REAL, content)")
        head = {"left": "a", "right": "b", "weight": 1.0, "addresses": ["x", "y"], "settings": {}}
        rows = [("battle", head), ("turn", asdict(TURN)), ("vote", {"choice": "left", "voter": "v"})]
        database.executemany(
            "INSERT INTO events (battle, kind, time, content) VALUES ('1', ?, 5.0, ?)",
            [(kind, json.dumps(content)) for kind, content in rows],
        )
    for _ in range(2):
        with ArenaLog(path) as log:
            [vote] = log.votes()
            assert (vote.choice, vote.voter, vote.time, vote.left_length) == ("left", "v", 5.0, 2)


def test_bad_input_is_refused(tmp_path: Path) -> None:
    log = ArenaLog(tmp_path / "log.sqlite")
    with pytest.raises(DataError, match="there is no battle 'x'"):
        log.add_vote("x", "left")
    log.add_battle(battle("1"))
    with pytest.raises(DataError, match="the battle has no answers"):
        log.add_vote("1", "left")
    with pytest.raises(DataError, match=r"the vote 'first'.*"):
        log.add_vote("1", "first")  # type: ignore[arg-type]
    (tmp_path / "text").write_text("no database, but long enough to be one\n" * 100)
    with pytest.raises(DataError, match="cannot be opened"):
        ArenaLog(tmp_path / "text")


WRITER = """
import sys
from pathlib import Path
from whorl.evals.arena.arena_log import ArenaLog, Battle, BattleTurn
log, k = ArenaLog(Path(sys.argv[1])), int(sys.argv[2])
while True:
    log.add_battle(Battle(str(k), "a", "b", turns=(BattleTurn("p", "l", "r" * 500),)))
    log.add_vote(str(k), "left")
    print(k, flush=True)
    k += 1
"""


@pytest.mark.parametrize("after", [1, 7, 40])
def test_confirmed_votes_survive_kill_9(tmp_path: Path, after: int) -> None:
    path = tmp_path / "log.sqlite"
    command = [sys.executable, "-c", WRITER, str(path), "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as child:
        assert child.stdout is not None
        confirmed = [child.stdout.readline().strip() for _ in range(after)]
        child.send_signal(signal.SIGKILL)
        confirmed += child.stdout.read().split()
    with ArenaLog(path) as log:
        found = [v.battle for v in log.votes()]
        assert found[: len(confirmed)] == confirmed and len(found) <= len(confirmed) + 1
        log.add_battle(battle("next", TURN))  # it can be written again
        assert log.add_vote("next", "both bad")
