"""Battles with a judge's votes instead of a person's.

The judge is a function (prompt, left answer, right answer) -> choice. The sides are drawn for each battle, so a judge that
prefers one side favors no model: its votes only add noise, and `Standings.left_share` shows the preference. A model as judge
(`BackendJudge`) reads both orders of a pair. Verdicts that disagree are a tie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from whorl.errors import ConfigError
from whorl.evals.arena.arena import AnswerMissingError, ModelArena
from whorl.evals.arena.battles import Choice
from whorl.evals.judge import TEMPLATE, compare_pairs
from whorl.evals.model.requests import ModelBackend, responses_of
from whorl.evals.tasks.template import Template

Judge = Callable[
    [str, str, str], Choice | None
]  # (prompt, left answer, right answer) -> choice, None for no verdict


MAX_TOKENS, RETRIES = 512, 2  # of a reply; after a reply without a verdict


@dataclass(frozen=True)
class JudgeCounts:
    """Results of a judge's battles: votes, battles without a verdict, and battles without an answer.

    reason: why the last battle without a verdict has none; "" for a judge without an attribute `reason`.
    """

    votes: int
    no_verdict: int
    missing: int
    reason: str = ""


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
    reason = ""
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
                reason = str(getattr(judge, "reason", ""))
            else:
                arena.vote(battle.id, choice, voter)
                votes += 1
        on_battle(k + 1)
    return JudgeCounts(votes, no_verdict, missing, reason)


class BackendJudge:
    """A model as judge, with the prompt and the verdicts of the kind `judge`."""

    def __init__(self, backend: ModelBackend) -> None:
        self.backend = backend
        self._template = Template(TEMPLATE, "the judge's prompt")
        self.reason = ""  # of the last pair without a verdict

    def __call__(self, prompt: str, left: str, right: str) -> Choice | None:
        """Return the choice of both orders; a tie if they disagree; None if one has no verdict."""
        asking = compare_pairs(
            self._template, prompt, [(left, right)], max_tokens=MAX_TOKENS, retries=RETRIES
        )
        requests = next(asking)
        while True:
            try:
                requests = asking.send(responses_of(self.backend, requests))
            except StopIteration as end:
                [found] = end.value
                break
        self.reason = found.reason
        choices: dict[tuple[float, float], Choice] = {(1.0, 1.0): "left", (0.0, 0.0): "right"}
        return choices.get(found.points, "tie") if found.points else None
