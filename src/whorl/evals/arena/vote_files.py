"""Votes in files: the records of Chatbot Arena, and pairs for preference training.

    {"question_id", "model_a", "model_b", "winner": "model_a | model_b | tie | tie (bothbad)", "judge", "tstamp", "weight",
     "conversation_a": [{"role", "content"}, ...], "conversation_b": [...]}

These are the fields of lmsys/chatbot_arena_conversations (arXiv:2309.11998), and `weight`. A vote that is twice in a file
with equal contents counts once. Two different votes with one id are an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from whorl.errors import DataError, one_of, shorten
from whorl.evals.arena.arena_log import ArenaLog, Battle
from whorl.evals.arena.battles import Choice, Vote
from whorl.evals.tasks.records import read_records

WINNERS: dict[str, Choice] = {
    "model_a": "left", "model_b": "right", "tie": "tie", "tie (bothbad)": "both bad", "bothbad": "both bad",
}  # fmt: skip
_SQLITE = b"SQLite format 3\0"


def _is_log(path: Path) -> bool:
    try:
        with path.open("rb") as stream:
            return stream.read(len(_SQLITE)) == _SQLITE
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}", expected="the votes of an arena"
        ) from error


def load_missing(path: Path) -> dict[str, int]:
    """Return model -> answers that did not arrive; of a log only."""
    if not _is_log(path):
        return {}
    with ArenaLog(path) as log:
        return dict(log.missing())


def load_votes(path: Path) -> tuple[list[Vote], int]:
    """Return the votes of a log or of a file of records, and the number of votes that were there twice.

    Raises:
        DataError: the file is missing or damaged, or a record is no vote.
    """
    if not _is_log(path):
        return parse_votes(read_records([str(path)], "votes"), str(path))
    with ArenaLog(path) as log:
        return log.votes(), 0


def parse_votes(records: Iterable[Mapping[str, Any]], where: str) -> tuple[list[Vote], int]:
    """Return the votes of records, and the number that were there twice. Raises DataError: as `load_votes`."""
    found: dict[str, Vote] = {}
    repeated = 0
    for number, record in enumerate(records, 1):
        vote = _parse(record, number, f"{where}, record {number}")
        same = found.setdefault(vote.battle, vote)
        if same is vote:
            continue
        if same != vote:
            raise DataError(
                f"{where}, record {number}: the battle {shorten(vote.battle)!r} has another vote before",
                expected="one vote per battle", do="remove one of them",
            )  # fmt: skip
        repeated += 1
    return list(found.values()), repeated


def _parse(record: Mapping[str, Any], number: int, where: str) -> Vote:
    models = [record.get(name) for name in ("model_a", "model_b")]
    if not all(isinstance(name, str) and name for name in models):
        raise DataError(f"{where} has no models", expected="the fields model_a and model_b")
    winner = str(record.get("winner"))
    if winner not in WINNERS:
        raise DataError(
            f"{where}: the winner is {shorten(winner)!r}", expected=one_of(winner, tuple(WINNERS))
        )
    left, right = (_length(record.get(name)) for name in ("conversation_a", "conversation_b"))
    id_, given = record.get("question_id"), record.get("weight")
    try:
        weight, time = 1.0 if given is None else float(given), float(record.get("tstamp") or 0.0)
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: {error}", expected="numbers in the fields weight and tstamp") from error
    return Vote(
        f"record {number}" if id_ in (None, "") else str(id_), str(models[0]), str(models[1]), WINNERS[winner], weight,
        str(record.get("judge") or ""), left, right, time,
    )  # fmt: skip


def _length(conversation: Any) -> int:
    """Return the characters of the model's messages."""
    if not isinstance(conversation, Sequence) or isinstance(conversation, str):
        return 0
    return sum(
        len(str(m.get("content") or "")) for m in conversation if isinstance(m, Mapping) and m.get("role") == "assistant"
    )  # fmt: skip


def vote_records(battles: Iterable[Battle]) -> Iterator[dict[str, Any]]:
    """Yield the records of all battles with a vote."""
    names = {choice: winner for winner, choice in reversed(WINNERS.items())}
    for battle in battles:
        if battle.vote is None:
            continue
        yield {
            "question_id": battle.id, "model_a": battle.left, "model_b": battle.right, "winner": names[battle.vote.choice],
            "judge": battle.vote.voter, "tstamp": battle.vote.time, "weight": battle.weight,
            "conversation_a": _messages(battle, 0), "conversation_b": _messages(battle, 1),
        }  # fmt: skip


def preference_records(battles: Iterable[Battle]) -> Iterator[dict[str, Any]]:
    """Yield prompt, chosen and rejected of all battles of one turn with a winner and different answers."""
    for battle in battles:
        if battle.vote is None or battle.vote.choice not in ("left", "right") or len(battle.turns) != 1:
            continue
        turn = battle.turns[0]
        chosen, rejected = (
            (turn.left, turn.right) if battle.vote.choice == "left" else (turn.right, turn.left)
        )
        if chosen == rejected:
            continue
        if battle.settings.get("complete"):
            yield {"id": battle.id, "prompt": turn.prompt, "chosen": chosen, "rejected": rejected}
            continue
        answers = ([{"role": "assistant", "content": text}] for text in (chosen, rejected))
        prompt = [{"role": "user", "content": turn.prompt}]
        if system := battle.settings.get("system"):
            prompt.insert(0, {"role": "system", "content": system})
        yield {"id": battle.id, "prompt": prompt, **dict(zip(("chosen", "rejected"), answers, strict=True))}


def write_records(records: Iterable[Mapping[str, Any]], out: Path) -> int:
    """Write records as JSONL, and return their number."""
    n = 0
    with out.open("w", encoding="utf-8") as stream:
        for record in records:
            stream.write(json.dumps(record, ensure_ascii=False) + "\n")
            n += 1
    return n


def _messages(battle: Battle, side: int) -> list[dict[str, str]]:
    found = []
    for turn in battle.turns:
        answer = (turn.left, turn.right)[side]
        found += [{"role": "user", "content": turn.prompt}, {"role": "assistant", "content": answer}]
    return found
