"""Battles with a judge's votes instead of a person's.

The judge is a function (prompt, left answer, right answer) -> choice. The sides are drawn for each battle, so a judge that
prefers one side favors no model: its votes only add noise, and `Standings.left_share` shows the preference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from whorl.errors import ConfigError
from whorl.evals.arena.arena import AnswerMissingError, ModelArena
from whorl.evals.arena.battles import Choice

Judge = Callable[
    [str, str, str], Choice | None
]  # (prompt, left answer, right answer) -> choice, None for no verdict


@dataclass(frozen=True)
class JudgeCounts:
    """Results of a judge's battles: votes, battles without a verdict, and battles without an answer."""

    votes: int
    no_verdict: int
    missing: int


def judge_battles(
    arena: ModelArena,
    judge: Judge,
    prompts: Sequence[str],
    n: int,
    voter: str,
    on_battle: Callable[[int], None] = lambda done: None,
) -> JudgeCounts:
    """Run n battles over the prompts in turn, with the votes of a judge.

    Args:
        voter: name of the judge, stored with each vote.
        on_battle: called with the number of battles so far.

    Raises:
        ConfigError: there are no prompts.
    """
    if not prompts:
        raise ConfigError("there are no prompts", expected="at least one")
    votes = no_verdict = missing = 0
    for k in range(n):
        try:
            battle = arena.start(prompts[k % len(prompts)])
        except AnswerMissingError:
            missing += 1
        else:
            turn = battle.turns[0]
            choice = judge(turn.prompt, turn.left, turn.right)
            if choice is None:
                no_verdict += 1
            else:
                arena.vote(battle.id, choice, voter)
                votes += 1
        on_battle(k + 1)
    return JudgeCounts(votes, no_verdict, missing)
