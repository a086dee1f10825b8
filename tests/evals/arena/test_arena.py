"""Battles over models: blind answers, conversations, missing answers, ratings that move, votes of a judge."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.support.evals.backend import FakeBackend, by_text

from whorl.errors import ConfigError, DataError
from whorl.evals.arena.arena import AnswerMissingError, ModelArena, current_points
from whorl.evals.arena.arena_log import ArenaLog, VoteConflictError
from whorl.evals.arena.judging import BackendJudge, judge_battles
from whorl.evals.arena.options import AnswerSettings
from whorl.evals.model.requests import Completion, GenerateRequest, Missing, Request, Response


def arena(path: Path, *lengths: int, **options: object) -> ModelArena:
    """Return an arena of models m0, m1, ... whose answers are so long."""
    models = {f"m{k}": by_text(lambda text, n=n: "x" * n) for k, n in enumerate(lengths)}
    return ModelArena(models, ArenaLog(path / "log.sqlite"), np.random.default_rng(0), **options)  # type: ignore[arg-type]


def test_battle_has_answers_of_two_models_on_random_sides(tmp_path: Path) -> None:
    one = arena(tmp_path, 1, 2, 3)
    sides = set()
    for _ in range(40):
        battle = one.start("Hello")
        turn = battle.turns[0]
        assert (f"m{len(turn.left) - 1}", f"m{len(turn.right) - 1}") == (battle.left, battle.right)
        sides.add((battle.left, battle.right))
    assert len(sides) == 6  # each pair on both sides


def test_vote_moves_ratings_and_names_models(tmp_path: Path) -> None:
    one = arena(tmp_path, 1, 2)
    battle = one.start("Hello")
    assert one.standings() is None
    outcome = one.vote(battle.id, "left", "me")
    assert (outcome.left, outcome.right, outcome.counted) == (battle.left, battle.right, True)
    assert outcome.before == (1000, 1000) and outcome.after[0] > 1000 > outcome.after[1]
    again = one.vote(battle.id, "left", "me")
    assert not again.counted and (again.before, again.after) == (outcome.before, outcome.after)
    with pytest.raises(VoteConflictError):
        one.vote(battle.id, "tie", "me")
    found = one.standings()
    assert found is not None and found.votes == 1 and found.rows[0].model == battle.left
    assert found.rows[0].points == pytest.approx(outcome.after[0])
    assert current_points(one.log.votes(), one.names)[battle.right] == pytest.approx(outcome.after[1])


def test_conversation_goes_on_with_each_models_own_answers(tmp_path: Path) -> None:
    seen: list[GenerateRequest] = []

    def answer(request: Request) -> Response:
        assert isinstance(request, GenerateRequest)
        seen.append(request)
        return Completion(f"answer {len(request.prompt)} of {len(seen)}")

    models = {"a": FakeBackend(answer), "b": FakeBackend(answer)}
    settings = AnswerSettings(system="Be brief.", max_tokens=9, temperature=0.5)
    one = ModelArena(models, ArenaLog(tmp_path / "log.sqlite"), np.random.default_rng(0), settings)
    battle = one.start("First")
    battle = one.go_on(battle.id, "Second")
    assert [t.prompt for t in battle.turns] == ["First", "Second"]
    last = [r for r in seen if len(r.prompt) == 4]
    assert {r.prompt[2]["content"] for r in last} == {battle.turns[0].left, battle.turns[0].right}  # type: ignore[index]
    for request in seen:
        assert (request.max_tokens, request.temperature) == (9, 0.5)
        assert request.prompt[0] == {"role": "system", "content": "Be brief."}
    assert len({r.seed for r in seen}) == 1
    one.vote(battle.id, "tie")
    with pytest.raises(VoteConflictError, match="conversation has ended"):
        one.go_on(battle.id, "Third")


def test_missing_answer_is_recorded_and_has_no_vote(tmp_path: Path) -> None:
    models = {"secret": by_text(lambda text: Missing("status 500 of secret")), "b": by_text(lambda text: "y")}
    one = ModelArena(models, ArenaLog(tmp_path / "log.sqlite"), np.random.default_rng(0))
    with pytest.raises(AnswerMissingError) as raised:
        one.start("Hello")
    assert "secret" not in str(raised.value)
    assert one.log.missing() == {"secret": 1} and list(one.log.battles()) == []


def test_models_without_chat_get_the_text(tmp_path: Path) -> None:
    got: list[Request] = []
    model = FakeBackend(lambda request: got.append(request) or Completion("!"))  # type: ignore[func-returns-value]
    settings = AnswerSettings(complete=True, stop=("\n",))
    one = ModelArena({"a": model, "b": model}, ArenaLog(tmp_path / "l"), np.random.default_rng(0), settings)
    battle = one.start("def f(")
    assert [r.prompt for r in got] == ["def f(", "def f("]  # type: ignore[union-attr]
    with pytest.raises(DataError, match="continue texts"):
        one.go_on(battle.id, "more")


def test_judge_ranks_models_and_failures_are_counted(tmp_path: Path) -> None:
    one = arena(tmp_path, 1, 5, 9, sampling="information")
    calls: list[int] = []

    def judge(prompt: str, left: str, right: str) -> str | None:
        assert prompt in ("p", "q")
        if len(calls) % 10 == 9:
            return None
        noisy = len(calls) % 7 == 0
        return "left" if (len(left) > len(right)) != noisy else "right"

    done = judge_battles(one, judge, ["p", "q"], 150, "judge:x", calls.append)  # type: ignore[arg-type]
    assert calls == list(range(1, 151)) and done.votes == 135 and done.no_verdict == 15 and done.missing == 0
    found = one.standings(draws=0)
    assert found is not None and [r.model for r in found.rows] == ["m2", "m1", "m0"]
    assert {v.voter for v in one.log.votes()} == {"judge:x"}
    assert len({v.weight for v in one.log.votes()}) > 3


def test_impossible_arenas_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="an arena of 1 models"):
        arena(tmp_path, 1)
    with pytest.raises(ConfigError, match="sampling 'clever'"):
        arena(tmp_path, 1, 2, sampling="clever")
    one = arena(tmp_path, 1, 2)
    with pytest.raises(DataError, match="the prompt is empty"):
        one.start("  \n")
    with pytest.raises(ConfigError, match="there are no prompts"):
        judge_battles(one, lambda p, a, b: "tie", [], 3, "j")


def test_model_as_judge_reads_both_orders_and_is_reminded() -> None:
    def reply(text: str) -> str:
        if text.startswith("Your reply has no verdict"):
            return "[[A]]"
        first, second = (
            len(text.split(f"[Answer {k} begins]\n")[1].split(f"\n[Answer {k}")[0]) for k in "AB"
        )
        return "[[A]]" if first > second else "[[B]]" if first < second else "I cannot decide."

    judge = BackendJudge(by_text(reply))
    assert judge("p", "long answer", "short") == "left" and judge("p", "short", "long answer") == "right"
    assert judge("p", "equal", "alike") == "tie"  # prefers the first in both orders
    for reply_text, reason in (
        ("prose", "no verdict in 3 replies: 'prose'"),
        (Missing("down"), "no reply: down"),
    ):
        silent = BackendJudge(by_text(lambda text, found=reply_text: found))  # type: ignore[misc]
        assert silent("p", "a", "b") is None and reason in silent.reason
    assert BackendJudge(by_text(lambda text: "[[tie]]"))("p", "a", "b") == "tie"


def test_votes_of_another_process_count(tmp_path: Path) -> None:
    one, other = arena(tmp_path, 1, 2), arena(tmp_path, 1, 2)
    for k in range(6):
        voting = (one, other)[k % 2]
        voting.vote(voting.start("Hello").id, "left")
        assert [len(a._votes()) for a in (one, other)] == [k + 1, k + 1]
        assert {v.battle for v in one._votes()} == {v.battle for v in one.log.votes()}
    assert current_points(one._votes(), one.names) == pytest.approx(
        current_points(other.log.votes(), one.names)
    )


def test_log_of_other_models_gives_no_standings(tmp_path: Path) -> None:
    one = arena(tmp_path, 1, 2)
    one.vote(one.start("Hello").id, "left")
    model = by_text(lambda text: "z")
    other = ModelArena({"x": model, "y": model}, ArenaLog(tmp_path / "log.sqlite"), np.random.default_rng(0))
    assert other.standings() is None
    outcome = other.vote(other.start("Hello").id, "tie")
    assert outcome.before == (1000, 1000) and outcome.after == pytest.approx((1000, 1000))
    found = other.standings()
    assert found is not None and found.votes == 1 and {r.model for r in found.rows} == {"x", "y"}
