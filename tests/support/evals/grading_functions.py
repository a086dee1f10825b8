"""Graders as a user would write them; called in a separate process."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from whorl.evals.grading import Grade


def length(gold: str, text: str) -> float:
    print("goes to standard error, not into the replies")
    return len(text) / 10


def same(gold: str, text: str, *, messages: Sequence[Any]) -> bool:
    return text == gold and dict(messages[0])["role"] == "user"


def partial(gold: str, text: str, **named: Any) -> Grade:
    return Grade(0.25, False, f"nearly: {sorted(named)}")


def raises(gold: str, text: str) -> float:
    raise ValueError("no")


def hangs(gold: str, text: str) -> float:
    while True:
        pass


def writes_pid_and_hangs(gold: str, text: str) -> float:
    Path(gold).write_text(f"{os.getpid()}\n")
    while True:
        time.sleep(1)


def exits(gold: str, text: str) -> float:
    os._exit(0)


def not_a_number(gold: str, text: str) -> Any:
    return float("nan")


def cites(gold: str, text: str, *, word: str) -> Grade:
    found = float(word in text)
    return Grade(found, found == 1, scores={"cites": found, "words": len(text.split())})
