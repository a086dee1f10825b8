"""When to promote a challenger: an anytime-valid test of its blind win rate, and guards.

A server sends a share of the requests to both models and shows the answers as left and right (`whorl serve --challenger`).
Each vote is a win W or a loss L of the challenger; ties are counted and not used.

    e-value     M = mean over p of a uniform grid on (1/2, 1) of  (2 p)^W (2 (1 - p))^L
    interval    all q with  Beta(W + 1/2, L + 1/2) / Beta(1/2, 1/2)  <  q^W (1 - q)^L / alpha

If the challenger wins at most half of the time, M is a non-negative supermartingale with mean at most 1. So it reaches
1 / alpha with probability at most alpha (Ville's inequality), at any time of reading or stopping. The interval
is a confidence sequence of the same kind: a beta-binomial mixture, Howard et al. 2021, arXiv:1810.08240, section 3.

The state is a pure fold over the completions and the feedback of a log, in any order of the two topics.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from scipy.optimize import brentq
from scipy.special import betaln

from whorl.log.event import LogRecord, UnreadableRecordError
from whorl.log.port import Log, OffsetRange
from whorl.loop.events import COMPLETIONS, FEEDBACK, SCHEMAS

ALPHA = 0.05
GRID = (np.arange(64) + 0.5) / 128 + 0.5  # of the win rate under the alternative
MAX_RISE = 0.02  # guard: of bits per byte
LENGTHS = (1 / 3, 1.5)  # guard: mean length of an answer, relative to the champion's
Decision = Literal["promote", "wait", "reject"]


def e_value(wins: int, losses: int) -> float:
    """Return the evidence against a win rate of at most a half; promote from 1 / alpha on."""
    logs = wins * np.log(2 * GRID) + losses * np.log(2 * (1 - GRID))
    return float(np.exp(min(700.0, np.logaddexp.reduce(logs) - math.log(len(GRID)))))


def win_rate_interval(wins: int, losses: int, alpha: float = ALPHA) -> tuple[float, float]:
    """Return the confidence sequence of the win rate; it holds at all times at once with probability 1 - alpha."""
    if not (n := wins + losses):
        return 0.0, 1.0
    bound = betaln(wins + 0.5, losses + 0.5) - betaln(0.5, 0.5) + math.log(alpha)

    def excess(q: float) -> float:
        return float(wins * np.log(q) + losses * np.log1p(-q) - bound)

    mean = min(1 - 1e-9, max(1e-9, wins / n))
    low = brentq(excess, 1e-12, mean) if wins else 0.0
    high = brentq(excess, mean, 1 - 1e-12) if losses else 1.0
    return float(low), float(high)


@dataclass
class GateState:
    """The fold. arms: completion -> (arm, digest, pair). votes: actor and pair -> (better, other, whether it is a tie).

    offsets: next one of each partition that `gate_state` has read.
    """

    arms: dict[str, tuple[str, str, str]] = field(default_factory=dict)
    votes: dict[tuple[str, str, str], tuple[str, str, bool]] = field(default_factory=dict)
    offsets: dict[tuple[str, int], int] = field(default_factory=dict)

    def apply(self, records: Iterable[LogRecord]) -> GateState:
        """Fold records of the completions and the feedback, and return this state."""
        for record in records:
            try:
                event = record.event(SCHEMAS)
            except UnreadableRecordError:
                continue
            data = event.data or {}
            if event.type == "completion.made" and data.get("arm"):
                self.arms[data["id"]] = (data["arm"], data["digest"], data["pair"])
            elif event.type == "actor.erased":
                self.votes = {key: vote for key, vote in self.votes.items() if key[0] != event.key}
            elif event.type == "feedback.given" and data["kind"] in ("better", "tie"):
                one, other = data["completion"], data["over"]
                self.votes[data["actor"], min(one, other), max(one, other)] = (
                    one,
                    other,
                    data["kind"] == "tie",
                )
        return self

    def counts(self) -> dict[tuple[str, str], dict[str, int]]:
        """Return (digest of the champion, of the challenger) -> wins, losses and ties of the challenger."""
        found = dict[tuple[str, str], dict[str, int]]()
        for one, other, is_tie in self.votes.values():
            arms = {
                arm: (name, digest, pair)
                for name in (one, other)
                for arm, digest, pair in [self.arms.get(name, ("", "", ""))]
            }
            if arms.keys() == {"champion", "challenger"} and arms["champion"][2] == arms["challenger"][2]:
                test = found.setdefault(
                    (arms["champion"][1], arms["challenger"][1]), {"wins": 0, "losses": 0, "ties": 0}
                )
                test["ties" if is_tie else "wins" if arms["challenger"][0] == one else "losses"] += 1
        return found


def gate_state(log: Log, state: GateState | None = None) -> dict[str, Any]:
    """Return the tests of a log, for the page: a list `tests` with the figures of `figures`, the newest challenger last.

    state: a fold of earlier records to continue, if the caller keeps one.
    """
    folded = state or GateState()
    topics = log.topics()
    for topic in (COMPLETIONS, FEEDBACK):
        if topic in topics:
            found = log.bounds(topic)
            starts = [max(b.first, folded.offsets.get((topic, p), 0)) for p, b in enumerate(found)]
            rest = [OffsetRange(start, b.next) for start, b in zip(starts, found, strict=True)]
            folded.apply(log.replay(topic, bounds=rest))
            folded.offsets |= {(topic, p): b.next for p, b in enumerate(found)}
    tests = [
        {"champion": old, "challenger": new, **figures(**count)}
        for (old, new), count in folded.counts().items()
    ]
    return {"alpha": ALPHA, "tests": tests}


def figures(wins: int, losses: int, ties: int = 0) -> dict[str, Any]:
    """Return counts, win rate with its interval, the e-value, and the decision by votes alone."""
    low, high = win_rate_interval(wins, losses)
    evidence = e_value(wins, losses)
    decision: Decision = "promote" if evidence >= 1 / ALPHA else "reject" if high < 0.5 else "wait"
    rate = wins / (wins + losses) if wins + losses else 0.5
    return {
        "wins": wins, "losses": losses, "ties": ties, "win_rate": rate, "low": low, "high": high,
        "e_value": evidence, "decision": decision,
    }  # fmt: skip


def failed_guards(comparison: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each guard of the step `compare` that the challenger fails."""
    found = []
    bits, length = comparison["bits_per_byte"], comparison["characters"]
    if None not in bits.values() and bits["challenger"] > bits["champion"] * (1 + MAX_RISE):
        found.append(
            f"bits per byte of held-out text rise from {bits['champion']:.3f} to {bits['challenger']:.3f}, "
            f"at most {MAX_RISE:.0%} are allowed"
        )
    if None not in length.values() and min(length.values()) > 0:
        ratio = length["challenger"] / length["champion"]
        if not LENGTHS[0] <= ratio <= LENGTHS[1]:
            bounds = f"{LENGTHS[0]:.2f} to {LENGTHS[1]:g}"
            found.append(f"answers are {ratio:.2f} times as long, allowed are {bounds}")
    return found
