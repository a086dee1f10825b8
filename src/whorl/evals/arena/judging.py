"""Battles with a judge's votes instead of a person's.

The judge is a function (prompt, left answer, right answer) -> choice. The sides are drawn for each battle, so a judge that
prefers one side favors no model: its votes only add noise, and `Standings.left_share` shows the preference. A model as judge
(`BackendJudge`) reads both orders of a pair. Verdicts that disagree are a tie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from whorl.errors import ConfigError, shorten
from whorl.evals.arena.arena import AnswerMissingError, ModelArena
from whorl.evals.arena.battles import Choice
from whorl.evals.judge import REMINDER, SYSTEM, TEMPLATE, Verdict, parse_verdict
from whorl.evals.model.requests import Completion, GenerateRequest, Message, Missing, ModelBackend, Response
from whorl.evals.tasks.template import Template

Judge = Callable[
    [str, str, str], Choice | None
]  # (prompt, left answer, right answer) -> choice, None for no verdict


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
    """A model as judge, with the prompt and the verdicts of the kind `judge`.

    Args:
        max_tokens: of a reply. retries: further requests after a reply without a verdict.
    """

    def __init__(self, backend: ModelBackend, max_tokens: int = 512, retries: int = 2) -> None:
        self.backend, self.max_tokens, self.retries = backend, max_tokens, retries
        self._template = Template(TEMPLATE, "the judge's prompt")
        self.reason = ""  # of the last pair without a verdict

    def __call__(self, prompt: str, left: str, right: str) -> Choice | None:
        """Return the choice of both orders; a tie if they disagree; None if one has no verdict."""
        first, second = self._verdict(prompt, left, right), self._verdict(prompt, right, left)
        if first is None or second is None:
            return None
        choices: dict[tuple[Verdict, Verdict], Choice] = {("A", "B"): "left", ("B", "A"): "right"}
        return choices.get((first, second), "tie")

    def _verdict(self, prompt: str, first: str, second: str) -> Verdict | None:
        text = self._template({"question": prompt, "first": first, "second": second}, "battle")
        talk: list[Message] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
        for _ in range(1 + self.retries):
            found: list[Response] = []
            request = GenerateRequest(tuple(talk), self.max_tokens)
            self.backend.respond([request], lambda _, response, found=found: found.append(response))  # type: ignore[misc]
            reply = found[0] if found else None
            if not isinstance(reply, Completion):
                self.reason = f"the judge gave no reply: {reply.reason if isinstance(reply, Missing) else ''}"
                return None
            if verdict := parse_verdict(reply.text):
                return verdict
            self.reason = f"no verdict in {1 + self.retries} replies: {shorten(reply.text, 80)!r}"
            talk += [
                {"role": "assistant", "content": reply.text or "(empty)"},
                {"role": "user", "content": REMINDER},
            ]
        return None
