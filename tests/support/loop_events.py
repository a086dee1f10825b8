"""A synthetic log: completions of a byte-level model, and votes of raters with a known preference."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from whorl.log import Log, open_log
from whorl.loop.actor_keys import ActorKeys
from whorl.loop.events import (
    COMPLETIONS,
    FEEDBACK,
    CompletionMade,
    FeedbackGiven,
    LoggedAnswer,
    create_topics,
)


def open_synthetic_log(store: Path) -> tuple[Log, ActorKeys]:
    """Return the log and the keys of a store."""
    log = open_log(f"sqlite:{store / 'log' / 'events.db'}")
    create_topics(log)
    return log, ActorKeys(store / "log" / "keys.db")


def completion(name: str, prompt: str, answer: str, *, actor: str = "ada", **fields: str) -> CompletionMade:
    """Return a completion whose ids are bytes; 256 begins the prompt, 257 ends the answer."""
    answers = [LoggedAnswer(answer, [*answer.encode(), 257])]
    made = {"model": "m", "digest": "", **fields}
    return CompletionMade(
        name, actor=actor, prompt=prompt, prompt_ids=[256, *prompt.encode()], choices=answers, **made
    )  # type: ignore[arg-type]


def append(log: Log, keys: ActorKeys, *events: CompletionMade | FeedbackGiven, start: int = 0) -> None:
    """Append events, sealed; the time of each is its number."""
    for number, each in enumerate(events, start):
        if isinstance(each, CompletionMade):
            log.append(COMPLETIONS, keys.seal(each.event(float(number))))
        else:
            log.append(FEEDBACK, keys.seal(each.event(f"click{number}", float(number))))


def comparisons(digest: str, n: int, seed: int = 0) -> list[CompletionMade | FeedbackGiven]:
    """Return `n` pairs of answers "yes" and "nay" to prompts of digits; of the votes one in ten prefers "nay"."""
    rng, events = np.random.default_rng(seed), list[CompletionMade | FeedbackGiven]()
    for i in range(n):
        names = f"c{seed}-{i}-a", f"c{seed}-{i}-b"
        for name, answer in zip(names, ("yes", "nay"), strict=True):
            events.append(completion(name, f"{i}?", answer, digest=digest))
        better, worse = names if rng.random() < 0.9 else names[::-1]
        events.append(FeedbackGiven(f"rater{i % 7}", better, "better", over=worse, via="simulated"))
    return events
