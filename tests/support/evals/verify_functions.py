"""Verifiers of one's own, as a user would write them; called in another process."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from whorl.evals.verify import Verdict, VerifiableTask


def length(task: VerifiableTask, completion: str) -> float:
    print("to standard error, and not into the answers")
    return len(completion) / 10


def same(task: VerifiableTask, completion: str) -> bool:
    return completion == task.answer and dict(task.messages[0])["role"] == "user"


def told(task: VerifiableTask, completion: str) -> Verdict:
    return Verdict(0.25, False, "nearly: so")


def raises(task: VerifiableTask, completion: str) -> float:
    raise ValueError("no")


def hangs(task: VerifiableTask, completion: str) -> float:
    while True:
        pass


def tells_and_hangs(task: VerifiableTask, completion: str) -> float:
    Path(task.answer).write_text(f"{os.getpid()}\n")
    while True:
        time.sleep(1)


def leaves(task: VerifiableTask, completion: str) -> float:
    os._exit(0)


def not_a_number(task: VerifiableTask, completion: str) -> Any:
    return float("nan")
